from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest

from sparkhvd.data.read.prefetch import Prefetcher
from sparkhvd.errors import DeadlineExceededError


@contextmanager
def prefetcher(jobs, *, limit=10, threads=3, timeout=60.0):
    iterator = Prefetcher(
        jobs, limit=limit, threads=threads, name="test-prefetch", timeout=timeout, waiting_for="the next result"
    )
    try:
        yield iterator
    finally:
        iterator.stop()
        iterator.join()


def results(job, count, size=1):
    return ((f"{job}.{number}", size) for number in range(count))


def test_results_are_returned_in_the_order_of_the_jobs():
    with prefetcher([partial(results, job, job % 4) for job in range(50)]) as iterator:
        assert list(iterator) == [f"{job}.{number}" for job in range(50) for number in range(job % 4)]


def test_queued_results_are_bounded_by_bytes_but_a_single_large_one_passes():
    made, most = [], []

    def job():
        for number in range(20):
            made.append(number)
            yield number, 4

    with prefetcher([job], limit=10, threads=1) as iterator:
        for taken, _ in enumerate(iterator):
            most.append(len(made) - taken)
    assert max(most) <= 4, "the queue held more than two results, besides the one in use and the one in preparation"
    with prefetcher([partial(results, 0, 3, size=100)], limit=10) as iterator:
        assert len(list(iterator)) == 3


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_an_error_is_raised_in_place_of_the_missing_result(kind):
    def broken():
        yield "1.0", 1
        raise kind("in the second job")

    with prefetcher([partial(results, 0, 2), broken, partial(results, 2, 2)]) as iterator:
        taken = iter(iterator)
        assert [next(taken) for _ in range(3)] == ["0.0", "0.1", "1.0"]
        with pytest.raises(kind, match="in the second job"):
            next(taken)


def test_an_error_of_the_iterator_of_jobs_is_raised():
    def jobs():
        yield partial(results, 0, 1)
        raise RuntimeError("no more jobs")

    with prefetcher(jobs()) as iterator, pytest.raises(RuntimeError, match="no more jobs"):
        list(iterator)


def test_a_wait_ends_at_its_deadline_and_the_error_names_its_purpose():
    never = threading.Event()

    def job():
        never.wait(60)
        yield 1, 1

    with prefetcher([job], timeout=0.05) as iterator:
        with pytest.raises(DeadlineExceededError, match="for the next result"):
            next(iter(iterator))
        never.set()


def test_stopping_ends_threads_that_wait_for_space():
    with prefetcher([partial(results, job, 100, size=5) for job in range(10)], limit=10) as iterator:
        next(iter(iterator))
    assert [thread for thread in threading.enumerate() if thread.name == "test-prefetch"] == []


def test_a_hanging_job_is_abandoned_after_a_few_seconds():
    answer, begins = threading.Event(), threading.Event()

    def job():
        begins.set()
        answer.wait(100)
        yield 0, 1

    began = time.monotonic()
    try:
        with prefetcher([job]):
            assert begins.wait(30)
            began = time.monotonic()
        assert time.monotonic() - began < 30
    finally:
        answer.set()
