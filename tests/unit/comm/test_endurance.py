"""Short forms of the endurance cases of ``make soak``."""

from __future__ import annotations

import pytest

from sparkhvd.deadline import Deadline
from tests.endurance import connect_repeatedly, connect_two_ranks_repeatedly, kill_random_rank, unauthenticated_clients
from tests.ranks import RankGroup


@pytest.mark.parametrize("shared_memory", [True, False], ids=["arena", "sockets"])
def test_killing_a_rank_at_any_moment_ends_the_other_ranks(shared_memory):
    kill = kill_random_rank(3, shared_memory=shared_memory)
    assert kill.is_as_expected(), kill


def test_repeated_init_and_shutdown_leaks_no_resources():
    for early, late in connect_two_ranks_repeatedly(20):
        assert late[:2] == early[:2], "descriptors and threads"


def test_ranks_connect_and_work_despite_foreign_connections():
    with RankGroup(2, connect=False) as group, unauthenticated_clients(group.pids(), group.port) as counts:
        deadline = Deadline.after(120.0)
        while counts["rounds"] < 2 and not deadline.expired():  # the second begins while the ranks work
            group.run(connect_repeatedly, 10)
    assert counts["admitted"] == 0
    assert min(counts["rounds"] - 1, counts["garbage"], counts["endless"], counts["wrong token"]) > 0, counts
