from __future__ import annotations

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkhvd.deadline import Deadline
from sparkhvd.errors import AuthenticationError, ConfigError, DeadlineExceededError, LaunchError
from sparkhvd.rpc import protection
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.frames import MAGIC, MAX_FRAME_BYTES, VERSION, FrameSocket, accept_handshake, connect_handshake
from sparkhvd.rpc.protection import Opener, TagCheck
from sparkhvd.rpc.server import Server

SECRET = b"s" * 32
HELLO = MAGIC + struct.pack(">H", VERSION)


def soon() -> Deadline:
    return Deadline.after(20.0)


@pytest.fixture
def sockets():
    server, client = socket.socketpair()
    with server, client:
        yield server, client


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def encrypt(request):
    return request.param


def handshake(server: socket.socket, client: socket.socket, encrypt: bool = False) -> tuple[FrameSocket, FrameSocket]:
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_handshake, server, SECRET, soon(), encrypt=encrypt)
        connected = connect_handshake(client, SECRET, soon())
        return accepted.result(), connected


def frame_bytes(encrypt: bool) -> int:
    """Of a frame of five bytes."""
    return 4 + 5 + (Opener if encrypt else TagCheck).overhead


def test_frames_travel_in_both_directions_and_in_order(sockets, encrypt):
    server, client = handshake(*sockets, encrypt)
    for payload in (b"", b"one", b"two" * 1000):
        client.send(payload, soon())
        server.send(payload + b"!", soon())
        assert server.receive(soon()) == payload
        assert client.receive(soon()) == payload + b"!"


def test_an_encrypted_connection_hides_its_content(sockets, encrypt):
    server, client = handshake(*sockets, encrypt)
    client.send(b"pay 1", soon())
    server.send(b"paid!", soon())
    seen = [one.recv(frame_bytes(encrypt), socket.MSG_PEEK) for one in sockets]
    assert [b"pay 1" in seen[0], b"paid!" in seen[1]] == [not encrypt] * 2


def test_an_attacker_cannot_disable_encryption(sockets):
    server, client = sockets
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(accept_handshake, server, SECRET, soon(), encrypt=True)
        hello = bytearray(client.recv(len(HELLO) + 1 + 32, socket.MSG_WAITALL))
        assert hello[len(HELLO)] == 1
        hello[len(HELLO)] = 0
        connecting = pool.submit(connect_handshake, far, SECRET, soon())
        near.sendall(hello)
        client.sendall(near.recv(70, socket.MSG_WAITALL))
        with pytest.raises(AuthenticationError, match="client could not prove"):
            accepting.result()
        near.shutdown(socket.SHUT_RDWR)
        with pytest.raises(AuthenticationError):
            connecting.result()


def test_a_host_without_openssl_is_an_error_on_both_sides(sockets, monkeypatch):
    def missing(_: bytes) -> None:
        raise protection._core.CoreError("io", "encryption needs OpenSSL's libcrypto.so.3")

    with Server(SECRET, None, encrypt=True) as server:
        monkeypatch.setattr(protection._core, "Opener", missing)
        with pytest.raises(ConfigError, match="encryption needs OpenSSL"):
            connect([("127.0.0.1", server.port)], SECRET, soon())
    assert protection.encryption_problem("here") == ""
    monkeypatch.setattr(protection._core, "Sealer", missing)
    with pytest.raises(LaunchError, match=r"Host here cannot encrypt the job's traffic \(SPARKHVD_ENCRYPT\): encryp"):
        protection.require_encryption("here")


def test_the_end_of_a_connection_between_frames_is_no_error(sockets):
    server, client = handshake(*sockets)
    client.wake()
    assert server.receive(soon()) is None


def test_a_client_with_another_secret_is_rejected(sockets):
    server, client = sockets
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_handshake, client, b"x" * 32, soon())
        with pytest.raises(AuthenticationError, match="client could not prove"):
            accept_handshake(server, SECRET, soon())
        server.close()
        with pytest.raises(AuthenticationError, match="it belongs to another job"):
            connecting.result()


def test_a_server_of_another_version_is_named():
    near, far = socket.socketpair()
    with near, far:
        far.sendall(MAGIC + struct.pack(">H", VERSION - 1) + bytes(32))
        with pytest.raises(AuthenticationError, match=f"does not speak version {VERSION}"):
            connect_handshake(near, SECRET, soon())


def test_a_server_with_another_secret_is_rejected(sockets):
    server, client = sockets
    server.sendall(HELLO + bytes(33) + bytes(32))
    with pytest.raises(AuthenticationError, match="server could not prove"):
        connect_handshake(client, SECRET, soon())


def test_a_proof_reflected_to_its_sender_is_not_accepted(sockets):
    server, client = sockets
    server.sendall(HELLO + bytes(33))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect_handshake, client, SECRET, soon())
        answer = server.recv(70, socket.MSG_WAITALL)
        server.sendall(answer[-32:])
        with pytest.raises(AuthenticationError, match="server could not prove"):
            connecting.result()


def test_a_recorded_handshake_does_not_open_a_second_connection(sockets):
    server, client = sockets
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(accept_handshake, server, SECRET, soon())
        hello = client.recv(39, socket.MSG_WAITALL)
        relay_near, relay_far = socket.socketpair()
        with relay_near, relay_far:
            connecting = threading.Thread(target=lambda: connect_handshake(relay_far, SECRET, soon()))
            connecting.start()
            relay_near.sendall(hello)
            recorded = relay_near.recv(70, socket.MSG_WAITALL)
            client.sendall(recorded)
            relay_near.sendall(client.recv(32, socket.MSG_WAITALL))
            connecting.join()
        accepting.result()
    second_server, second_client = socket.socketpair()
    with second_server, second_client:
        second_client.sendall(recorded)
        with pytest.raises(AuthenticationError, match="client could not prove"):
            accept_handshake(second_server, SECRET, soon())


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n" + b"x" * 100, bytes(70), HELLO + b"\xff" * 64])
def test_garbage_instead_of_a_handshake_is_rejected(sockets, garbage):
    server, client = sockets
    client.sendall(garbage)
    with pytest.raises(AuthenticationError):
        accept_handshake(server, SECRET, soon())


# What a stranger may say instead of its part of a handshake: anything, also with a right beginning or the right length.
STRANGE = st.builds(
    lambda prefix, content, length: (prefix + content)[:length],
    st.sampled_from([b"", HELLO, MAGIC]),
    st.binary(max_size=120) | st.binary(min_size=64, max_size=64),
    st.integers(0, 120) | st.just(70),
)


@pytest.mark.parametrize("handshake_of", [accept_handshake, connect_handshake])
@given(content=STRANGE)
def test_arbitrary_bytes_never_authenticate_and_always_raise_our_errors(handshake_of, content):
    near, far = socket.socketpair()
    with near, far:
        far.sendall(content)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises((AuthenticationError, ConnectionResetError)):
            handshake_of(near, SECRET, soon())


@given(encrypt=st.booleans(), position=st.integers(0, 41), length=st.integers(0, 50), content=st.binary(max_size=50))
def test_a_frame_with_changed_bytes_is_never_accepted(encrypt, position, length, content):
    near, far = socket.socketpair()
    with near, far:
        server, client = handshake(near, far, encrypt)
        client.send(b"pay 1", soon())
        frame = near.recv(frame_bytes(encrypt), socket.MSG_WAITALL)
        changed = frame[:position] + content + frame[position + length :]
        if changed.startswith(frame):  # what follows it is another frame
            return
        far.sendall(changed)
        far.shutdown(socket.SHUT_WR)
        try:
            assert server.receive(soon()) is None
            assert not changed
        except (AuthenticationError, ConnectionResetError):
            return


def test_a_silent_client_is_disconnected_at_the_deadline(sockets):
    server, _ = sockets
    with pytest.raises(DeadlineExceededError, match="Timed out waiting for 70 more bytes"):
        accept_handshake(server, SECRET, Deadline.after(0.05))


def test_a_client_that_sends_byte_by_byte_cannot_extend_the_deadline(sockets):
    server, client = sockets
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.01):
            client.send(b"S")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        with pytest.raises(DeadlineExceededError):
            accept_handshake(server, SECRET, Deadline.after(0.1))
    finally:
        stop.set()
        dripping.join()


def test_a_replayed_frame_is_detected(sockets, encrypt):
    server, client = handshake(*sockets, encrypt)
    client.send(b"pay 1", soon())
    recorded = sockets[0].recv(frame_bytes(encrypt), socket.MSG_PEEK)
    assert server.receive(soon()) == b"pay 1"
    sockets[1].sendall(recorded)
    with pytest.raises(AuthenticationError, match="altered, replayed"):
        server.receive(soon())


def test_an_altered_frame_is_detected(sockets, encrypt):
    server, client = handshake(*sockets, encrypt)
    client.send(b"pay 1", soon())
    frame = bytearray(sockets[0].recv(frame_bytes(encrypt), socket.MSG_WAITALL))
    frame[-1] ^= 1
    sockets[1].sendall(frame)
    with pytest.raises(AuthenticationError, match="altered, replayed"):
        server.receive(soon())


def test_a_length_above_the_cap_is_refused_before_anything_is_read(sockets):
    server, _ = handshake(*sockets)
    sockets[1].sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(AuthenticationError, match=f"announces {MAX_FRAME_BYTES + 1} bytes"):
        server.receive(soon())


def test_a_frame_above_the_cap_is_not_sent(sockets):
    _, client = handshake(*sockets)
    with pytest.raises(ValueError, match="exceeds the limit"):
        client.send(bytes(MAX_FRAME_BYTES + 1), soon())


def test_an_incomplete_frame_times_out(sockets):
    server, _ = handshake(*sockets)
    sockets[1].sendall(struct.pack(">I", 100) + b"half")
    with pytest.raises(DeadlineExceededError):
        server.receive(soon(), frame_seconds=0.05)


def test_sending_to_a_peer_that_never_reads_ends_at_the_deadline(sockets):
    _, client = handshake(*sockets)
    sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with pytest.raises(DeadlineExceededError, match="the peer to accept"):
        client.send(bytes(MAX_FRAME_BYTES), Deadline.after(0.1))
