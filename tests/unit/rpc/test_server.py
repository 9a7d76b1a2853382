from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from sparkhvd import _core
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.frames import MAX_FRAME_BYTES, FrameSocket
from sparkhvd.rpc.messages import Acknowledged, Flush, Message, Output, Started, TaskStatus, decode, encode
from sparkhvd.rpc.server import Server
from tests.ranks import RankGroup
from tests.waiting import soon, wait_for

SECRET = b"k" * 32


def await_disconnection(connection: socket.socket) -> None:
    connection.settimeout(20.0)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            continue


class Recorder:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    def handle(self, message: Message) -> Message | None:
        self.messages.append(message)
        return Acknowledged() if isinstance(message, Flush) else None


def test_messages_arrive_in_order_before_the_flush_is_answered():
    recorder = Recorder()
    with Server(SECRET, recorder) as server:
        client = connect([("127.0.0.1", server.port)], SECRET, soon())
        sent = [Output(0, "stdout", str(i).encode()) for i in range(100)]
        for message in sent:
            client.send(message, soon())
        assert client.ask(Flush(), soon()) == Acknowledged()
        client.close()
        assert recorder.messages == [*sent, Flush()]


def test_many_clients_are_served_at_once():
    recorder = Recorder()
    with Server(SECRET, recorder) as server:
        clients = [connect([("127.0.0.1", server.port)], SECRET, soon()) for _ in range(40)]
        for rank, client in enumerate(clients):
            client.send(Output(rank, "stdout", b"x"), soon())
            client.ask(Flush(), soon())
        for client in clients:
            client.close()
    assert {message.rank for message in recorder.messages if isinstance(message, Output)} == set(range(40))


def test_five_hundred_idle_strangers_do_not_block_authenticated_clients():
    with Server(SECRET, Recorder(), name="the server") as server, ExitStack() as crowd:
        address = ("127.0.0.1", server.port)
        for _ in range(500):
            crowd.enter_context(socket.create_connection(address))
        with ThreadPoolExecutor(16) as pool:
            for call in [pool.submit(connect, [address], SECRET, soon()) for _ in range(16)]:
                client = call.result()
                assert client.ask(Flush(), soon()) == Acknowledged()
                client.close()


def test_two_hundred_clients_connect_at_once():
    with Server(SECRET, Recorder()) as server, ThreadPoolExecutor(200) as pool:
        address = ("127.0.0.1", server.port)
        for call in [pool.submit(connect, [address], SECRET, soon()) for _ in range(200)]:
            client = call.result()
            assert client.ask(Flush(), soon()) == Acknowledged()
            client.close()


def test_a_client_does_not_retry_with_a_server_that_closes_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted = []

        def close_connection() -> None:
            connection, _ = listener.accept()
            accepted.append(1)
            connection.close()

        thread = threading.Thread(target=close_connection)
        thread.start()
        with pytest.raises(DeadlineExceededError, match="closed the connection instead of proving"):
            connect([listener.getsockname()], SECRET, soon())
        thread.join()
    assert len(accepted) == 1


class BatchHandler:
    """Answer all clients when the last one has sent its request."""

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._waiting: list[Future[Message]] = []

    def handle(self, message: Message) -> Future[Message]:
        answer: Future[Message] = Future()
        with self._lock:
            self._waiting.append(answer)
            ready = self._waiting if len(self._waiting) == self._count else []
        for response in ready:
            response.set_result(message)
        return answer


def test_a_response_may_be_sent_later_from_another_thread():
    with Server(SECRET, BatchHandler(20)) as server, ThreadPoolExecutor(20) as pool:

        def ask(number: int) -> Message:
            client = connect([("127.0.0.1", server.port)], SECRET, soon())
            answer = client.ask(Started(number), soon())
            client.close()
            return answer

        answers = {answer.num_proc for answer in pool.map(ask, range(20))}
    assert len(answers) == 1


def test_a_client_is_released_if_its_deferred_response_is_too_large():
    class OversizedAnswerHandler:
        def handle(self, message: Message) -> Future[Message]:
            answer: Future[Message] = Future()
            answer.set_result(Output(0, "stdout", bytes(MAX_FRAME_BYTES)))
            return answer

    with Server(SECRET, OversizedAnswerHandler()) as server:
        client = connect([("127.0.0.1", server.port)], SECRET, soon())
        with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
            client.ask(Flush(), soon())
        client.close()


SERVER_AT_FILE_LIMIT = """
import logging, os, resource, socket, sys, threading, time
from sparkhvd.deadline import Deadline
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.messages import Flush
from sparkhvd.rpc.server import Server
from tests.waiting import wait_for
from tests.unit.rpc.test_server import SECRET, Recorder

logging.basicConfig(format="%(message)s")
with Server(SECRET, Recorder(), name="the server") as server:
    waiting = [socket.socket() for _ in range(5)]
    spare = [os.dup(0) for _ in range(20)]
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for connection in waiting:
        connection.connect(("127.0.0.1", server.port))
    before = time.process_time()
    time.sleep(1.0)
    print("busy for", time.process_time() - before)
    for descriptor in spare:
        os.close(descriptor)
    client = connect([("127.0.0.1", server.port)], SECRET, Deadline.after(20.0))
    print(client.ask(Flush(), Deadline.after(20.0)))
    client.close()
"""


def test_a_server_at_its_file_limit_warns_once_and_waits():
    completed = subprocess.run(
        [sys.executable, "-c", SERVER_AT_FILE_LIMIT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (
        completed.stderr.count("the server cannot accept more connections: this process has reached its limit of") == 1
    ), completed.stderr
    busy, answer = completed.stdout.splitlines()
    assert float(busy.split()[-1]) < 0.5
    assert answer == "Acknowledged()"


def test_addresses_are_tried_until_the_right_server_answers():
    with Server(b"o" * 32, Recorder()) as stranger, Server(SECRET, Recorder()) as server:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            closed_port = unused.getsockname()[1]
        addresses = [
            ("127.0.0.1", closed_port),
            ("127.0.0.1", 1 << 40),
            ("a..b", 80),
            ("127.0.0.1", stranger.port),
            ("127.0.0.1", server.port),
        ]
        client = connect(addresses, SECRET, soon())
        assert client.ask(Flush(), soon()) == Acknowledged()
        client.close()


def test_the_error_lists_the_failure_at_every_address():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        closed_port = unused.getsockname()[1]
    with Server(b"o" * 32, Recorder()) as stranger:
        addresses = [("127.0.0.1", port) for port in (closed_port, 1 << 40, stranger.port)]
        with pytest.raises(DeadlineExceededError) as caught:
            connect(addresses, SECRET, Deadline.after(1.0))
    message = str(caught.value)
    assert f"127.0.0.1:{1 << 40}: the port is out of range" in message
    assert f"127.0.0.1:{closed_port}: connect: Connection refused" in message
    assert f"127.0.0.1:{stranger.port}: the other side closed the connection instead of proving" in message


def test_strangers_reach_no_handler_and_do_not_block_authenticated_clients():
    recorder = Recorder()
    with Server(SECRET, recorder) as server:
        address = ("127.0.0.1", server.port)
        silent = [socket.create_connection(address) for _ in range(3)]
        with socket.create_connection(address) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\nHost: there\r\n\r\n" + bytes(100))
            await_disconnection(loud)
        client = connect([address], SECRET, soon())
        client.ask(Flush(), soon())
        client.close()
        for connection in silent:
            connection.close()
    assert recorder.messages == [Flush()]


def test_an_invalid_message_closes_its_own_connection_with_one_log_line(caplog):
    recorder = Recorder()
    with Server(SECRET, recorder, name="the server") as server:
        address = ("127.0.0.1", server.port)
        other = connect([address], SECRET, soon())
        for number, malformed in enumerate((b"", encode(Flush()) + b"x", encode(Output(0, "stdout", b""))[:-2])):
            with closing(FrameSocket(_core.FrameConnection.connect([address], SECRET, 20.0))) as frames:
                frames.send(encode(Flush()), soon())
                assert decode(frames.receive(soon())) == Acknowledged()
                frames.send(malformed, soon())
                with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
                    frames.receive(soon())
            messages = [record.getMessage() for record in caplog.records]
            assert len(messages) == number + 1
            assert messages[-1].startswith(
                "the server closed the connection to a peer that knows the job's secret but sent an"
            )
        assert other.ask(Flush(), soon()) == Acknowledged()
        other.close()
    assert recorder.messages == [Flush()] * 4


SERVER_WITH_IDLE_CONNECTIONS = """
import os, resource
from sparkhvd.deadline import Deadline
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.messages import Flush
from sparkhvd.rpc.server import Server
from tests.unit.rpc.test_server import SECRET, Recorder

resource.setrlimit(resource.RLIMIT_NOFILE, (1100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
deadline = Deadline.after(60.0)
with Server(SECRET, Recorder()) as server:
    clients = [connect([("127.0.0.1", server.port)], SECRET, deadline) for _ in range(1000)]
    for client in clients[::100]:
        client.ask(Flush(), deadline)
    print(len(os.listdir("/proc/self/task")))
    for client in clients:
        client.close()
"""


def test_a_thousand_connections_need_no_threads_and_raise_the_limit_of_open_files():
    code = [sys.executable, "-c", SERVER_WITH_IDLE_CONNECTIONS]
    completed = subprocess.run(code, capture_output=True, text=True, timeout=120, check=False)
    assert int(completed.stdout) <= 5, completed.stderr  # the main thread and the threads of the core and the handler


def test_a_handler_that_raises_ends_only_its_own_connection(caplog):
    class FailingHandler(Recorder):
        def handle(self, message: Message) -> Message | None:
            if isinstance(message, Started):
                raise ZeroDivisionError
            return super().handle(message)

    with Server(SECRET, FailingHandler(), name="the server") as server:
        address = ("127.0.0.1", server.port)
        other = connect([address], SECRET, soon())
        for _ in range(3):
            client = connect([address], SECRET, soon())
            with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
                client.ask(Started(1), soon())
            client.close()
        assert other.ask(Flush(), soon()) == Acknowledged()
        other.close()
    assert caplog.text.count("the server closed a connection, because its message could not be handled") == 3


class BlockingHandler(Recorder):
    """Block each ``Started`` message until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def handle(self, message: Message) -> Message | None:
        super().handle(message)
        if isinstance(message, Started):
            assert self.go.wait(20.0)
            return message
        return Acknowledged()


def test_a_slow_message_delays_no_other_connection():
    handler = BlockingHandler()
    with Server(SECRET, handler) as server, ThreadPoolExecutor(4) as pool:
        clients = [connect([("127.0.0.1", server.port)], SECRET, soon()) for _ in range(5)]
        slow = [pool.submit(client.ask, Started(number), soon()) for number, client in enumerate(clients[:4])]
        wait_for(lambda: len(handler.messages) == 4)
        assert clients[4].ask(Flush(), soon()) == Acknowledged()
        handler.go.set()
        assert [response.result() for response in slow] == [Started(number) for number in range(4)]
        for client in clients:
            client.close()


def test_a_client_can_send_while_another_thread_waits_for_a_response():
    handler = BlockingHandler()
    with Server(SECRET, handler) as server, ThreadPoolExecutor(2) as pool:
        client = connect([("127.0.0.1", server.port)], SECRET, soon())
        slow = pool.submit(client.ask, Started(1), soon())
        wait_for(lambda: handler.messages == [Started(1)])
        pool.submit(client.send, Output(0, "stdout", b"meanwhile"), soon()).result(timeout=60)
        assert not slow.done()
        handler.go.set()
        assert slow.result() == Started(1)
        wait_for(lambda: Output(0, "stdout", b"meanwhile") in handler.messages)
        client.close()


def test_a_response_in_progress_is_sent_when_the_server_closes():
    handler = BlockingHandler()
    server = Server(SECRET, handler)
    client = connect([("127.0.0.1", server.port)], SECRET, soon())
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(client.ask, Started(1), soon())
        wait_for(lambda: handler.messages == [Started(1)])
        closing = pool.submit(server.close)
        wait_for(lambda: not accepts(server.port))
        handler.go.set()
        assert asking.result() == Started(1)
        closing.result()
    client.close()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def close_in_forked_child():
    with Server(SECRET, Recorder()) as server:
        client = connect([("127.0.0.1", server.port)], SECRET, soon())
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.ask(Flush(), soon()) == Acknowledged()
        client.close()


def test_a_forked_child_does_not_affect_the_server():
    with RankGroup(1) as group:  # py4j, which this process may use, would end its connections in a forked child
        group.run(close_in_forked_child)


def test_a_server_with_an_ipv6_address_is_reached():
    with Server(SECRET, Recorder(), host="::1") as server:
        client = connect([("::1", server.port)], SECRET, soon())
        assert client.ask(Flush(), soon()) == Acknowledged()
        client.close()


def test_the_server_decides_about_encryption_and_a_client_may_require_it():
    with Server(SECRET, Recorder(), encrypt=True) as server:
        for encrypt in (False, True):
            client = connect([("127.0.0.1", server.port)], SECRET, soon(), encrypt=encrypt)
            assert client.ask(Flush(), soon()) == Acknowledged()
            client.close()
    with Server(SECRET, Recorder()) as server, pytest.raises(DeadlineExceededError, match="does not encrypt"):
        connect([("127.0.0.1", server.port)], SECRET, soon(), encrypt=True)


def test_closing_the_server_ends_its_connections():
    server = Server(SECRET, Recorder())
    client = connect([("127.0.0.1", server.port)], SECRET, soon())
    server.close()
    with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
        client.ask(Flush(), soon())
    client.close()
    server.close()


def test_the_server_listens_only_on_the_given_interface():
    with Server(SECRET, Recorder(), host="127.0.0.2") as server:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        socket.create_connection(("127.0.0.2", server.port)).close()


class DeferredHandler(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.answer: Future[Message] = Future()

    def handle(self, message: Message) -> Message | Future[Message] | None:
        super().handle(message)
        return self.answer if isinstance(message, Flush) else None


@pytest.mark.parametrize("rank", [-1, 0])
def test_a_silent_task_is_lost_unless_it_waits_for_a_response(rank, monkeypatch):
    monkeypatch.setattr("sparkhvd.rpc.server.SILENT_SECONDS", 0.3)
    lost: queue.SimpleQueue[tuple[TaskStatus, OSError]] = queue.SimpleQueue()
    handler, asking, silent = DeferredHandler(), TaskStatus(0, rank, "here", 0), TaskStatus(1, rank, "here", 1)
    with Server(SECRET, handler, on_lost=lambda *loss: lost.put(loss)) as server, ThreadPoolExecutor() as pool:
        clients = [connect([("127.0.0.1", server.port)], SECRET, soon()) for _ in range(2)]
        clients[0].send(asking, soon())
        answer = pool.submit(clients[0].ask, Flush(), soon())
        wait_for(lambda: Flush() in handler.messages)
        clients[1].send(silent, soon())
        task, error = lost.get(timeout=60)
        assert (task, type(error)) == (silent, DeadlineExceededError)
        handler.answer.set_result(Acknowledged())
        assert answer.result(20.0) == Acknowledged()
        for client in clients:
            client.close()
    assert lost.empty()
