"""The order in which jobs start, and the limit on the slots that they hold."""

from __future__ import annotations

import logging
import random
import threading

import pytest

from sparkhvd.driver.spark.gang_queue import Gang, GangQueue, called_by
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.errors import LaunchError
from tests.waiting import wait_for


class Jobs:
    """Jobs that run in threads and hold their slots until ``end``."""

    def __init__(self, slots: int) -> None:
        self.queue = GangQueue()
        self.slots = slots
        self.started: list[str] = []
        self._ends: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}

    def submit(self, name: str, ranks: int, priority: int = 0) -> None:
        """Start a job, and return once it runs or waits."""
        self._ends[name] = threading.Event()
        self._threads[name] = threading.Thread(target=self._run, args=(name, ranks, priority))
        self._threads[name].start()
        thread = self.thread_of(name)
        wait_for(lambda: any(gang.thread == thread for jobs in self.queue.jobs() for gang in jobs))

    def end(self, name: str) -> None:
        self._ends[name].set()
        self._threads[name].join()

    def has_started(self, *names: str) -> bool:
        """Wait until as many jobs have started, and return whether they are these jobs in this order."""
        wait_for(lambda: len(self.started) >= len(names))
        return self.started == list(names)

    def thread_of(self, name: str) -> int | None:
        return self._threads[name].ident

    def _run(self, name: str, ranks: int, priority: int) -> None:
        with self.queue.turn(Gang(ranks, lambda: self.slots, priority=priority)):
            self.started.append(name)
            self._ends[name].wait()


@pytest.fixture
def jobs():
    created = Jobs(4)
    yield created
    for name in list(created._ends):
        created._ends[name].set()
    for name in list(created._threads):
        created._threads[name].join()


def test_a_job_in_a_call_that_another_job_waits_for_starts_first_or_is_refused(jobs):
    jobs.submit("fit", 3)
    jobs.submit("needs all slots", 4)
    with called_by(jobs.thread_of("fit")):
        with jobs.queue.turn(Gang(1, lambda: jobs.slots)):
            assert jobs.has_started("fit")
        message = r"A job of 2 ranks cannot start in a function that a job of 3 ranks waits for, .* the 4 slots of"
        with pytest.raises(LaunchError, match=message), jobs.queue.turn(Gang(2, lambda: jobs.slots)):
            pass
    running, waiting = jobs.queue.jobs()
    assert [job.ranks for job in (*running, *waiting)] == [3, 4]


def test_a_cancelled_job_ends_with_an_error_and_no_longer_delays_the_jobs_behind_it(jobs):
    """Also cancel a job while Spark tells it that its slots are free."""
    errors: list[LaunchError] = []

    def cancelled_meanwhile() -> int:
        assert jobs.queue.cancel(first)
        assert not jobs.queue.cancel(first)
        return 4

    first = Gang(1, cancelled_meanwhile)
    with pytest.raises(LaunchError, match=r"A job of 1 rank was cancelled while it waited"), jobs.queue.turn(first):
        pass
    jobs.submit("a", 3)

    def wait_in_vain() -> None:
        with pytest.raises(LaunchError) as error, jobs.queue.turn(Gang(4, lambda: 4)):
            pass
        errors.append(error.value)

    large = threading.Thread(target=wait_in_vain)
    large.start()
    wait_for(lambda: jobs.queue.jobs()[1])
    (waiting,) = jobs.queue.jobs()[1]
    jobs.submit("b", 1)
    assert jobs.has_started("a")
    assert jobs.queue.cancel(waiting)
    assert jobs.has_started("a", "b")
    large.join()
    assert str(errors[0]) == "A job of 4 ranks was cancelled while it waited for its slots."
    running, waiting = jobs.queue.jobs()
    assert waiting == []
    assert not jobs.queue.cancel(running[0])


def test_jobs_that_fit_run_at_the_same_time(jobs):
    jobs.submit("a", 2)
    jobs.submit("b", 1)
    jobs.submit("c", 1)
    assert jobs.has_started("a", "b", "c")


def test_a_small_job_does_not_overtake_a_large_job_that_was_submitted_first(jobs, caplog):
    caplog.set_level(logging.INFO, "sparkhvd")
    jobs.submit("a", 3)
    jobs.submit("large", 4)
    wait_for(lambda: len(caplog.messages) == 1)
    jobs.submit("small", 1)
    assert jobs.has_started("a")
    wait_for(lambda: len(caplog.messages) == 2)
    assert caplog.messages == [
        "A job of 4 ranks waits for its slots: jobs of this application run 3 ranks, and 0 jobs wait before it.",
        "A job of 1 rank waits for its slots: jobs of this application run 3 ranks, and 1 job waits before it.",
    ]
    jobs.end("a")
    assert jobs.has_started("a", "large")
    jobs.end("large")
    assert jobs.has_started("a", "large", "small")


def test_a_job_with_a_higher_priority_starts_first(jobs):
    jobs.submit("a", 4)
    for name, priority in [("b", 0), ("urgent", 2), ("later", -1), ("c", 0), ("also urgent", 2)]:
        jobs.submit(name, 4, priority=priority)
    order = ["a", "urgent", "also urgent", "b", "c", "later"]
    for number, name in enumerate(order, start=1):
        assert jobs.has_started(*order[:number])
        jobs.end(name)


def test_a_job_with_more_ranks_than_slots_starts_alone(jobs):
    jobs.submit("a", 1)
    jobs.submit("too large", 9)
    assert jobs.has_started("a")
    jobs.end("a")
    assert jobs.has_started("a", "too large")


def test_a_job_starts_when_the_application_gets_more_slots(jobs):
    jobs.submit("a", 3)
    jobs.submit("b", 3)
    assert jobs.has_started("a")
    jobs.slots = 6
    assert jobs.has_started("a", "b")


def test_jobs_with_different_cores_per_rank_wait_for_each_other(jobs):
    """Ranks with one core may leave too few cores on each executor for a rank with two cores."""
    two_cores = Gang(1, lambda: 2, TaskResources(cpus=2))
    with jobs.queue.turn(two_cores):
        jobs.submit("one core", 1)
        assert jobs.queue.jobs()[0] == [two_cores]
        assert not jobs.started
    assert jobs.has_started("one core")


def test_an_interrupted_job_releases_its_slots_while_another_thread_waits_for_sparks_answer(jobs):
    slots_requested, answer = threading.Event(), threading.Event()

    def slots() -> int:
        slots_requested.set()
        answer.wait()
        return 4

    def run_second() -> None:
        with jobs.queue.turn(Gang(4, slots)):
            jobs.started.append("second")

    def run_first() -> None:
        with jobs.queue.turn(Gang(4, lambda: 4)):
            second.start()
            slots_requested.wait()
            raise KeyboardInterrupt

    second = threading.Thread(target=run_second)
    with pytest.raises(KeyboardInterrupt):
        run_first()
    assert jobs.queue.jobs()[0] == []
    answer.set()
    second.join()
    assert jobs.started == ["second"]


def test_a_job_that_fails_while_it_waits_or_runs_leaves_the_queue(jobs):
    def slots_of_a_stopped_session() -> int:
        raise RuntimeError("the session was stopped")

    jobs.submit("a", 4)
    with pytest.raises(RuntimeError, match="stopped"), jobs.queue.turn(Gang(1, slots_of_a_stopped_session)):
        pass
    jobs.end("a")
    with pytest.raises(ValueError, match="in fn"), jobs.queue.turn(Gang(4, lambda: 4)):
        raise ValueError("in fn")
    assert jobs.queue.jobs() == ([], [])


def test_jobs_of_random_sizes_never_hold_more_slots_than_exist_and_all_of_them_end():
    draw, queue = random.Random(3), GangQueue()
    held, most_held, lock = 0, 0, threading.Lock()

    def run(ranks: int) -> None:
        nonlocal held, most_held
        with queue.turn(Gang(ranks, lambda: 7)):
            with lock:
                held += ranks
                most_held = max(most_held, held)
            pause.wait(0.001)
            with lock:
                held -= ranks

    pause = threading.Event()
    threads = [threading.Thread(target=run, args=(draw.randint(1, 7),)) for _ in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert 4 <= most_held <= 7
