"""Faults while ranks connect: a rank dies, is interrupted, or has unreachable addresses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.comm.connect.membership import Assignment, Report, assignment_key, report_key
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.comm.connect.routes import addresses_to_offer
from sparkhvd.comm.stall.stragglers import published_straggler, should_warn
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, SparkHvdError
from sparkhvd.world import World
from tests.ranks import CASE_SECONDS, RankGroup

TOTAL = [3.0] * 1000


# Functions that the ranks run.


def failure_of_init(comm=None):
    try:
        session.init(comm)
    except SparkHvdError as error:
        return str(error)
    return ""


def die_while_connecting(victim, sign):
    rank = session._session.context.world.rank
    if rank == 2:
        return ""  # never calls init(), so that the others wait
    if rank == victim:
        threading.Timer(0.5, os.kill, (os.getpid(), sign)).start()
    try:
        return failure_of_init()
    except KeyboardInterrupt:
        return "interrupted"


def leave_rank_2():
    if session._session.context.world.rank == 2:
        session.leave_before_init()
        return ""
    return failure_of_init()


def join_generations_with_another_secret():
    """Call ``init()`` as a worker of an elastic job whose membership server and rendezvous disagree."""
    with ExitStack() as stack:
        members, rendezvous = (stack.enter_context(closing(RendezvousServer(secret))) for secret in (b"job", b"other"))
        for generation in range(9):
            assignment = Assignment(generation + 1, World(1, 2), rendezvous.port, "host", "127.0.0.1")
            members.set(assignment_key(0, generation), assignment.to_json())
        address = MembershipAddress(0, (("127.0.0.1", members.port),), b"job")
        session.set_launch_context(replace(session.launch_context(), membership=address))
        message = failure_of_init()
        session.membership().close()
        return message, [
            Report.from_json(members.get(report_key(0, number), Deadline.after(0))).generation for number in range(5)
        ]


def init_with(rank, setting, value):
    context = session._session.context
    if context.world.rank == rank:
        session._session.context = replace(context, config=replace(context.config, **{setting: value}))
    try:
        return failure_of_init()
    finally:
        session._session.context = context


def connect_without_rank_2(comm):
    rank = session._session.context.world.rank
    if rank == 2:
        return "", None
    message = failure_of_init(comm)
    context = session.launch_context()
    with RendezvousClient(context.rendezvous, context.token, Deadline.after(CASE_SECONDS)) as rendezvous:
        return message, published_straggler(rendezvous)


def add_up():
    communicator = session.current()
    return communicator.allreduce(np.full(1000, communicator.world.rank + 1.0), ReduceOp.SUM).tolist()


# The expected results.


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_connecting_is_named_in_the_errors_of_all_ranks(victim):
    with RankGroup(3, connect=False) as group:
        outcomes = group.outcomes(die_while_connecting, victim, signal.SIGKILL)
    assert outcomes[victim].died
    assert f"lost rank {victim}: its process ended while the ranks were being connected" in outcomes[1 - victim].value


def test_the_other_ranks_do_not_wait_for_a_rank_that_has_ended_without_init():
    with RankGroup(3, connect=False) as group:
        *others, _ = group.run(leave_rank_2)
    for message in others:
        assert "lost rank 2: it ended without calling init()" in message


@pytest.mark.parametrize("comm", [None, [2, 1, 0]])
def test_a_rank_that_does_not_call_init_is_named_to_the_other_ranks_and_supervisors(comm):
    with RankGroup(3, connect=False, start_timeout=1.0) as group:
        outcomes = [outcome.value for outcome in group.outcomes(connect_without_rank_2, comm)]
    for rank, (message, absent) in enumerate(outcomes[:2]):
        waited = "waited start_timeout=1 s for rank 2 to reach init()"
        assert message == f"Rank {rank} {waited}. Check what that rank is doing, or raise SPARKHVD_START_TIMEOUT."
        assert absent.rank == 2
        assert not absent.joined
        assert absent.why in {f"rank {one} {waited}" for one in range(2)}


@pytest.mark.parametrize(
    ("missing", "speakers"), [([1, 2], [0]), ([0, 2], [1]), ([0, 1, 2, 3], [4, 5]), ([0, 1, 3, 5], [2])]
)
def test_the_first_rank_to_arrive_warns_or_all_if_the_first_four_are_missing(missing, speakers):
    assert [index for index in range(6) if index not in missing and should_warn(index, missing)] == speakers


def test_a_rank_that_authentication_keeps_out_of_all_generations_ends_an_elastic_job():
    with RankGroup(1, connect=False) as group:
        ((message, generations),) = group.run(join_generations_with_another_secret)
    assert generations == [0, 1, 2, 3, 4]
    assert "This rank could not join 5 generations in a row" in message
    assert "proving that it knows the job's token" in message


def test_ctrl_c_while_connecting_ends_init_on_all_ranks():
    with RankGroup(3, connect=False) as group:
        interrupted, other, _ = group.run(die_while_connecting, 0, signal.SIGINT)
    assert interrupted == "interrupted"
    assert "rank 0: interrupted" in other


@pytest.fixture(scope="module")
def three_on_two_hosts():
    with RankGroup(3, hosts=("one", "one", "two"), connect=False) as group:
        yield group


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("fusion_threshold", 0, ("0", "the default")),
        ("cache_capacity", 3, ("3", "1024")),
        ("hierarchical_allreduce", False, ("0", "the default")),
        ("hierarchical_allgather", False, ("0", "1")),
    ],
)
def test_ranks_that_disagree_about_a_setting_do_not_start(three_on_two_hosts, setting, value, shown):
    """Otherwise the ranks would hang in the first collective, or misread each other's messages."""
    for message in three_on_two_hosts.run(init_with, 1, setting, value):
        assert f"ranks disagree about SPARKHVD_{setting.upper()}: rank " in message
        assert f"rank 1 has {shown[0]}" in message
        assert f"has {shown[1]}" in message


def test_encryption_does_not_change_results():
    with RankGroup(2, hosts=("one", "two"), encrypt=True) as group:
        assert group.run(add_up) == [TOTAL] * 2


def test_the_chosen_address_precedes_the_other_addresses_of_the_host():
    local = [
        ("lo", "127.0.0.1", True),
        ("eth0", "10.0.0.5", False),
        ("eth1", "10.1.0.5", False),
        ("eth1", "fd::5", False),
    ]
    assert addresses_to_offer("127.0.0.1", "", local) == ["127.0.0.1"]
    assert addresses_to_offer("10.1.0.5", "", local) == ["10.1.0.5", "10.0.0.5", "fd::5"]
    assert addresses_to_offer("10.0.0.5", "eth1", local) == ["10.1.0.5", "fd::5"]
    with pytest.raises(
        ConfigError, match=r"interfaces ib0, ib1 has an address here; this host has lo, eth0, eth1\. Name"
    ):
        addresses_to_offer("10.0.0.5", "ib0,ib1", local)


# Two hosts, as network namespaces on a bridge. Each has a second interface with an unreachable address.

BRIDGE = "shvdtest0"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    names = ("shvdtest-a", "shvdtest-b")
    try:
        if shutil.which("ip") is None:
            pytest.skip("needs the ip command")
        try:
            ip("link", "add", BRIDGE, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network interfaces: {error.stderr.decode().strip()}")
        ip("addr", "add", "10.77.1.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(names, start=1):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("link", "add", f"shvdtest{number}", "type", "veth", "peer", "name", "good0", "netns", name)
            ip("link", "set", f"shvdtest{number}", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"10.77.1.{number}/24", "dev", "good0")
            ip("-n", name, "link", "set", "good0", "up")
            ip("-n", name, "link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
            ip("-n", name, "addr", "add", f"10.77.9.{number}/24", "dev", "dead0")
            ip("-n", name, "link", "set", "dead0", "up")
            ip("-n", name, "link", "set", "dead1", "up")
        yield names
    finally:
        # The kernel removes a namespace later; without this, the next test would find the interfaces on this side.
        for link in ("shvdtest1", "shvdtest2", BRIDGE):
            subprocess.run(["ip", "link", "del", link], capture_output=True, check=False, timeout=20)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)


def places(names):
    return tuple((f"10.77.9.{number}", ("ip", "netns", "exec", name)) for number, name in enumerate(names, start=1))


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_ranks_find_the_address_that_routes(two_hosts, encrypt):
    with RankGroup(2, hosts=two_hosts, server_host="10.77.1.254", places=places(two_hosts), encrypt=encrypt) as group:
        assert group.run(add_up) == [TOTAL] * 2


def test_two_ranks_without_a_route_between_them_are_named_with_their_addresses(two_hosts):
    with RankGroup(
        2,
        hosts=two_hosts,
        server_host="10.77.1.254",
        places=places(two_hosts),
        connect=False,
        start_timeout=4.0,
        network_interfaces="dead0",
    ) as group:
        for message in group.run(failure_of_init):
            assert "rank 1 at 10.77.9.2:" in message
            assert "could not reach rank 0: 10.77.9.1:" in message
