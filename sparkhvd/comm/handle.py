"""The promise of an asynchronous collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sparkhvd._core import CoreError, Operation
from sparkhvd.comm.failures import translate
from sparkhvd.deadline import Deadline
from sparkhvd.errors import CollectiveError, NotInitializedError

T = TypeVar("T")
U = TypeVar("U")

# A wait inside the core cannot be interrupted by a signal; between two of these slices Python handles Ctrl-C.
_SLICE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Handle(Generic[T]):
    """A submitted collective; ``wait()`` returns its result, as often as it is asked.

    Attributes:
        name: what the ranks know the operation by.
    """

    name: str
    operation: Operation = field(repr=False)
    timeout: float = field(repr=False)
    finish: Callable[[Operation], T] = field(repr=False)

    def done(self) -> bool:
        """Whether ``wait()`` would return or raise at once."""
        return self.operation.done()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: seconds, the communicator's ``collective_timeout`` by default.

        Raises:
            MismatchError: the ranks disagree on shape, dtype, operation or root.
            PeerLostError: a rank that takes part is gone, or aborted the job.
            DeadlineExceededError: not all ranks took part in time.
            CollectiveError: the operation failed otherwise, or the communicator was closed before it was done.
        """
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        while not self._finished_within(deadline):
            pass
        return self.finish(self.operation)

    def then(self, step: Callable[[T], U]) -> Handle[U]:
        """The same operation with ``step`` applied to its result by ``wait()``."""
        finish = self.finish
        return Handle(self.name, self.operation, self.timeout, lambda operation: step(finish(operation)))

    def _finished_within(self, deadline: Deadline) -> bool:
        remaining = deadline.remaining()
        try:
            self.operation.wait(min(remaining, _SLICE_SECONDS))
        except CoreError as error:
            if error.args[0] == "timeout" and remaining > _SLICE_SECONDS and not self.operation.done():
                return False
            failure = translate(error)
            if isinstance(failure, NotInitializedError):
                raise CollectiveError(
                    f"{self.name!r} was pending when its communicator was closed: {failure}"
                ) from error
            raise failure from error
        return True
