from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress

import pytest

from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.errors import PeerLostError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.messages import Acknowledged, Flush
from sparkhvd.rpc.server import Server
from tests.waiting import wait_for

_SECRET = b"s" * 32
# Serves, forks a child after the first connections, and prints the child's id.
_SERVERS = """
import os, sys, time
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.rpc.messages import Acknowledged
from sparkhvd.rpc.server import Server

class Handler:
    def handle(self, message):
        return Acknowledged()

server, rendezvous = Server(b"s" * 32, Handler(), sys.argv[1]), RendezvousServer(b"s" * 32, sys.argv[1])
print(server.port, rendezvous.port, flush=True)
sys.stdin.readline()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(300)
    os._exit(0)
time.sleep(300)
"""
_HOST = """
import os, sys, time
from sparkhvd.driver.host_process import HostProcess

host = HostProcess(["sh", "-c", "cat; echo ended > $0", sys.argv[1]], print)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(300)
    os._exit(0)
time.sleep(300)
"""

_JVM = """
import os, subprocess, sys, time
from types import SimpleNamespace
from sparkhvd.driver.spark.gateway import GatewayPipe

jvm = subprocess.Popen(["sh", "-c", "cat; echo ended > $0", sys.argv[1]], stdin=subprocess.PIPE)
pipe = GatewayPipe(SimpleNamespace(sparkContext=SimpleNamespace(_gateway=SimpleNamespace(proc=jvm))))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(300)
    os._exit(0)
time.sleep(300)
"""


@pytest.fixture
def start():
    """Return a function that starts a program; it and the child whose id it printed end with the test."""
    processes = []

    def started(program, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield started
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_peers_of_servers_notice_the_death_of_a_process_with_a_forked_child(start, address):
    process = start(_SERVERS, address)
    port, rendezvous_port = map(int, process.stdout.readline().split())
    deadline = Deadline.after(30)
    with (
        closing(connect([("127.0.0.1", port)], _SECRET, deadline)) as client,
        RendezvousClient([("127.0.0.1", rendezvous_port)], _SECRET, deadline) as rendezvous,
    ):
        client.ask(Flush(), deadline)
        process.stdin.write("\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        client.ask(Flush(), deadline)
        rendezvous.set("alive", b"1", deadline)
        process.kill()
        with pytest.raises(ConnectionError, match=r"closed the connection|reset by peer"):
            client.ask(Flush(), Deadline.after(10))
        with pytest.raises(PeerLostError, match="rendezvous"):
            rendezvous.get("never set", Deadline.after(10))
    os.kill(child, 0)
    process.wait(60)  # the kernel closes the sockets of a killed process one by one
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


@pytest.mark.parametrize("program", [_HOST, _JVM], ids=["host", "JVM"])
def test_a_child_process_notices_the_death_of_a_driver_with_a_forked_child(start, tmp_path, program):
    process = start(program, str(tmp_path / "ended"))
    child = int(process.stdout.readline())
    process.kill()
    wait_for((tmp_path / "ended").exists)
    os.kill(child, 0)


def in_child(function):
    """Run a function in a forked child, and return the exit status of the child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Handler:
    def handle(self, message):
        return Acknowledged()


def test_a_forked_child_leaves_other_sockets_as_they_are():
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(Server(_SECRET, Handler())):
        socket.setdefaulttimeout(7.0)
        try:
            assert in_child(lambda: int(socket.getdefaulttimeout() != 7.0)) == 0
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(ours.fileno())


@pytest.mark.parametrize("kind", [lambda: Server(_SECRET, Handler()), lambda: RendezvousServer(_SECRET)])
def test_a_forked_child_keeps_a_socket_that_has_the_port_of_a_closed_server(kind):
    server = kind()
    port = server.port
    server.close()
    with socket.create_server(("127.0.0.1", port)) as listener:
        assert in_child(lambda: listener.getsockname()[1] - port) == 0
