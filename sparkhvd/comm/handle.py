"""The handle of an asynchronous collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from sparkhvd._core import CoreError, Operation
from sparkhvd.comm.failures import translate, translated
from sparkhvd.deadline import Deadline
from sparkhvd.errors import CollectiveError, ConfigError, DeadlineExceededError, NotInitializedError

T = TypeVar("T")
U = TypeVar("U")

_GPU_SECONDS = 0.0001


class PendingOperation(Protocol):
    """An operation of the core that is in progress."""

    def done(self) -> bool:
        """Return whether ``wait()`` would return or raise at once."""
        ...

    def wait(self, timeout_s: float) -> float:
        """Wait for the end, and return the seconds that this took; raise ``CoreError`` on failure."""
        ...

    def let_wait(self, stream: int) -> None:
        """Make a CUDA stream wait for the result; call it after ``wait()``. Raise ``CoreError`` on failure."""
        ...

    def completed_on_device(self) -> bool:
        """Return whether a CUDA device has completed it; call this after ``wait()``. Raise ``CoreError`` on failure."""
        ...


@dataclass(frozen=True, slots=True)
class PendingGroup:
    """Operations that run together."""

    operations: tuple[Operation, ...]

    def done(self) -> bool:
        """Return whether all operations are done."""
        return all(operation.done() for operation in self.operations)

    def wait(self, timeout_s: float) -> float:
        """Wait for all operations, even after a failure; then raise the first failed operation's error."""
        deadline = Deadline.after(timeout_s)
        waited = 0.0
        failure: CoreError | None = None
        for operation in self.operations:
            try:
                waited += operation.wait(deadline.remaining())
            except CoreError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return waited

    def let_wait(self, stream: int) -> None:
        """Make a CUDA stream wait for all results."""
        for operation in self.operations:
            operation.let_wait(stream)

    def completed_on_device(self) -> bool:
        """Return whether a CUDA device has also completed all operations."""
        return all(operation.completed_on_device() for operation in self.operations)


@dataclass(slots=True)
class Waits:
    """The waiting times that the handles of a channel share.

    Attributes:
        timeout: seconds to wait for a result by default.
        seconds: total time waited for results so far; approximate if several threads wait at once.
    """

    timeout: float
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Handle(Generic[T]):
    """A submitted collective; ``wait()`` returns its result and may be called again. Do not modify a handle.

    Thousands may be pending at a time, so a handle consists of as few objects as possible: a result in the caller's
    memory is known before the operation is done and needs no function.

    Attributes:
        name: the name by which the ranks match the operation.
    """

    name: str
    operation: PendingOperation = field(repr=False)
    waits: Waits = field(repr=False)
    known: T | None = field(default=None, repr=False)
    finish: Callable[[], T] | None = field(default=None, repr=False)  # makes the result if it is not known

    def done(self) -> bool:
        """Return whether ``wait()`` would return or raise at once."""
        return self.operation.done()

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the result.

        Args:
            timeout: seconds, the communicator's ``collective_timeout`` by default.

        Raises:
            MismatchError: the ranks disagree on shape, dtype, operation, root or group.
            PeerLostError: a participating rank has ended, or aborted the job.
            DeadlineExceededError: not all ranks took part in time.
            CollectiveError: the operation failed otherwise, or the communicator was closed before it was done.
        """
        waits = self.waits
        try:
            waited = self.operation.wait(waits.timeout if timeout is None else timeout)
        except CoreError as error:
            failure = translate(error)
            if isinstance(failure, NotInitializedError):
                reason = f"{self.name!r} was pending when its communicator was closed: {failure}"
                raise CollectiveError(reason) from None
            raise failure from None
        waits.seconds += waited
        return self._result()

    def __call__(self) -> T:
        """Return the result, as Horovod's handles of sparse tensors do."""
        return self.wait()

    def then(self, step: Callable[[T], U]) -> Handle[U]:
        """Return a handle whose first ``wait()`` applies ``step`` to the result; later calls return the same object.

        A thread that waits while another one is in ``step`` receives that result, too.
        """
        result = self._result
        return Handle(self.name, self.operation, self.waits, finish=self._once(lambda: step(result())))

    def behind(self, stream: Callable[[], int]) -> Handle[T]:
        """Return a handle for a CUDA device, whose first ``wait()`` makes ``stream()`` wait for the operation.

        Later calls of ``wait()`` return the same result.
        """

        def finish() -> T:
            with translated():
                self.operation.let_wait(stream())
            return self._result()

        return Handle(self.name, self.operation, self.waits, finish=self._once(finish))

    def with_device_wait(self) -> Handle[T]:
        """Return a handle for a CUDA device, whose first ``wait()`` also waits until the device is done."""

        def finish() -> T:
            deadline = Deadline.after(self.waits.timeout)
            while not self._is_completed_on_device():
                if deadline.expired():
                    message = f"The GPU did not complete {self.name!r} within {self.waits.timeout:g} s."
                    raise DeadlineExceededError(message)
                time.sleep(_GPU_SECONDS)
            return self._result()

        return Handle(self.name, self.operation, self.waits, finish=self._once(finish))

    def _is_completed_on_device(self) -> bool:
        with translated():
            return self.operation.completed_on_device()

    def with_result(self, result: U) -> Handle[U]:
        """Return a handle of the same operation with a known result."""
        return Handle(self.name, self.operation, self.waits, result)

    def _result(self) -> T:
        return self.known if self.finish is None else self.finish()  # type: ignore[return-value]  # T may be None

    def _once(self, make: Callable[[], U]) -> Callable[[], U]:
        """Return a function that calls ``make`` until it succeeds, by one thread at a time, and returns that result."""
        lock = threading.Lock()
        results: list[U] = []  # guarded by lock
        name, waits = self.name, self.waits

        def finish() -> U:
            if not lock.acquire(timeout=min(waits.timeout, threading.TIMEOUT_MAX)):
                raise DeadlineExceededError(
                    f"Another thread that waits for {name!r} has not processed its result within {waits.timeout:g} s."
                )
            try:
                if not results:
                    results.append(make())
                return results[0]
            finally:
                lock.release()

        return finish


def poll(handle: Handle[T]) -> bool:
    """Return whether the operation has ended, so that ``synchronize(handle)`` would return or raise at once."""
    return _require_handle(handle).done()


def synchronize(handle: Handle[T]) -> T:
    """Wait for an asynchronous collective and return its result.

    Raises:
        MismatchError: the ranks disagree on shape, dtype, operation, root or group.
        PeerLostError: a participating rank has ended, or aborted the job.
        DeadlineExceededError: not all ranks took part in time.
        CollectiveError: the operation failed otherwise, or the communicator was closed before it was done.
        ConfigError: ``handle`` is not a handle.
    """
    return _require_handle(handle).wait()


def _require_handle(handle: Handle[T]) -> Handle[T]:
    if not isinstance(handle, Handle):
        raise ConfigError(f"{handle!r} is not a handle; pass the return value of an *_async function.")
    return handle
