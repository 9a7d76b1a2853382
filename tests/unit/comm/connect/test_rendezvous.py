from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.errors import AuthenticationError, CollectiveError, DeadlineExceededError, SparkHvdError

TOKEN = b"0123456789abcdef"


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def server(request):
    with RendezvousServer(TOKEN, encrypt=request.param) as started:
        yield started


def client_of(server: RendezvousServer, token: bytes = TOKEN) -> RendezvousClient:
    return RendezvousClient([("127.0.0.1", server.port)], token, Deadline.after(10.0))


def test_a_value_reaches_all_waiters_for_its_key(server):
    received = []
    with client_of(server) as reader, client_of(server) as writer:
        thread = threading.Thread(target=lambda: received.append(reader.get("later", Deadline.after(10.0))))
        thread.start()
        writer.set("later", b"\x00value", Deadline.after(10.0))
        thread.join(60.0)
    assert received == [b"\x00value"]
    assert server.get("later", Deadline.after(1.0)) == b"\x00value"


def test_a_wait_for_a_missing_key_ends_at_the_deadline(server):
    with client_of(server) as client, pytest.raises(DeadlineExceededError, match="never"):
        client.get("never", Deadline.after(0.1))


def test_the_values_of_many_keys_come_with_one_request(server):
    for number in range(1000):
        server.set(f"rank/{number}", str(number).encode())
    with client_of(server) as client:
        values = [str(number).encode() for number in range(1000)]
        assert client.get_all("rank/", range(1000), Deadline.after(10.0)) == values
        assert client.get_all("rank/", range(2, 4), Deadline.after(10.0)) == [b"2", b"3"]
        assert client.missing("rank/", range(1000)) == []
        assert client.get_present("rank/", range(1000), Deadline.after(10.0)) == dict(enumerate(values))
    assert server.requests == 4


def test_missing_keys_are_found_without_a_request_for_each(server):
    numbers = range(2, 1000)
    for number in set(numbers) - {2, 500, 501, 999}:
        server.set(f"rank/{number}", str(number).encode())
    expected = {number: str(number).encode() for number in numbers if number not in {2, 500, 501, 999}}
    with client_of(server) as client:
        assert client.missing("rank/", range(1001)) == [0, 1, 2, 500, 501, 999, 1000]
        with pytest.raises(DeadlineExceededError, match="key 'rank/' was not set before the deadline"):
            client.get_all("rank/", numbers, Deadline.after(0.1))
        assert server.requests == 2
        assert client.get_present("rank/", numbers) == expected
        assert server.requests == 2 + 3, "the missing keys and two runs"
        assert client.get_present("rank/", numbers, Deadline.after(0.1)) == expected
        assert server.requests == 5 + 3, "the server still had the request for all"
        assert client.get_present("none/", numbers) == {}


def test_a_client_without_the_secret_is_rejected(server):
    with pytest.raises(AuthenticationError, match="instead of proving that it knows the job's token"):
        client_of(server, b"another secret!!")


def test_closing_the_server_wakes_waiting_clients(server):
    caught = []

    def read(client):
        try:
            client.get("never", Deadline.after(30.0))
        except SparkHvdError as error:
            caught.append(error)

    with client_of(server) as client:
        thread = threading.Thread(target=read, args=(client,))
        thread.start()
        server.close()
        thread.join(60.0)
    (error,) = caught
    assert "get key 'never': lost the rendezvous server at 127.0.0.1:" in str(error)


def test_an_unreachable_address_is_reported():
    with RendezvousServer(TOKEN) as server:
        port = server.port
    with pytest.raises(CollectiveError, match=f"answered at 127.0.0.1:{port}: connect: Connection refused"):
        RendezvousClient([("127.0.0.1", port)], TOKEN, Deadline.after(1.0))


ENDS_WHILE_A_THREAD_WAITS = """
import threading, time
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.deadline import Deadline

class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(1.0)

kept = EndsSlowly()  # deleted while the interpreter is already exiting
server = RendezvousServer(b"0123456789abcdef")
client = RendezvousClient([("127.0.0.1", server.port)], b"0123456789abcdef", Deadline.after(10.0))
threading.Thread(target=client.get, args=("never", Deadline.after(0.5)), daemon=True).start()
"""


def test_a_thread_that_still_waits_when_python_exits_does_not_abort_the_process():
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_A_THREAD_WAITS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
