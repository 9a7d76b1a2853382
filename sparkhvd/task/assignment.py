"""Which rank each task gets: a pure function that every task computes from the same gathered values."""

from __future__ import annotations

from collections.abc import Sequence
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
