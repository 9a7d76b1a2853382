"""Which rank each task gets: a pure function that every task computes from the same gathered values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.world import World, layout


@dataclass(frozen=True)
class Slot:
    """One rank and the task that runs it."""

    world: World
    offer: TaskOffer


def assign(offers: Sequence[TaskOffer]) -> list[Slot]:
    """One slot per task, in rank order.

    The ranks of a host are neighbours, in the order of their tasks; hosts are in the order of their smallest task. So
    task 0 gets rank 0.

    Raises:
        ValueError: the indices of the offers are not 0 to n-1, each once.
    """
    if sorted(offer.task_index for offer in offers) != list(range(len(offers))):
        raise ValueError(f"Tasks {[offer.task_index for offer in offers]} are not 0 to {len(offers) - 1}, each once.")
    by_task = sorted(offers, key=lambda offer: offer.task_index)
    first_task: dict[str, int] = {}
    for offer in by_task:
        first_task.setdefault(offer.host_hash, offer.task_index)
    in_rank_order = sorted(by_task, key=lambda offer: (first_task[offer.host_hash], offer.task_index))
    worlds = layout([offer.host_hash for offer in in_rank_order])
    return [Slot(world, offer) for world, offer in zip(worlds, in_rank_order, strict=True)]


def assign_started(offers: Sequence[TaskOffer], ranks_of_host: Mapping[str, Sequence[int]]) -> list[Slot]:
    """One slot per task, in rank order, where somebody else has started the ranks already.

    The ranks of a host belong to its tasks in the order of both.

    Args:
        offers: of the tasks.
        ranks_of_host: by ``TaskOffer.host_hash``, as many as the host has tasks.

    Raises:
        ValueError: these are not the ranks 0 to n-1, or a host has another number of them.
    """
    offer_of: dict[int, TaskOffer] = {}
    for host, ranks in ranks_of_host.items():
        own = sorted((one for one in offers if one.host_hash == host), key=lambda offer: offer.task_index)
        offer_of.update(zip(sorted(ranks), own, strict=True))
    if sorted(offer_of) != list(range(len(offers))):
        raise ValueError(f"Ranks {sorted(offer_of)} are not 0 to {len(offers) - 1}.")
    in_rank_order = [offer_of[rank] for rank in range(len(offers))]
    worlds = layout([offer.host_hash for offer in in_rank_order])
    return [Slot(world, offer) for world, offer in zip(worlds, in_rank_order, strict=True)]
