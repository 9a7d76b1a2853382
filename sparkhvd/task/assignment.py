"""The assignment of ranks to tasks: pure functions, which every task calls with the same gathered values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.world import World, layout


@dataclass(frozen=True)
class Slot:
    """One rank and the task that runs it.

    Attributes:
        world: the position of the rank.
        offer: the offer of its task.
        local_group: equal for the ranks that ``local_rank`` counts together: the ranks of a host, or of a container
            whose GPUs have their own indices.
    """

    world: World
    offer: TaskOffer
    local_group: str


def assign(offers: Sequence[TaskOffer]) -> list[Slot]:
    """Return one slot per task, in rank order.

    Ranks of a host, and of a local group within it, are consecutive and in task order. Hosts, and local groups within a
    host, are ordered by their smallest task index. So task 0 gets rank 0.

    Raises:
        ValueError: the task indices are not a permutation of 0 to n-1.
    """
    if sorted(offer.task_index for offer in offers) != list(range(len(offers))):
        indices = [offer.task_index for offer in offers]
        raise ValueError(f"Task indices must be 0 to {len(offers) - 1}, each once, got {indices}.")
    by_task = sorted(offers, key=lambda offer: offer.task_index)
    local_groups = _local_groups(by_task)
    first_task: dict[str, int] = {}
    for offer, local_group in zip(by_task, local_groups, strict=True):
        first_task.setdefault(offer.host_hash, offer.task_index)
        first_task.setdefault(local_group, offer.task_index)
    return _slots(
        sorted(
            by_task,
            key=lambda offer: (
                first_task[offer.host_hash],
                first_task[local_groups[offer.task_index]],
                offer.task_index,
            ),
        )
    )


def assign_started(offers: Sequence[TaskOffer], ranks_of_host: Mapping[str, Sequence[int]]) -> list[Slot]:
    """Return one slot per task, in rank order, for ranks that ``mpirun`` has already started.

    The sorted ranks of a host belong to its tasks in task order.

    Args:
        offers: the offers of all tasks.
        ranks_of_host: the ranks by ``TaskOffer.host_hash``, one per task of the host.

    Raises:
        ValueError: the ranks are not 0 to n-1, or a host's number of ranks differs from its number of tasks.
    """
    offer_of: dict[int, TaskOffer] = {}
    for host, ranks in ranks_of_host.items():
        host_offers = sorted((offer for offer in offers if offer.host_hash == host), key=lambda offer: offer.task_index)
        offer_of.update(zip(sorted(ranks), host_offers, strict=True))
    if sorted(offer_of) != list(range(len(offers))):
        raise ValueError(f"Ranks must be 0 to {len(offers) - 1}, got {sorted(offer_of)}.")
    return _slots([offer_of[rank] for rank in range(len(offers))])


def _slots(offers: Sequence[TaskOffer]) -> list[Slot]:
    """Return the slots of offers that are in rank order."""
    local_groups = _local_groups(offers)
    worlds = layout(local_groups)
    return [Slot(world, offer, group) for world, offer, group in zip(worlds, offers, local_groups, strict=True)]


def _local_groups(offers: Sequence[TaskOffer]) -> list[str]:
    """Return the local group of each offer: its host, or its container where containers of a host share GPU indices.

    YARN shows each container only its own GPUs, numbered from 0.
    """
    containers: dict[tuple[str, str], set[str]] = {}
    for offer in offers:
        for device in offer.devices:
            containers.setdefault((offer.host_hash, device), set()).add(offer.container)
    split_hosts = {host for (host, _), sharing in containers.items() if len(sharing) > 1}
    return [
        f"{offer.host_hash}/{offer.container}" if offer.host_hash in split_hosts else offer.host_hash
        for offer in offers
    ]
