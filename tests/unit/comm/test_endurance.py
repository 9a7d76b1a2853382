"""Short forms of the endurance cases of ``make soak``."""

from __future__ import annotations

import pytest

from sparkhvd.deadline import Deadline
from tests.endurance import come_and_go, cycles, kill_one_of, strangers
from tests.ranks import RankGroup


@pytest.mark.parametrize("shared_memory", [True, False], ids=["arena", "sockets"])
def test_killing_a_rank_at_any_moment_ends_the_other_ranks(shared_memory):
    kill = kill_one_of(3, shared_memory=shared_memory)
    assert kill.is_fine(), kill


def test_repeated_init_and_shutdown_leaks_no_resources():
    for early, late in cycles(20):
        assert late[:2] == early[:2], "descriptors and threads"


def test_ranks_connect_and_work_despite_foreign_connections():
    with RankGroup(2, connect=False) as group, strangers(group.pids(), group.port) as counts:
        deadline = Deadline.after(120.0)
        while counts["rounds"] < 2 and not deadline.expired():  # the second begins while the ranks work
            group.run(come_and_go, 10)
    assert counts["let in"] == 0
    assert min(counts["rounds"] - 1, counts["garbage"], counts["endless"], counts["wrong token"]) > 0, counts
