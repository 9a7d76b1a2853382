from __future__ import annotations

import itertools
import random

import pytest

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.assignment import assign, assign_started


def offers(hosts: tuple[str, ...]) -> list[TaskOffer]:
    return [TaskOffer(index, host, f"name-{host}", "127.0.0.1") for index, host in enumerate(hosts)]


@pytest.mark.parametrize("count", range(1, 6))
def test_every_layout_is_complete_and_starts_with_task_0(count):
    for hosts in itertools.product("abc", repeat=count):
        slots = assign(offers(hosts))
        assert [slot.world.rank for slot in slots] == list(range(len(hosts)))
        assert sorted(slot.offer.task_index for slot in slots) == list(range(len(hosts)))
        assert slots[0].offer.task_index == 0
        for host in set(hosts):
            slots_of_host = [slot for slot in slots if slot.offer.host_hash == host]
            ranks = [slot.world.rank for slot in slots_of_host]
            assert ranks == list(range(ranks[0], ranks[0] + len(ranks)))
            assert [slot.world.local_rank for slot in slots_of_host] == list(range(len(slots_of_host)))
            assert {slot.world.local_size for slot in slots_of_host} == {len(slots_of_host)}
            assert [slot.offer.task_index for slot in slots_of_host] == sorted(
                slot.offer.task_index for slot in slots_of_host
            )
        for local_rank in {slot.world.local_rank for slot in slots}:
            worlds = [slot.world for slot in slots if slot.world.local_rank == local_rank]
            assert [world.cross_rank for world in worlds] == list(range(len(worlds)))
            assert {world.cross_size for world in worlds} == {len(worlds)}


def test_ranks_do_not_depend_on_the_order_of_offers():
    ordered = offers(("b", "a", "b", "c", "a"))
    shuffled = list(ordered)
    random.Random(1).shuffle(shuffled)
    assert assign(shuffled) == assign(ordered)


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (0, 2)])
def test_missing_or_duplicate_tasks_are_refused(indices):
    with pytest.raises(ValueError, match="must be 0 to 1, each once"):
        assign([TaskOffer(index, "a", "a", "127.0.0.1") for index in indices])


def test_ranks_that_mpirun_placed_are_assigned_to_the_tasks_of_their_host():
    slots = assign_started(offers(("a", "b", "a", "b", "a")), {"a": [3, 0, 4], "b": [2, 1]})
    assert [slot.offer.task_index for slot in slots] == [0, 1, 3, 2, 4]
    worlds = [slot.world for slot in slots]
    assert [(world.rank, world.local_rank, world.local_size) for world in worlds] == [
        (0, 0, 3),
        (1, 0, 2),
        (2, 1, 2),
        (3, 1, 3),
        (4, 2, 3),
    ]
    assert [(world.cross_rank, world.cross_size) for world in worlds] == [(0, 2), (1, 2), (1, 2), (0, 2), (0, 1)]
    planned = assign(offers(("a", "b", "a")))
    assert assign_started([slot.offer for slot in planned], {"a": [0, 1], "b": [2]}) == planned


@pytest.mark.parametrize("ranks", [{"a": [0, 1], "b": [2]}, {"a": [0], "b": [0]}, {"a": [0], "b": [2]}, {"a": [0]}])
def test_placements_without_one_rank_per_task_are_refused(ranks):
    with pytest.raises(ValueError, match=r"must be 0 to 1|zip\(\) argument"):
        assign_started(offers(("a", "b")), ranks)
