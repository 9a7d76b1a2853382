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
    """The tasks of a job; ``attempt`` is the number of the first task in an attempt of the stage."""

    def __init__(self, count: int, seconds: float = 3600.0, with_rows: bool = False) -> None:
        self.count = count
        self.missed: SimpleQueue[Mapping[int, str]] = SimpleQueue()
        self.exchange = TaskExchange(
            count, LogStream(None, None, timestamps=False), seconds, self.missed.put, with_rows
        )

    def connects(self, index: int, attempt: int, rank: int = -1) -> None:
        assert self.exchange.handle(TaskStatus(index, rank, "there", attempt + index)) is None

    def exchanges(self, index: int, attempt: int) -> Future[Message]:
        answer = self.exchange.handle(ExchangeIntroductions(introduction(index, attempt)))
        if isinstance(answer, Future):
            return answer
        answered: Future[Message] = Future()
        answered.set_result(answer)
        return answered

    def all_connect(self, attempt: int) -> None:
        for index in range(self.count):
            self.connects(index, attempt)

    def introductions(self, attempt: int) -> Introductions:
        return Introductions(tuple(introduction(index, attempt) for index in range(self.count)))


def introduction(index: int, attempt: int) -> Introduction:
    number = attempt + index
    return Introduction(number, TaskOffer(index, "one host", "there", "127.0.0.1"), 4000 + number)


@pytest.fixture
def tasks():
    created = Tasks(3)
    yield created
    created.exchange.end()


@pytest.fixture
def short_wait(monkeypatch):
    monkeypatch.setattr(exchange_module, "_CONNECTIONS_SECONDS", 0.05)


def test_all_tasks_receive_all_introductions_in_the_order_of_their_indices(tasks):
    for index in (1, 0, 2):
        tasks.connects(index, 7)
    assert [one.result(0) for one in [tasks.exchanges(index, 7) for index in (2, 0, 1)]] == [tasks.introductions(7)] * 3


@pytest.mark.usefixtures("short_wait")
def test_the_exchange_waits_for_connected_tasks_however_long_their_rows_take(tasks):
    tasks.all_connect(0)
    early = [tasks.exchanges(0, 0), tasks.exchanges(1, 0)]
    with pytest.raises(TimeoutError):
        early[0].result(0.5)
    assert tasks.exchanges(2, 0).result(0) == tasks.introductions(0)
    assert [one.result(0) for one in early] == [tasks.introductions(0)] * 2


@pytest.mark.usefixtures("short_wait")
def test_if_a_task_has_no_connection_all_tasks_use_the_fallback_even_late_ones(tasks):
    tasks.connects(0, 5)
    tasks.connects(2, 5)
    assert [one.result(20.0) for one in (tasks.exchanges(0, 5), tasks.exchanges(2, 5))] == [ExchangeUnavailable()] * 2
    tasks.connects(1, 5)
    assert tasks.exchanges(1, 5).result(0) == ExchangeUnavailable()
    tasks.all_connect(8)  # a second attempt of the stage
    assert [one.result(0) for one in [tasks.exchanges(index, 8) for index in range(3)]] == [tasks.introductions(8)] * 3


def test_the_exchange_waits_for_a_connection_that_arrives_in_time(tasks):
    tasks.connects(0, 5)
    first = tasks.exchanges(0, 5)
    tasks.all_connect(5)
    others = [tasks.exchanges(index, 5) for index in (1, 2)]
    assert [one.result(0) for one in (first, *others)] == [tasks.introductions(5)] * 3


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("came", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_tasks_of_a_superseded_attempt_never_mix_with_those_of_the_next(tasks, came, order):
    tasks.all_connect(0)
    old = [tasks.exchanges(index, 0) for index in came]
    newer = []
    for index in order:  # whose numbers follow those of the old one
        tasks.connects(index, 3)
        newer.append(tasks.exchanges(index, 3))
        if len(newer) < 3:
            assert not any(one.done() for one in newer)
    assert [one.result(0) for one in newer] == [tasks.introductions(3)] * 3
    assert [one.result(0) for one in old] == [
        tasks.introductions(0) if len(came) == 3 else ExchangeUnavailable()
    ] * len(came)
    assert tasks.exchanges(1, 0).result(0) == ExchangeUnavailable(), "its introduction was too late"


@pytest.mark.usefixtures("short_wait")
def test_a_task_without_a_connection_in_the_next_attempt_is_not_mistaken_for_its_predecessor(tasks):
    tasks.all_connect(0)
    old = tasks.exchanges(0, 0)
    for index in (0, 1):
        tasks.connects(index, 3)
    assert [one.result(20.0) for one in (tasks.exchanges(0, 3), tasks.exchanges(1, 3))] == [ExchangeUnavailable()] * 2
    assert old.result(0) == ExchangeUnavailable()


@pytest.mark.usefixtures("short_wait")
def test_tasks_with_other_numbers_use_the_fallback(tasks):
    for index in range(3):
        tasks.connects(index, attempt=-2 * index)
    answers = [tasks.exchanges(index, -2 * index) for index in range(3)]
    assert [answer.result(20.0) for answer in answers] == [ExchangeUnavailable()] * 3


@pytest.mark.parametrize(("count", "kind"), [(1000, Introductions), (8000, ExchangeUnavailable)])
def test_a_thousand_tasks_use_the_exchange_and_too_many_for_one_message_use_the_fallback(count, kind):
    tasks = Tasks(count)
    tasks.all_connect(0)
    answers = [tasks.exchanges(index, 0) for index in range(count)]
    assert {type(one.result(0)) for one in answers} == {kind}
    tasks.exchange.end()


def test_tasks_of_an_older_attempt_are_superseded(tasks):
    tasks.all_connect(0)
    assert not tasks.exchange.is_superseded(TaskStatus(2, 1, "there", 2))
    tasks.connects(0, 3)
    assert tasks.exchange.is_superseded(TaskStatus(2, 1, "there", 2))
    assert not tasks.exchange.is_superseded(TaskStatus(2, -1, "there", 5))


def test_a_status_with_a_rank_does_not_change_the_exchange(tasks):
    tasks.all_connect(4)
    for index in range(3):
        tasks.connects(index, 4, rank=index)
    assert [one.result(0) for one in [tasks.exchanges(index, 4) for index in range(3)]] == [tasks.introductions(4)] * 3


@pytest.fixture
def short_limit():
    created = Tasks(3, seconds=0.3)
    yield created
    created.exchange.end()


@pytest.mark.parametrize(
    ("lines", "come", "missing"),
    [
        ((0, 1, 2), (0, 2), {1: "there"}),
        ((0, 2), (0, 2), {1: ""}),
        ((1,), (), {0: "", 1: "there", 2: ""}),
        ((0, 1, 2), (0, 1, 2), {0: "there", 1: "there", 2: "there"}),  # no task reports that the exchange has ended
    ],
)
@pytest.mark.usefixtures("short_wait")
def test_tasks_that_keep_the_others_waiting_are_reported(short_limit, lines, come, missing):
    for index in lines:
        short_limit.connects(index, 7)
    for index in come:
        short_limit.exchanges(index, 7)
    assert short_limit.missed.get(timeout=20.0) == missing


def test_a_task_that_does_not_start_after_the_exchange_is_missing(short_limit):
    short_limit.all_connect(7)
    for index in (0, 2):
        short_limit.connects(index, 7, rank=index)
    assert short_limit.missed.get(timeout=20.0) == {1: "there"}


def test_a_task_without_a_connection_is_not_missing_if_the_fallback_has_succeeded(short_limit):
    for index in (0, 2):
        short_limit.connects(index, 7)
        short_limit.connects(index, 7, rank=index)
    with pytest.raises(Empty):
        short_limit.missed.get(timeout=1.0)


def test_only_tasks_of_the_newest_attempt_are_reported_missing(short_limit):
    short_limit.connects(0, 7)
    for index in range(3):
        short_limit.connects(index, 10, rank=index)
    with pytest.raises(Empty):
        short_limit.missed.get(timeout=1.0)
    short_limit.connects(1, 13)
    assert short_limit.missed.get(timeout=20.0) == {0: "", 1: "there", 2: ""}


@pytest.fixture
def with_rows():
    created = Tasks(3, seconds=0.3, with_rows=True)
    yield created
    created.exchange.end()


@pytest.mark.usefixtures("short_wait")
def test_a_task_that_is_receiving_rows_is_not_missing(with_rows):
    with_rows.all_connect(7)
    for index in (0, 2):
        with_rows.exchanges(index, 7)
    with pytest.raises(Empty):
        with_rows.missed.get(timeout=1.0)


@pytest.mark.usefixtures("short_wait")
def test_a_task_that_never_connected_is_missing_once_all_others_have_their_rows(with_rows):
    for index in (0, 2):
        with_rows.connects(index, 7)
    with_rows.exchanges(0, 7)
    with pytest.raises(Empty):
        with_rows.missed.get(timeout=1.0)
    with_rows.exchanges(2, 7)
    assert with_rows.missed.get(timeout=20.0) == {1: ""}


def test_a_task_that_connects_late_may_take_any_time_for_its_rows(with_rows):
    with_rows.connects(0, 7)
    with_rows.exchanges(0, 7)
    for index in (1, 2):
        with_rows.connects(index, 7)
    with pytest.raises(Empty):
        with_rows.missed.get(timeout=1.0)


def test_a_task_that_has_its_rows_but_does_not_start_after_the_exchange_is_missing(with_rows):
    with_rows.all_connect(7)
    for index in range(3):
        with_rows.exchanges(index, 7)
    for index in (0, 2):
        with_rows.connects(index, 7, rank=index)
    assert with_rows.missed.get(timeout=20.0) == {1: "there"}


def test_waiting_tasks_are_released_at_the_end_of_the_job(tasks):
    tasks.all_connect(0)
    waiting = tasks.exchanges(0, 0)
    tasks.exchange.end()
    assert waiting.result(0) == ENDED
    assert tasks.exchanges(1, 0).result(0) == ENDED


def test_an_impossible_task_index_is_refused(tasks):
    assert "Task index 3 is out of range" in tasks.exchanges(3, 0).result(0).reason


def test_other_messages_are_output(tasks):
    assert tasks.exchange.handle(Flush()) == Acknowledged()
