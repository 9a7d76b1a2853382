"""Prefetching: threads produce results in advance, in order, up to a limit on the bytes in the queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from sparkhvd.deadline import Deadline

T = TypeVar("T")

# One job: a function that yields results, each with its size in bytes.
Job = Callable[[], Iterator[tuple[T, int]]]

# A thread whose Store does not answer ends at the deadline of its request, after the reader has been closed.
_JOIN_TIMEOUT = 5.0
# Limit on the jobs in progress, since results of small jobs never reach the limit of bytes.
_MAX_JOBS = 64


class StoppedError(Exception):
    """The results are no longer needed."""


class StopSignal:
    """Lets another thread stop the epochs that it was passed to, whichever source reads them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards everything below; the collection of an epoch may interrupt its holder
        self._stopped = False
        self._actions: list[Callable[[], None]] = []

    def stop(self) -> None:
        """Stop: epochs that are being read, and later ones, raise ``StoppedError`` instead of waiting for rows."""
        with self._lock:
            self._stopped = True
            actions = list(self._actions)
        for action in actions:
            action()

    @contextmanager
    def calling(self, action: Callable[[], None]) -> Iterator[None]:
        """Call ``action`` if the stop comes within ``with``, or has come before."""
        with self._lock:
            self._actions.append(action)
            stopped = self._stopped
        try:
            if stopped:
                action()
            yield
        finally:
            with self._lock:
                self._actions.remove(action)


class Prefetcher(Generic[T]):
    """Iterates over the results of jobs in order, while threads work on the next jobs.

    Args:
        jobs: the jobs in order; the threads advance the iterator, one at a time.
        limit: the most bytes of results in the queue; the next result may always be queued, however large it is.
        threads: the number of jobs that run at once.
        name: the name of the threads.
        timeout: seconds to wait for one result.
        waiting_for: the purpose of the wait, for the error of a timeout.
    """

    def __init__(
        self, jobs: Iterable[Job[T]], *, limit: int, threads: int, name: str, timeout: float, waiting_for: str
    ) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._jobs: Iterator[Job[T]] | None = iter(jobs)
        self._queue: deque[_JobResults[T]] = deque()  # the jobs in progress, in order
        self._bytes = 0
        self._stopped = False
        self._limit = limit
        self._timeout = timeout
        self._waiting_for = waiting_for
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(threads)]
        self._running = threads
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the system starts no more threads; those that have started must not stay
            self.stop()
            raise

    def __iter__(self) -> Iterator[T]:
        while True:
            result = self._take()
            if result is None:
                return
            yield result[0]

    def stop(self) -> None:
        """Stop: a thread that waits for a result stops at once, the other threads soon."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait a few seconds until the threads have ended; after ``stop``."""
        deadline = Deadline.after(_JOIN_TIMEOUT)
        for thread in self._threads:
            thread.join(deadline.remaining())

    def _take(self) -> tuple[T] | None:
        deadline = Deadline.after(self._timeout)
        with self._changed:
            while True:
                if self._stopped:
                    raise StoppedError
                if self._queue and self._queue[0].results:
                    result, size = self._queue[0].results.popleft()
                    self._bytes -= size
                    self._changed.notify_all()
                    return (result,)
                if self._queue and self._queue[0].done:
                    entry = self._queue.popleft()
                    if entry.error is not None:
                        raise entry.error
                    self._changed.notify_all()
                elif not self._queue and not self._running:
                    return None
                else:
                    deadline.check(self._waiting_for)
                    self._changed.wait(deadline.remaining())

    def _work(self) -> None:
        try:
            while (entry := self._next_job()) is not None:
                self._fill(entry)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _next_job(self) -> _JobResults[T] | None:
        with self._changed:
            while self._queue and (self._bytes >= self._limit or len(self._queue) >= _MAX_JOBS) and not self._is_over():
                # A slow consumer is no error, so there is no deadline; the loop checks that the consumer still exists.
                self._changed.wait(1.0)
            if self._is_over() or self._jobs is None:
                return None
            entry = _JobResults[T]()
            try:
                job = next(self._jobs, None)
            except Exception as error:  # noqa: BLE001  (the consumer raises it)
                entry.done, entry.error, job = True, error, None
            else:
                if job is None:
                    self._jobs = None
                    return None
            entry.job = job
            self._queue.append(entry)
            self._changed.notify_all()
            return entry

    def _fill(self, entry: _JobResults[T]) -> None:
        error = entry.error
        try:
            for result, size in entry.job() if entry.job is not None else ():
                self._put(entry, result, size)
        except StoppedError:
            pass
        except BaseException as caught:  # noqa: BLE001  (the consumer raises it, even the SystemExit of a function)
            error = caught
        with self._changed:
            entry.done, entry.error = True, error
            self._changed.notify_all()

    def _put(self, entry: _JobResults[T], result: T, size: int) -> None:
        with self._changed:
            while not self._is_over():
                # The first job may always add one result; otherwise the results of later jobs could block it.
                if self._bytes + size <= self._limit or (entry is self._queue[0] and not entry.results):
                    entry.results.append((result, size))
                    self._bytes += size
                    self._changed.notify_all()
                    return
                self._changed.wait(1.0)
        raise StoppedError

    def _is_over(self) -> bool:
        """Return whether nothing will take further results: after ``stop``, or when the interpreter ends."""
        return self._stopped or not threading.main_thread().is_alive()


class _JobResults(Generic[T]):
    """The results of one job that have not been taken yet."""

    def __init__(self) -> None:
        self.job: Job[T] | None = None
        self.results: deque[tuple[T, int]] = deque()
        self.done = False
        self.error: BaseException | None = None
