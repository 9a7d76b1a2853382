from __future__ import annotations

import queue
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from sparkhvd._util.processes.process_identity import ProcessOnMachine
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.spark.task_exchange import TaskExchange
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.messages import Acknowledged, ExchangeIntroductions, Flush, Message, TaskStatus
from sparkhvd.rpc.registration import Introduction, TaskOffer
from sparkhvd.rpc.server import Server
from sparkhvd.task.driver_connection import DriverConnection, DriverEndedError
from sparkhvd.task.failure_report import LAUNCH
from sparkhvd.task.job import Job
from sparkhvd.task.task_info import TaskInfo

SECRET = b"k" * 32


def connection_of(index: int, *ports: int, driver: ProcessOnMachine | None = None) -> DriverConnection:
    job = Job(b"", 2, driver_addresses=tuple(("127.0.0.1", port) for port in ports), driver=driver, secret=SECRET)
    return DriverConnection(job, TaskInfo(index, ("here", "here"), 1, attempt=100 + index))


def introduction(index: int) -> Introduction:
    return Introduction(100 + index, TaskOffer(index, "one host", "here", "127.0.0.1"), 0)


@pytest.fixture
def exchange_server():
    exchange = TaskExchange(2, LogStream(None, None, timestamps=False))
    with ExitStack() as stack:
        server = stack.enter_context(Server(SECRET, exchange))
        stack.callback(exchange.end)
        yield exchange, server


def test_tasks_exchange_introductions_over_connections_that_stay_open(exchange_server):
    _, server = exchange_server
    with (
        closing(connection_of(0, server.port)) as first,
        closing(connection_of(1, server.port)) as second,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(first.exchange_introductions, introduction(0))
        assert (
            second.exchange_introductions(introduction(1)) == waiting.result(60.0) == (introduction(0), introduction(1))
        )
        first.attend(0, queue.SimpleQueue())


class RecordingDriver:
    """A driver that records all messages and acknowledges flushes."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def handle(self, message: Message) -> Message | None:
        self.messages.put(message)
        return Acknowledged() if isinstance(message, Flush) else None


def test_a_task_sends_heartbeats_before_and_after_it_has_a_rank(monkeypatch):
    monkeypatch.setattr("sparkhvd.task.driver_connection._BEAT_SECONDS", 0.05)
    driver = RecordingDriver()
    with Server(SECRET, driver) as server, closing(connection_of(0, server.port)) as connection:
        early = [driver.messages.get(timeout=60) for _ in range(3)]
        connection.attend(3, queue.SimpleQueue())
        received = [driver.messages.get(timeout=60)]
        while received[-1] == Flush():
            received.append(driver.messages.get(timeout=60))
        later = [driver.messages.get(timeout=60) for _ in range(2)]
        connection.report_phase("in fn")
        while (last := driver.messages.get(timeout=60)) == Flush():
            continue
    assert early == [TaskStatus(0, -1, "here", 100), Flush(), Flush()]
    assert [received[-1], *later] == [TaskStatus(0, 3, "here", 100, "before fn started"), Flush(), Flush()]
    assert last == TaskStatus(0, 3, "here", 100, "in fn")


def test_no_exchange_happens_if_the_driver_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with closing(connection_of(0, port)) as connection:
        assert connection.exchange_introductions(introduction(0)) is None
        connection.attend(0, queue.SimpleQueue())
    with closing(connection_of(0)) as connection:
        assert connection.exchange_introductions(introduction(0)) is None


def test_a_task_that_cannot_connect_ends_if_the_driver_has_ended_on_this_machine():
    own = ProcessOnMachine.own()
    ended, elsewhere = replace(own, started="1"), ProcessOnMachine("another machine", own.pid, "1")
    for driver in (own, elsewhere):
        with closing(connection_of(0, driver=driver)) as connection:
            assert connection.exchange_introductions(introduction(0)) is None
    with (
        closing(connection_of(0, driver=ended)) as connection,
        pytest.raises(
            DriverEndedError, match=r"Task 0 on host here cannot connect to the driver .*, which has ended\."
        ),
    ):
        connection.exchange_introductions(introduction(0))


def test_a_task_waiting_for_the_exchange_learns_that_the_job_has_ended(exchange_server):
    exchange, server = exchange_server
    with (
        closing(connection_of(0, server.port)) as connection,
        closing(connection_of(1, server.port)),
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(connection.exchange_introductions, introduction(0))
        exchange.end()
        with pytest.raises(LaunchError, match="Task 0 on host here: The job has already ended"):
            waiting.result(60.0)


class DisconnectingDriver:
    """A driver that closes the connection of a task that asks for an exchange."""

    def handle(self, message: Message) -> Message | None:
        if isinstance(message, ExchangeIntroductions):
            raise ConnectionAbortedError
        return None


def test_the_loss_of_the_driver_ends_the_wait_for_the_exchange():
    message = "Task 0 on host here lost its connection to the driver before the ranks were assigned"
    with (
        Server(SECRET, DisconnectingDriver()) as server,
        closing(connection_of(0, server.port)) as connection,
        pytest.raises(LaunchError, match=message),
    ):
        connection.exchange_introductions(introduction(0))


def test_the_end_of_the_driver_ends_the_wait_for_the_exchange_for_good(monkeypatch):
    monkeypatch.setattr("sparkhvd.task.driver_connection._CONNECT_SECONDS", 1.0)
    driver = RecordingDriver()
    server = Server(SECRET, driver)
    with closing(connection_of(0, server.port)) as connection, ThreadPoolExecutor() as pool:
        waiting = pool.submit(connection.exchange_introductions, introduction(0))
        while not isinstance(driver.messages.get(timeout=60.0), ExchangeIntroductions):
            continue
        server.close()
        with pytest.raises(DriverEndedError, match="Task 0 on host here lost its connection to the driver before"):
            waiting.result(60.0)


class DroppingDriver:
    """A driver that loses the connection of a task when the task first reports its rank."""

    def __init__(self) -> None:
        self.statuses: queue.SimpleQueue[TaskStatus] = queue.SimpleQueue()
        self._drops = True

    def handle(self, message: Message) -> Message | None:
        if isinstance(message, TaskStatus):
            self.statuses.put(message)
            if message.rank >= 0 and self._drops:
                self._drops = False
                raise ConnectionAbortedError
        return Acknowledged() if isinstance(message, Flush) else None


def test_a_task_connects_again_to_a_driver_that_lives_and_fails_when_the_driver_has_ended(monkeypatch):
    monkeypatch.setattr("sparkhvd.task.driver_connection._BEAT_SECONDS", 0.05)
    monkeypatch.setattr("sparkhvd.task.driver_connection._CONNECT_SECONDS", 1.0)
    driver, events = DroppingDriver(), queue.SimpleQueue()
    server = Server(SECRET, driver)
    with closing(connection_of(0, server.port)) as connection:
        connection.attend(3, events)
        statuses = [driver.statuses.get(timeout=60.0)]
        while len([status for status in statuses if status.rank == 3]) < 2:
            statuses.append(driver.statuses.get(timeout=60.0))
        assert events.empty()
        server.close()
        report = events.get(timeout=60.0)
    assert report.kind == LAUNCH
    assert "The driver of this job has ended, so its ranks were ended, too. The task on host here lost" in report.cause


def test_a_connection_that_is_closed_reports_no_end_of_the_driver(exchange_server):
    _, server = exchange_server
    events = queue.SimpleQueue()
    with closing(connection_of(0, server.port)) as connection:
        connection.attend(0, events)
    assert events.empty()
