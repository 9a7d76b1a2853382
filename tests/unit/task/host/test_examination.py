from __future__ import annotations

import socket
from contextlib import closing

from sparkhvd.rpc.interfaces import Interface
from sparkhvd.rpc.server import Server
from sparkhvd.task.host import examination
from sparkhvd.task.host.examination import (
    DRIVER,
    ExaminationRequest,
    IgnoreMessages,
    _addresses,
    _driver_problem,
    _unreachable,
    secret_of,
)
from sparkhvd.task.task_info import TaskInfo

SECRET = b"s" * 32


def test_a_host_is_reachable_if_one_of_its_addresses_is():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()[1]
    with closing(Server(secret_of(1, SECRET), IgnoreMessages())) as server:
        this_task = {"index": 0, "host": "here", "key": "a", "addresses": []}
        other_task = {"index": 1, "host": "there", "key": "b", "addresses": [["127.0.0.1", closed]]}
        (message,) = _unreachable(this_task, [this_task, other_task], SECRET)
        assert message.startswith(f"here cannot reach there: No server answered; tried 127.0.0.1:{closed}: ")
        other_task["addresses"].append(["127.0.0.1", server.port])
        assert _unreachable(this_task, [this_task, other_task], SECRET) == ()
        this_task["key"], other_task["key"], other_task["index"] = "b", "a", 2
        assert _unreachable(this_task, [this_task, other_task], SECRET), (
            "the server at this address belongs to another task"
        )


def test_a_task_reports_why_it_cannot_connect_to_the_driver():
    with closing(Server(secret_of(DRIVER, SECRET), IgnoreMessages())) as server:
        address = ("127.0.0.1", server.port)
        assert not _driver_problem(ExaminationRequest(SECRET, driver=(address,)))
        assert "same token" in _driver_problem(ExaminationRequest(b"o" * 32, driver=(address,)))
    assert _driver_problem(ExaminationRequest(SECRET, driver=(address,))).startswith("No server answered; tried ")
    assert not _driver_problem(ExaminationRequest(SECRET)), "the driver has no server"


def test_a_task_listens_on_the_interface_of_its_rank(monkeypatch):
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.0.0.2"}
    interfaces = [Interface(name, address, "10.0.0.0/24") for name, address in addresses.items()]
    monkeypatch.setattr("sparkhvd.rpc.interfaces.interfaces", lambda: interfaces)
    bound = {("a", "b"): "10.0.0.2", ("b", "b"): "127.0.0.1"}
    monkeypatch.setattr(examination, "address_to_bind", lambda _, hosts: bound[tuple(hosts)])
    first, second, alone = (TaskInfo(index, tuple(hosts), 1) for index, hosts in ((0, "ab"), (1, "ab"), (1, "bb")))
    assert _addresses((), second) == (["10.0.0.2", "10.0.0.1"], ())
    assert _addresses((), first) == (["10.0.0.2"], ()), "the ranks connect to each other there"
    assert _addresses(("eth0",), second) == (["10.0.0.1"], ())
    assert _addresses((), alone) == (["127.0.0.1"], ())
    listening, (message,) = _addresses(("eth7",), second)
    assert listening == ["10.0.0.2"]
    assert message == (
        "None of the network interfaces ['eth7'] has an address on host b; "
        "its interfaces are ['lo', 'eth0', 'ib0']. Set nics to some of these"
    )
