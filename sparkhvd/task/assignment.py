"""Which rank each task gets: a pure function that every task computes from the same gathered values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkhvd.world import World, layout


@dataclass(frozen=True)
class TaskOffer:
    """What one task tells the others about itself.

    Attributes:
        task_index: its number in the stage.
        host_hash: equal for tasks that may share memory.
        host: how the cluster calls its host.
        bind_host: the address that its rank binds.
        devices: the GPUs that Spark gave it, by the names that CUDA knows on its host.
        device_kind: what its rank computes on; empty without a GPU.
    """

    task_index: int
    host_hash: str
    host: str
    bind_host: str
    devices: tuple[str, ...] = ()
    device_kind: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TaskOffer:
        """The offer whose ``dataclasses.asdict`` went through JSON."""
        return cls(**{**fields, "devices": tuple(fields["devices"])})


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
