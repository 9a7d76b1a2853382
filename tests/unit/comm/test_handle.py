from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkhvd._core import CoreError
from sparkhvd.comm.handle import Handle, PendingGroup, Waits
from sparkhvd.errors import CollectiveError, DeadlineExceededError

_SECONDS = 30.0


class FinishedOperation:
    """An operation that is done, and notes the streams that wait for it."""

    def __init__(self, failures=0, seconds=0.0):
        self.streams = []
        self.failures = failures
        self.seconds = seconds

    def done(self):
        return True

    def wait(self, timeout_s):
        return self.seconds

    def let_wait(self, stream):
        self.streams.append(stream)
        if len(self.streams) <= self.failures:
            raise CoreError("internal", "the stream was destroyed")

    def completed_on_device(self):
        return True


def handle_of(operation, known=None):
    return Handle("sum", operation, Waits(_SECONDS), known)


def wait_in_two_threads(derive):
    """Return the results of two threads, where the second waits while the first is in the handle's step.

    Args:
        derive: returns a handle for a function that its step must call.
    """
    begun, second_waits = threading.Event(), threading.Event()

    def step():
        begun.set()
        second_waits.wait(0.2)  # reached by a second call of the step alone
        return object()

    handle = derive(step)

    def second():
        assert begun.wait(_SECONDS)
        return handle.wait()

    with ThreadPoolExecutor(2) as pool:
        return [future.result(_SECONDS) for future in (pool.submit(handle.wait), pool.submit(second))]


def test_two_threads_that_wait_at_once_receive_the_result_of_one_step():
    calls = []

    def derive(step):
        return handle_of(FinishedOperation(), 1).then(lambda number: (calls.append(number), step()))

    one, other = wait_in_two_threads(derive)
    assert calls == [1]
    assert one is other


def test_a_thread_does_not_wait_forever_for_the_step_of_another_thread():
    begun, may_end = threading.Event(), threading.Event()

    def step(number):
        begun.set()
        return may_end.wait(_SECONDS), number

    handle = Handle("sum", FinishedOperation(), Waits(0.01), 1).then(step)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(handle.wait)
        assert begun.wait(_SECONDS)
        try:
            with pytest.raises(DeadlineExceededError, match="Another thread that waits for 'sum' has not processed"):
                handle.wait()
        finally:
            may_end.set()
        assert first.result(_SECONDS) == handle.wait() == (True, 1)


def test_a_stream_waits_once_although_two_threads_wait_at_once():
    operation = FinishedOperation()

    def derive(step):
        return handle_of(operation, 1).behind(lambda: (step(), 7)[1])

    assert wait_in_two_threads(derive) == [1, 1]
    assert operation.streams == [7]


def test_a_step_runs_once_for_repeated_waits_and_again_after_a_failure():
    operation = FinishedOperation(failures=1)
    handle = handle_of(operation, 1).behind(lambda: 7).then(lambda number: [number])
    with pytest.raises(CollectiveError, match="the stream was destroyed"):
        handle.wait()
    assert handle.wait() is handle.wait()
    assert operation.streams == [7, 7]


def test_the_time_of_a_wait_is_the_sum_over_the_operations_of_a_group():
    handle = handle_of(PendingGroup((FinishedOperation(seconds=2.0), FinishedOperation(seconds=0.5))))
    handle.waits.seconds = 1.0
    handle.wait()
    assert handle.waits.seconds == 3.5
