"""The promise of an asynchronous collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sparkhvd._core import CoreError, Operation
from sparkhvd.comm.failures import translate
from sparkhvd.deadline import Deadline
from sparkhvd.errors import CollectiveError, NotInitializedError

T = TypeVar("T")
U = TypeVar("U")


class Pending(Protocol):
    """What the core is doing."""

    def done(self) -> bool:
        """Whether ``wait()`` would return or raise at once."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait for the end; raises ``CoreError``."""
        ...


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """Operations that run together."""

    operations: tuple[Operation, ...]

    def done(self) -> bool:
        """Whether all are done."""
        return all(operation.done() for operation in self.operations)

    def wait(self, timeout_s: float) -> None:
        """Wait for all, also when one fails; raises what the first one that failed says."""
        deadline = Deadline.after(timeout_s)
        failure: CoreError | None = None
        for operation in self.operations:
            try:
                operation.wait(deadline.remaining())
            except CoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure


@dataclass(frozen=True, slots=True)
class Handle(Generic[T]):
    """A submitted collective; ``wait()`` returns its result, as often as it is asked.

    Attributes:
        name: what the ranks know the operation by.
    """

    name: str
    operation: Pending = field(repr=False)
    timeout: float = field(repr=False)
    finish: Callable[[], T] = field(repr=False)

    def done(self) -> bool:
        """Whether ``wait()`` would return or raise at once."""
        return self.operation.done()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: seconds, the communicator's ``collective_timeout`` by default.

        Raises:
            MismatchError: the ranks disagree on shape, dtype, operation, root or group.
            PeerLostError: a rank that takes part is gone, or aborted the job.
            DeadlineExceededError: not all ranks took part in time.
            CollectiveError: the operation failed otherwise, or the communicator was closed before it was done.
        """
        try:
            self.operation.wait(self.timeout if timeout is None else timeout)
        except CoreError as error:
            failure = translate(error)
            if isinstance(failure, NotInitializedError):
                reason = f"{self.name!r} was pending when its communicator was closed: {failure}"
                raise CollectiveError(reason) from error
            raise failure from error
        return self.finish()

    def then(self, step: Callable[[T], U]) -> Handle[U]:
        """The same operation with ``step`` applied to its result by ``wait()``."""
        finish = self.finish
        return Handle(self.name, self.operation, self.timeout, lambda: step(finish()))
