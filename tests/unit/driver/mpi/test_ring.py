from __future__ import annotations

import re
import socket
from contextlib import ExitStack, closing

import pytest

from sparkhvd.driver.mpi.ring import choose_servers, connect_ring
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.messages import ProbeServers, Reachable
from sparkhvd.rpc.registration import TaskOffer, TaskRegistration, TaskServer
from sparkhvd.rpc.server import Server
from sparkhvd.task.mpi.service import TaskService

SECRET = b"s" * 32


def server(interface: str, address: str) -> TaskServer:
    return TaskServer(interface, address, 4000, f"{address.rpartition('.')[0]}.0/24")


@pytest.mark.parametrize(
    ("servers_of_hosts", "addresses"),
    [
        # A common network takes precedence, whatever the names of its interfaces.
        ([["eth0 10.0.0.1", "ib0 10.1.0.1"], ["ens5 10.0.0.2", "ib0 10.1.0.2"]], ["10.0.0.1", "10.0.0.2"]),
        ([["eth0 10.0.0.1", "ib0 10.1.0.1"], ["ib0 10.1.0.2"]], ["10.1.0.1", "10.1.0.2"]),
        # Networks with routers between them: interfaces with the same name are probably of the same kind.
        ([["eth1 10.0.0.1", "eth0 10.1.0.1"], ["eth0 10.2.0.2"]], ["10.1.0.1", "10.2.0.2"]),
        ([["eth0 10.0.0.1"], ["ens5 10.2.0.2", "ens6 10.3.0.2"]], ["10.0.0.1", "10.2.0.2"]),
        ([["eth0 10.0.0.1"], []], []),
        ([["lo 127.0.0.1"]], ["127.0.0.1"]),
    ],
)
def test_servers_are_chosen_by_a_common_network_then_by_a_common_interface_name(servers_of_hosts, addresses):
    servers = [[server(*text.split()) for text in texts] for texts in servers_of_hosts]
    assert [chosen.address for chosen in choose_servers(servers)] == addresses


def ring_of_two(stack: ExitStack, hidden: set[str]) -> list[TaskRegistration]:
    """Run two tasks with two addresses each; only the driver reaches the hidden addresses."""

    class PartlyReachingService(TaskService):
        """A service whose task cannot reach the hidden addresses."""

        def handle(self, message):
            if isinstance(message, ProbeServers):
                message = ProbeServers(tuple(server for server in message.servers if server.address not in hidden))
            return super().handle(message)

    tasks = []
    for index in range(2):
        service = PartlyReachingService(SECRET)
        servers = []
        for number, address in enumerate((f"127.0.{index}.1", f"127.0.{index}.2")):
            port = stack.enter_context(Server(SECRET, service, address)).port
            servers.append(TaskServer(f"eth{number}", address, port, f"127.0.{index}.0/24"))
        stack.callback(service.close)
        offer = TaskOffer(index, f"key-{index}", f"node-{index}", "")
        tasks.append(TaskRegistration(index, offer, tuple(servers), "/usr/bin/orted"))
    return tasks


@pytest.mark.parametrize(
    ("hidden", "addresses"),
    [(set(), ["127.0.0.1", "127.0.1.1"]), ({"127.0.0.1", "127.0.1.1"}, ["127.0.0.2", "127.0.1.2"])],
)
def test_the_driver_chooses_addresses_at_which_the_tasks_reach_each_other(hidden, addresses):
    with ExitStack() as stack:
        links = connect_ring(ring_of_two(stack, hidden), SECRET)
        for link in links:
            stack.callback(link.client.close)
        assert [link.server.address for link in links] == addresses


def test_the_error_names_a_host_that_only_the_driver_reaches_with_its_addresses():
    addresses = "{'node-1': ['eth0 127.0.1.1', 'eth1 127.0.1.2']}"
    message = (
        f"Some hosts have no address at which both the driver and another host reach them: {addresses}. Name the right"
    )
    with ExitStack() as stack, pytest.raises(LaunchError, match=re.escape(message)):
        connect_ring(ring_of_two(stack, {"127.0.1.1", "127.0.1.2"}), SECRET)


def test_a_task_reaches_servers_that_listen_and_know_the_secret():
    with ExitStack() as stack:
        service = TaskService(SECRET)
        stack.callback(service.close)
        unused = stack.enter_context(closing(socket.socket()))
        unused.bind(("127.0.0.3", 0))  # no server listens there
        servers = (
            TaskServer("a", "127.0.0.1", stack.enter_context(Server(SECRET, service, "127.0.0.1")).port, ""),
            TaskServer("b", "127.0.0.2", stack.enter_context(Server(b"t" * 32, service, "127.0.0.2")).port, ""),
            TaskServer("c", "127.0.0.3", unused.getsockname()[1], ""),
        )
        assert service.handle(ProbeServers(servers)) == Reachable(("127.0.0.1",))
        assert service.handle(ProbeServers(())) == Reachable(())
