from __future__ import annotations

import errno
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from sparkhvd.deadline import Deadline
from sparkhvd.errors import AuthenticationError, ConfigError, DeadlineExceededError
from sparkhvd.rpc.frames import MAX_FRAME_BYTES, FrameSocket, accept, connect_unix, error_of, is_host_unreachable
from sparkhvd.rpc.protection import encryption_problem, require_encryption
from sparkhvd.rpc.server import Server
from tests.ranks import RankGroup
from tests.waiting import soon

SECRET = b"s" * 32


@contextmanager
def listening() -> Iterator[tuple[str, socket.socket]]:
    name = f"sparkhvd-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(20.0)
        yield name, listener


@contextmanager
def link() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    with listening() as (name, listener), ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_unix, name, SECRET, soon())
        connection, _ = listener.accept()
        with connection:
            accepted = accept(connection, SECRET, soon())
        with closing(accepted), closing(connecting.result()) as connected:
            yield accepted, connected


def test_frames_travel_in_both_directions_and_in_order():
    with link() as (server, client):
        for payload in (b"", b"one", bytes(MAX_FRAME_BYTES - 1)):
            with ThreadPoolExecutor(2) as pool:
                pool.submit(client.send, payload, soon())
                pool.submit(server.send, payload + b"!", soon())
                assert server.receive(soon()) == payload
                assert client.receive(soon()) == payload + b"!"


def test_descriptors_pass_between_two_frames():
    with link() as (server, client), Path(os.devnull).open() as file:
        server.send(b"before", soon())
        near, far = (socket.socket(fileno=os.dup(one.fileno())) for one in (server, client))
        with near, far:
            near.settimeout(20.0)
            far.settimeout(20.0)
            socket.send_fds(near, [b"x"], [file.fileno()])
            server.send(b"after", soon())
            assert client.receive(soon()) == b"before"
            content, descriptors, _, _ = socket.recv_fds(far, 1, 1)
        assert (content, len(descriptors)) == (b"x", 1)
        assert os.path.sameopenfile(descriptors[0], file.fileno())
        os.close(descriptors[0])
        assert client.receive(soon()) == b"after"


def test_both_sides_refuse_another_secret():
    with listening() as (name, listener), ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_unix, name, b"x" * 32, soon())
        connection, _ = listener.accept()
        with connection, pytest.raises(AuthenticationError, match=r"The dialer does not know the job's token\."):
            accept(connection, SECRET, soon())
        with pytest.raises(AuthenticationError, match="instead of proving that it knows the job's token"):
            connecting.result()


def test_the_wait_for_a_silent_client_ends_at_the_deadline():
    with listening() as (name, listener), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(f"\0{name}")
        connection, _ = listener.accept()
        with connection, pytest.raises(DeadlineExceededError, match="No answer before the deadline"):
            accept(connection, SECRET, Deadline.after(0.05))


def test_a_wait_ends_at_its_deadline_and_when_it_is_interrupted():
    with link() as (server, client), ThreadPoolExecutor(1) as pool:
        with pytest.raises(DeadlineExceededError, match="No answer before the deadline"):
            server.receive(Deadline.after(0.05))
        waiting = pool.submit(client.receive, soon())
        client.wake()
        with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
            waiting.result()
        with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
            server.receive(soon())


def test_a_closed_connection_raises_an_error_on_both_sides():
    with link() as (server, client):
        client.close()
        calls = (
            lambda: client.send(b"", soon()),
            lambda: client.receive(soon()),
            lambda: client.set_ack_timeout(1.0),
        )
        for call in calls:
            with pytest.raises(ConnectionResetError, match="This connection is closed"):
                call()
        with pytest.raises(ConnectionResetError, match="The other side closed the connection"):
            server.receive(soon())


def test_a_frame_above_the_limit_is_not_sent():
    with link() as (server, client):
        with pytest.raises(ValueError, match=f"exceeds the limit of {MAX_FRAME_BYTES} bytes"):
            client.send(bytes(MAX_FRAME_BYTES + 1), soon())
        client.send(b"next", soon())
        assert server.receive(soon()) == b"next"


def close_in_forked_child():
    with link() as (server, client):
        child = os.fork()
        if child == 0:
            client.close()
            os._exit(0 if client.fileno() == -1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.send(b"still open", soon())
        assert server.receive(soon()) == b"still open"


def test_a_forked_child_closes_only_its_own_descriptor():
    with RankGroup(1) as group:  # py4j, which this process may use, would end its connections in a forked child
        group.run(close_in_forked_child)


WITHOUT_OPENSSL = """
import sys
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, LaunchError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.rpc.server import Server

try:
    require_encryption("here")
except LaunchError as error:
    print(error)
try:
    Server(b"s" * 32, None, encrypt=True)
except ConfigError as error:
    print(error)
try:
    connect([("127.0.0.1", int(sys.argv[1]))], b"s" * 32, Deadline.after(20.0))
except ConfigError as error:
    print(error)
"""


def test_a_host_without_openssl_is_reported_to_the_user_of_an_encrypted_job(tmp_path):
    assert encryption_problem("here") == ""
    require_encryption("here")
    for name in ("libcrypto.so.3", "libcrypto.so.1.1"):
        (tmp_path / name).touch()  # precedes the real library, but is not a library
    with Server(SECRET, None, encrypt=True) as server:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_OPENSSL, str(server.port)],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    problem, *errors = done.stdout.splitlines()
    assert problem.startswith("Host here cannot encrypt the job's traffic (SPARKHVD_ENCRYPT): encryption needs OpenSSL")
    assert [error.startswith("Encryption needs OpenSSL") for error in errors] == [True, True], errors


@pytest.mark.parametrize(
    ("code", "number", "kind", "unreachable"),
    [
        ("timeout", 0, DeadlineExceededError, False),
        ("authentication", 0, AuthenticationError, False),
        ("invalid_argument", 0, ConfigError, False),
        ("peer_lost", 0, ConnectionResetError, False),
        ("peer_lost", errno.ECONNRESET, ConnectionResetError, False),
        ("peer_lost", errno.ETIMEDOUT, OSError, True),
        ("io", errno.EHOSTUNREACH, OSError, True),
    ],
)
def test_a_failure_of_the_core_is_raised_as_an_error_of_sparkhvd(code, number, kind, unreachable):
    error = error_of(code, "why", number)
    assert isinstance(error, kind)
    assert "why" in str(error)
    assert is_host_unreachable(error) == unreachable
