from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.frames import connect_handshake
from sparkhvd.rpc.messages import Acknowledged, Flush, Message, Output, decode, encode
from sparkhvd.rpc.server import Server

SECRET = b"k" * 32


def await_hang_up(connection: socket.socket) -> None:
    connection.settimeout(20.0)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            continue


def soon() -> Deadline:
    return Deadline.after(20.0)


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
    assert {one.rank for one in recorder.messages if isinstance(one, Output)} == set(range(40))


def test_more_clients_than_the_server_lets_in_at_once_all_come_in():
    with Server(SECRET, Recorder()) as server, ThreadPoolExecutor(150) as pool:
        calls = [pool.submit(connect, [("127.0.0.1", server.port)], SECRET, soon()) for _ in range(150)]
        for call in calls:
            client = call.result()
            assert client.ask(Flush(), soon()) == Acknowledged()
            client.close()


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


def test_the_error_lists_what_happened_at_every_address():
    with Server(b"o" * 32, Recorder()) as stranger, pytest.raises(DeadlineExceededError, match=str(stranger.port)):
        connect([("127.0.0.1", stranger.port)], SECRET, soon())


def test_strangers_reach_no_handler_and_do_not_keep_others_out():
    recorder = Recorder()
    with Server(SECRET, recorder) as server:
        address = ("127.0.0.1", server.port)
        silent = [socket.create_connection(address) for _ in range(3)]
        with socket.create_connection(address) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\nHost: there\r\n\r\n" + bytes(100))
            await_hang_up(loud)
        client = connect([address], SECRET, soon())
        client.ask(Flush(), soon())
        client.close()
        for connection in silent:
            connection.close()
    assert recorder.messages == [Flush()]


def test_what_is_no_message_ends_its_connection_with_one_line_and_disturbs_nobody(caplog):
    recorder = Recorder()
    with Server(SECRET, recorder, name="the server") as server:
        address = ("127.0.0.1", server.port)
        other = connect([address], SECRET, soon())
        for number, malformed in enumerate((b"", encode(Flush()) + b"x", encode(Output(0, "stdout", b""))[:-2])):
            with socket.create_connection(address) as connection:
                frames = connect_handshake(connection, SECRET, soon())
                frames.send(encode(Flush()), soon())
                assert decode(frames.receive(soon())) == Acknowledged()
                frames.send(malformed, soon())
                assert frames.receive(soon()) is None
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == number + 1
            assert said[-1].startswith("the server hung up on a peer that knows the job's secret but does not speak")
        assert other.ask(Flush(), soon()) == Acknowledged()
        other.close()
    assert recorder.messages == [Flush()] * 4


def test_no_more_strangers_than_allowed_hold_a_thread():
    with Server(SECRET, Recorder(), name="crowded") as server:
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(60)]
        # Whoever comes last is hung up on at once: all places are taken.
        await_hang_up(crowd[-1])
        assert sum(thread.name == "crowded-peer" for thread in threading.enumerate()) <= 32
        for connection in crowd:
            connection.close()


def test_closing_the_server_wakes_its_clients():
    server = Server(SECRET, Recorder())
    client = connect([("127.0.0.1", server.port)], SECRET, soon())
    server.close()
    with pytest.raises(ConnectionError):
        client.ask(Flush(), soon())
    client.close()
    server.close()


def test_the_server_listens_on_the_given_interface_only():
    with Server(SECRET, Recorder(), host="127.0.0.2") as server:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        socket.create_connection(("127.0.0.2", server.port)).close()
