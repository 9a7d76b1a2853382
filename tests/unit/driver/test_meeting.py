from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from sparkhvd.driver import meeting as meeting_module
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.meeting import Meeting
from sparkhvd.rpc.messages import Acknowledged, Apart, Attending, Flush, Meet, Message, Met, Refused
from sparkhvd.rpc.registration import Introduction, TaskOffer


class Tasks:
    """The tasks of a job of three, each with a thread in which it waits."""

    def __init__(self) -> None:
        self.meeting = Meeting(3, LogStream(None, None, timestamps=False))
        self._pool = ThreadPoolExecutor(10)

    def opens_a_line(self, index: int, attempt: int, rank: int = -1) -> None:
        assert self.meeting.handle(Attending(index, rank, "there", attempt)) is None

    def meets(self, index: int, attempt: int) -> Future[Message | None]:
        return self._pool.submit(self.meeting.handle, Meet(introduction(index, attempt)))

    def close(self) -> None:
        self.meeting.end()
        self._pool.shutdown()


def introduction(index: int, attempt: int) -> Introduction:
    return Introduction(attempt, TaskOffer(index, "one host", "there", "127.0.0.1"), 4000 + attempt)


@pytest.fixture
def tasks():
    made = Tasks()
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(meeting_module, "_LINES_SECONDS", 0.05)


@pytest.mark.parametrize("attempts", [(7, 8, 9), (9, 7, 8)])
def test_all_learn_of_all_in_the_order_of_their_indices(tasks, attempts):
    for index in (1, 0, 2):
        tasks.opens_a_line(index, attempts[index])
    met = Met(tuple(introduction(index, attempts[index]) for index in range(3)))
    assert [one.result(20.0) for one in [tasks.meets(index, attempts[index]) for index in (2, 0, 1)]] == [met] * 3


@pytest.mark.usefixtures("impatient")
def test_who_has_a_line_is_waited_for_however_long_its_rows_take(tasks):
    for index in range(3):
        tasks.opens_a_line(index, index)
    early = [tasks.meets(0, 0), tasks.meets(1, 1)]
    assert not wait(early, 0.5).done
    assert isinstance(tasks.meets(2, 2).result(20.0), Met)
    assert {type(one.result(20.0)) for one in early} == {Met}


@pytest.mark.usefixtures("impatient")
def test_when_one_has_no_line_the_others_meet_it_elsewhere_and_so_does_whoever_comes_later(tasks):
    tasks.opens_a_line(0, 5)
    tasks.opens_a_line(2, 7)
    assert {type(one.result(20.0)) for one in (tasks.meets(0, 5), tasks.meets(2, 7))} == {Apart}
    tasks.opens_a_line(1, 6)
    assert isinstance(tasks.meets(1, 6).result(20.0), Apart)
    for index in range(3):  # another attempt of the stage
        tasks.opens_a_line(index, 10 + index)
    assert isinstance(tasks.meets(0, 10).result(20.0), Apart)


def test_tasks_of_an_attempt_that_was_given_up_do_not_meet_those_of_the_next(tasks):
    for index in range(3):
        tasks.opens_a_line(index, index)
    old = [tasks.meets(0, 0), tasks.meets(1, 1)]  # and task 2 dies
    tasks.opens_a_line(2, 5)
    newer = [tasks.meets(2, 5)]
    assert not wait(newer, 0.3).done
    for index in (1, 0):
        tasks.opens_a_line(index, 3 + index)
        newer.append(tasks.meets(index, 3 + index))
    met = Met(tuple(introduction(index, 3 + index) for index in range(3)))
    assert [one.result(20.0) for one in newer] == [met] * 3
    assert [one.result(20.0) for one in old] == [Refused("Spark has started this task anew.")] * 2


def test_a_line_that_says_its_rank_changes_nothing(tasks):
    for index in range(3):
        tasks.opens_a_line(index, index)
        tasks.opens_a_line(index, index, rank=index)
    assert {type(one.result(20.0)) for one in [tasks.meets(index, index) for index in range(3)]} == {Met}


def test_who_waits_is_told_when_the_job_is_over(tasks):
    for index in range(3):
        tasks.opens_a_line(index, index)
    waiting = tasks.meets(0, 0)
    tasks.meeting.end()
    assert waiting.result(20.0) == Refused("The job is over.")
    assert tasks.meets(1, 1).result(20.0) == Refused("The job is over.")


def test_the_rest_is_output(tasks):
    assert tasks.meeting.handle(Flush()) == Acknowledged()
