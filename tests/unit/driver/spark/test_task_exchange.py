from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from itertools import permutations
from queue import Empty, SimpleQueue

import pytest

from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.spark import task_exchange as exchange_module
from sparkhvd.driver.spark.task_exchange import TaskExchange
from sparkhvd.rpc.messages import (
    Acknowledged,
    ExchangeIntroductions,
    ExchangeUnavailable,
    Flush,
    Introductions,
    Message,
    Rejected,
    TaskStatus,
)
from sparkhvd.rpc.registration import Introduction, TaskOffer

ENDED = Rejected("The job has already ended. See the driver's log for the reason.")


class Tasks:
    """The tasks of a job; those of an attempt of the stage are numbered from its number on."""

    def __init__(self, count: int, seconds: float = 3600.0, with_rows: bool = False) -> None:
        self.count = count
        self.missed: SimpleQueue[Mapping[int, str]] = SimpleQueue()
        self.exchange = TaskExchange(
            count, LogStream(None, None, timestamps=False), seconds, self.missed.put, with_rows
        )

    def opens_a_line(self, index: int, attempt: int, rank: int = -1) -> None:
        assert self.exchange.handle(TaskStatus(index, rank, "there", attempt + index)) is None

    def meets(self, index: int, attempt: int) -> Future[Message]:
        answer = self.exchange.handle(ExchangeIntroductions(introduction(index, attempt)))
        if isinstance(answer, Future):
            return answer
        told: Future[Message] = Future()
        told.set_result(answer)
        return told

    def all_have_lines(self, attempt: int) -> None:
        for index in range(self.count):
            self.opens_a_line(index, attempt)

    def met(self, attempt: int) -> Introductions:
        return Introductions(tuple(introduction(index, attempt) for index in range(self.count)))


def introduction(index: int, attempt: int) -> Introduction:
    number = attempt + index
    return Introduction(number, TaskOffer(index, "one host", "there", "127.0.0.1"), 4000 + number)


@pytest.fixture
def tasks():
    made = Tasks(3)
    yield made
    made.exchange.end()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(exchange_module, "_CONNECTIONS_SECONDS", 0.05)


def test_all_learn_of_all_in_the_order_of_their_indices(tasks):
    for index in (1, 0, 2):
        tasks.opens_a_line(index, 7)
    assert [one.result(0) for one in [tasks.meets(index, 7) for index in (2, 0, 1)]] == [tasks.met(7)] * 3


@pytest.mark.usefixtures("impatient")
def test_who_has_a_line_is_waited_for_however_long_its_rows_take(tasks):
    tasks.all_have_lines(0)
    early = [tasks.meets(0, 0), tasks.meets(1, 0)]
    with pytest.raises(TimeoutError):
        early[0].result(0.5)
    assert tasks.meets(2, 0).result(0) == tasks.met(0)
    assert [one.result(0) for one in early] == [tasks.met(0)] * 2


@pytest.mark.usefixtures("impatient")
def test_when_one_has_no_line_the_others_meet_it_elsewhere_and_so_does_whoever_comes_late(tasks):
    tasks.opens_a_line(0, 5)
    tasks.opens_a_line(2, 5)
    assert [one.result(20.0) for one in (tasks.meets(0, 5), tasks.meets(2, 5))] == [ExchangeUnavailable()] * 2
    tasks.opens_a_line(1, 5)
    assert tasks.meets(1, 5).result(0) == ExchangeUnavailable()
    tasks.all_have_lines(8)  # Spark runs the stage again
    assert [one.result(0) for one in [tasks.meets(index, 8) for index in range(3)]] == [tasks.met(8)] * 3


def test_a_line_that_comes_in_time_is_waited_for(tasks):
    tasks.opens_a_line(0, 5)
    first = tasks.meets(0, 5)
    tasks.all_have_lines(5)
    others = [tasks.meets(index, 5) for index in (1, 2)]
    assert [one.result(0) for one in (first, *others)] == [tasks.met(5)] * 3


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("came", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_tasks_of_an_attempt_that_was_given_up_never_meet_those_of_the_next(tasks, came, order):
    tasks.all_have_lines(0)
    old = [tasks.meets(index, 0) for index in came]
    newer = []
    for index in order:  # whose numbers follow those of the old one
        tasks.opens_a_line(index, 3)
        newer.append(tasks.meets(index, 3))
        if len(newer) < 3:
            assert not any(one.done() for one in newer)
    assert [one.result(0) for one in newer] == [tasks.met(3)] * 3
    assert [one.result(0) for one in old] == [tasks.met(0) if len(came) == 3 else ExchangeUnavailable()] * len(came)
    assert tasks.meets(1, 0).result(0) == ExchangeUnavailable(), "it came too late"


@pytest.mark.usefixtures("impatient")
def test_a_task_without_a_line_in_the_next_attempt_is_not_taken_for_what_it_was(tasks):
    tasks.all_have_lines(0)
    old = tasks.meets(0, 0)
    for index in (0, 1):
        tasks.opens_a_line(index, 3)
    assert [one.result(20.0) for one in (tasks.meets(0, 3), tasks.meets(1, 3))] == [ExchangeUnavailable()] * 2
    assert old.result(0) == ExchangeUnavailable()


@pytest.mark.usefixtures("impatient")
def test_tasks_that_are_numbered_otherwise_meet_elsewhere(tasks):
    for index in range(3):
        tasks.opens_a_line(index, attempt=-2 * index)
    answers = [tasks.meets(index, -2 * index) for index in range(3)]
    assert [answer.result(20.0) for answer in answers] == [ExchangeUnavailable()] * 3


@pytest.mark.parametrize(("count", "kind"), [(1000, Introductions), (8000, ExchangeUnavailable)])
def test_a_thousand_tasks_meet_and_so_many_that_no_message_holds_them_all_meet_elsewhere(count, kind):
    tasks = Tasks(count)
    tasks.all_have_lines(0)
    answers = [tasks.meets(index, 0) for index in range(count)]
    assert {type(one.result(0)) for one in answers} == {kind}
    tasks.exchange.end()


def test_it_is_known_which_tasks_spark_has_started_anew(tasks):
    tasks.all_have_lines(0)
    assert not tasks.exchange.is_superseded(TaskStatus(2, 1, "there", 2))
    tasks.opens_a_line(0, 3)
    assert tasks.exchange.is_superseded(TaskStatus(2, 1, "there", 2))
    assert not tasks.exchange.is_superseded(TaskStatus(2, -1, "there", 5))


def test_a_line_that_says_its_rank_changes_nothing(tasks):
    tasks.all_have_lines(4)
    for index in range(3):
        tasks.opens_a_line(index, 4, rank=index)
    assert [one.result(0) for one in [tasks.meets(index, 4) for index in range(3)]] == [tasks.met(4)] * 3


@pytest.fixture
def hurried():
    made = Tasks(3, seconds=0.3)
    yield made
    made.exchange.end()


@pytest.mark.parametrize(
    ("lines", "come", "missing"),
    [
        ((0, 1, 2), (0, 2), {1: "there"}),
        ((0, 2), (0, 2), {1: ""}),
        ((1,), (), {0: "", 1: "there", 2: ""}),
        ((0, 1, 2), (0, 1, 2), {0: "there", 1: "there", 2: "there"}),  # nobody says what became of it
    ],
)
@pytest.mark.usefixtures("impatient")
def test_who_keeps_the_others_waiting_is_told(hurried, lines, come, missing):
    for index in lines:
        hurried.opens_a_line(index, 7)
    for index in come:
        hurried.meets(index, 7)
    assert hurried.missed.get(timeout=20.0) == missing


def test_who_has_met_the_others_but_does_not_begin_is_missing(hurried):
    hurried.all_have_lines(7)
    for index in (0, 2):
        hurried.opens_a_line(index, 7, rank=index)
    assert hurried.missed.get(timeout=20.0) == {1: "there"}


def test_a_task_without_a_line_is_not_missed_when_the_others_have_met_it_elsewhere(hurried):
    for index in (0, 2):
        hurried.opens_a_line(index, 7)
        hurried.opens_a_line(index, 7, rank=index)
    with pytest.raises(Empty):
        hurried.missed.get(timeout=1.0)


def test_only_the_newest_attempt_is_looked_at(hurried):
    hurried.opens_a_line(0, 7)
    for index in range(3):
        hurried.opens_a_line(index, 10, rank=index)
    with pytest.raises(Empty):
        hurried.missed.get(timeout=1.0)
    hurried.opens_a_line(1, 13)
    assert hurried.missed.get(timeout=20.0) == {0: "", 1: "there", 2: ""}


@pytest.fixture
def with_rows():
    made = Tasks(3, seconds=0.3, with_rows=True)
    yield made
    made.exchange.end()


@pytest.mark.usefixtures("impatient")
def test_who_is_busy_with_its_rows_is_not_missed(with_rows):
    with_rows.all_have_lines(7)
    for index in (0, 2):
        with_rows.meets(index, 7)
    with pytest.raises(Empty):
        with_rows.missed.get(timeout=1.0)


@pytest.mark.usefixtures("impatient")
def test_who_was_never_heard_of_is_missed_when_all_others_have_their_rows(with_rows):
    for index in (0, 2):
        with_rows.opens_a_line(index, 7)
    with_rows.meets(0, 7)
    with pytest.raises(Empty):
        with_rows.missed.get(timeout=1.0)
    with_rows.meets(2, 7)
    assert with_rows.missed.get(timeout=20.0) == {1: ""}


def test_who_is_heard_of_late_may_take_its_time_for_its_rows(with_rows):
    with_rows.opens_a_line(0, 7)
    with_rows.meets(0, 7)
    for index in (1, 2):
        with_rows.opens_a_line(index, 7)
    with pytest.raises(Empty):
        with_rows.missed.get(timeout=1.0)


def test_who_has_its_rows_and_has_met_the_others_but_does_not_begin_is_missing(with_rows):
    with_rows.all_have_lines(7)
    for index in range(3):
        with_rows.meets(index, 7)
    for index in (0, 2):
        with_rows.opens_a_line(index, 7, rank=index)
    assert with_rows.missed.get(timeout=20.0) == {1: "there"}


def test_who_waits_is_told_when_the_job_is_over(tasks):
    tasks.all_have_lines(0)
    waiting = tasks.meets(0, 0)
    tasks.exchange.end()
    assert waiting.result(0) == ENDED
    assert tasks.meets(1, 0).result(0) == ENDED


def test_a_task_that_cannot_be_is_refused(tasks):
    assert "Task index 3 is out of range" in tasks.meets(3, 0).result(0).reason


def test_the_rest_is_output(tasks):
    assert tasks.exchange.handle(Flush()) == Acknowledged()
