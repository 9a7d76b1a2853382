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
    encode,
)
from sparkhvd.rpc.registration import Introduction, TaskOffer

ENDED = Rejected("The job has already ended. See the driver's log for the reason.")


class Tasks:
    """The tasks of a job; ``attempt`` is the number of the first task of an attempt."""

    def __init__(self, count: int, seconds: float = 3600.0, with_rows: bool = False) -> None:
        self.count = count
        self.missed: SimpleQueue[Mapping[int, str]] = SimpleQueue()
        self.exchange = TaskExchange(
            count, LogStream(None, None, timestamps=False), seconds, self.missed.put, with_rows
        )

    def connect(self, index: int, attempt: int, rank: int = -1) -> None:
        assert self.exchange.handle(TaskStatus(index, rank, "there", attempt + index)) is None

    def introduce(self, index: int, attempt: int) -> Future[Message]:
        answer = self.exchange.handle(ExchangeIntroductions(introduction(index, attempt)))
        if isinstance(answer, Future):
            return answer
        answered: Future[Message] = Future()
        answered.set_result(answer)
        return answered

    def connect_all(self, attempt: int) -> None:
        for index in range(self.count):
            self.connect(index, attempt)

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
        tasks.connect(index, 7)
    assert [answer.result(0) for answer in [tasks.introduce(index, 7) for index in (2, 0, 1)]] == [
        tasks.introductions(7)
    ] * 3


@pytest.mark.usefixtures("short_wait")
def test_the_exchange_waits_for_connected_tasks_however_long_their_rows_take(tasks):
    tasks.connect_all(0)
    early = [tasks.introduce(0, 0), tasks.introduce(1, 0)]
    with pytest.raises(TimeoutError):
        early[0].result(0.5)
    assert tasks.introduce(2, 0).result(0) == tasks.introductions(0)
    assert [answer.result(0) for answer in early] == [tasks.introductions(0)] * 2


@pytest.mark.usefixtures("short_wait")
def test_all_tasks_use_the_fallback_if_one_of_them_connects_too_late(tasks):
    tasks.connect(0, 5)
    tasks.connect(2, 5)
    assert [answer.result(20.0) for answer in (tasks.introduce(0, 5), tasks.introduce(2, 5))] == [
        ExchangeUnavailable()
    ] * 2
    tasks.connect(1, 5)
    assert tasks.introduce(1, 5).result(0) == ExchangeUnavailable()
    tasks.connect_all(8)  # a second attempt of the stage
    assert [answer.result(0) for answer in [tasks.introduce(index, 8) for index in range(3)]] == [
        tasks.introductions(8)
    ] * 3


def test_the_exchange_waits_for_a_connection_that_arrives_in_time(tasks):
    tasks.connect(0, 5)
    first = tasks.introduce(0, 5)
    tasks.connect_all(5)
    others = [tasks.introduce(index, 5) for index in (1, 2)]
    assert [answer.result(0) for answer in (first, *others)] == [tasks.introductions(5)] * 3


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("introduced", [(), (0,), (1, 2), (0, 1, 2)], ids=str)
def test_tasks_of_a_superseded_attempt_never_mix_with_tasks_of_the_next_attempt(tasks, introduced, order):
    tasks.connect_all(0)
    old = [tasks.introduce(index, 0) for index in introduced]
    newer = []
    for index in order:  # the numbers of the next attempt follow those of the superseded attempt
        tasks.connect(index, 3)
        newer.append(tasks.introduce(index, 3))
        if len(newer) < 3:
            assert not any(answer.done() for answer in newer)
    assert [answer.result(0) for answer in newer] == [tasks.introductions(3)] * 3
    assert [answer.result(0) for answer in old] == [
        tasks.introductions(0) if len(introduced) == 3 else ExchangeUnavailable()
    ] * len(introduced)
    assert tasks.introduce(1, 0).result(0) == ExchangeUnavailable(), "its introduction was too late"


@pytest.mark.usefixtures("short_wait")
def test_a_task_without_a_connection_in_the_next_attempt_is_not_mistaken_for_its_predecessor(tasks):
    tasks.connect_all(0)
    old = tasks.introduce(0, 0)
    for index in (0, 1):
        tasks.connect(index, 3)
    assert [answer.result(20.0) for answer in (tasks.introduce(0, 3), tasks.introduce(1, 3))] == [
        ExchangeUnavailable()
    ] * 2
    assert old.result(0) == ExchangeUnavailable()


@pytest.mark.usefixtures("short_wait")
def test_tasks_without_consecutive_numbers_use_the_fallback(tasks):
    for index in range(3):
        tasks.connect(index, attempt=-2 * index)
    answers = [tasks.introduce(index, -2 * index) for index in range(3)]
    assert [answer.result(20.0) for answer in answers] == [ExchangeUnavailable()] * 3


def test_a_thousand_tasks_use_the_exchange():
    tasks = Tasks(1000)
    tasks.connect_all(0)
    answers = [tasks.introduce(index, 0) for index in range(1000)]
    assert answers[-1].result(0) == tasks.introductions(0)
    assert len({id(answer.result(0)) for answer in answers}) == 1
    tasks.exchange.end()


def test_introductions_that_do_not_fit_into_one_message_use_the_fallback(tasks, monkeypatch):
    monkeypatch.setattr(exchange_module, "MAX_FRAME_BYTES", len(encode(tasks.introductions(0))) - 1)
    tasks.connect_all(0)
    answers = [tasks.introduce(index, 0) for index in range(3)]
    assert [answer.result(0) for answer in answers] == [ExchangeUnavailable()] * 3


def test_tasks_of_an_older_attempt_are_superseded(tasks):
    tasks.connect_all(0)
    assert not tasks.exchange.is_superseded(TaskStatus(2, 1, "there", 2))
    tasks.connect(0, 3)
    assert tasks.exchange.is_superseded(TaskStatus(2, 1, "there", 2))
    assert not tasks.exchange.is_superseded(TaskStatus(2, -1, "there", 5))


def test_a_status_with_a_rank_does_not_change_the_exchange(tasks):
    tasks.connect_all(4)
    for index in range(3):
        tasks.connect(index, 4, rank=index)
    assert [answer.result(0) for answer in [tasks.introduce(index, 4) for index in range(3)]] == [
        tasks.introductions(4)
    ] * 3


@pytest.fixture
def tasks_with_short_limit():
    created = Tasks(3, seconds=0.3)
    yield created
    created.exchange.end()


@pytest.mark.parametrize(
    ("connected", "introduced", "missing"),
    [
        ((0, 1, 2), (0, 2), {1: "there"}),
        ((0, 2), (0, 2), {1: ""}),
        ((1,), (), {0: "", 1: "there", 2: ""}),
        ((0, 1, 2), (0, 1, 2), {0: "there", 1: "there", 2: "there"}),  # no task reports that the exchange has ended
    ],
)
@pytest.mark.usefixtures("short_wait")
def test_tasks_that_keep_the_others_waiting_are_reported(tasks_with_short_limit, connected, introduced, missing):
    for index in connected:
        tasks_with_short_limit.connect(index, 7)
    for index in introduced:
        tasks_with_short_limit.introduce(index, 7)
    assert tasks_with_short_limit.missed.get(timeout=60) == missing


def test_a_task_that_does_not_start_after_the_exchange_is_missing(tasks_with_short_limit):
    tasks_with_short_limit.connect_all(7)
    for index in (0, 2):
        tasks_with_short_limit.connect(index, 7, rank=index)
    assert tasks_with_short_limit.missed.get(timeout=60) == {1: "there"}


def test_a_task_without_a_connection_is_not_missing_if_the_fallback_has_succeeded(tasks_with_short_limit):
    for index in (0, 2):
        tasks_with_short_limit.connect(index, 7)
        tasks_with_short_limit.connect(index, 7, rank=index)
    with pytest.raises(Empty):
        tasks_with_short_limit.missed.get(timeout=1.0)


def test_only_tasks_of_the_newest_attempt_are_reported_missing(tasks_with_short_limit):
    tasks_with_short_limit.connect(0, 7)
    for index in range(3):
        tasks_with_short_limit.connect(index, 10, rank=index)
    with pytest.raises(Empty):
        tasks_with_short_limit.missed.get(timeout=1.0)
    tasks_with_short_limit.connect(1, 13)
    assert tasks_with_short_limit.missed.get(timeout=60) == {0: "", 1: "there", 2: ""}


@pytest.fixture
def tasks_with_rows():
    created = Tasks(3, seconds=0.3, with_rows=True)
    yield created
    created.exchange.end()


@pytest.mark.usefixtures("short_wait")
def test_a_task_that_is_receiving_rows_is_not_missing(tasks_with_rows):
    tasks_with_rows.connect_all(7)
    for index in (0, 2):
        tasks_with_rows.introduce(index, 7)
    with pytest.raises(Empty):
        tasks_with_rows.missed.get(timeout=1.0)


@pytest.mark.usefixtures("short_wait")
def test_a_task_that_never_connected_is_missing_once_all_others_have_their_rows(tasks_with_rows):
    for index in (0, 2):
        tasks_with_rows.connect(index, 7)
    tasks_with_rows.introduce(0, 7)
    with pytest.raises(Empty):
        tasks_with_rows.missed.get(timeout=1.0)
    tasks_with_rows.introduce(2, 7)
    assert tasks_with_rows.missed.get(timeout=60) == {1: ""}


def test_a_task_that_connects_late_may_take_any_time_for_its_rows(tasks_with_rows):
    tasks_with_rows.connect(0, 7)
    tasks_with_rows.introduce(0, 7)
    for index in (1, 2):
        tasks_with_rows.connect(index, 7)
    with pytest.raises(Empty):
        tasks_with_rows.missed.get(timeout=1.0)


def test_a_task_that_has_its_rows_but_does_not_start_after_the_exchange_is_missing(tasks_with_rows):
    tasks_with_rows.connect_all(7)
    for index in range(3):
        tasks_with_rows.introduce(index, 7)
    for index in (0, 2):
        tasks_with_rows.connect(index, 7, rank=index)
    assert tasks_with_rows.missed.get(timeout=60) == {1: "there"}


def test_waiting_tasks_are_released_at_the_end_of_the_job(tasks):
    tasks.connect_all(0)
    waiting = tasks.introduce(0, 0)
    tasks.exchange.end()
    assert waiting.result(0) == ENDED
    assert tasks.introduce(1, 0).result(0) == ENDED


def test_an_impossible_task_index_is_refused(tasks):
    assert "Task index 3 is out of range" in tasks.introduce(3, 0).result(0).reason


def test_other_messages_are_handled_as_output(tasks):
    assert tasks.exchange.handle(Flush()) == Acknowledged()
