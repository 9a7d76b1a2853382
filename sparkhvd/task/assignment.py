"""Which rank each task gets: a pure function that every task computes from the same gathered values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.world import World, layout


@dataclass(frozen=True)
class Slot:
    """One rank and the task that runs it.

    Attributes:
        world: where the rank stands.
        offer: what its task said of itself.
        place: equal for the ranks among which ``local_rank`` counts: those of a host, or of a container whose GPUs have
            numbers of their own.
    """

    world: World
    offer: TaskOffer
    place: str


def assign(offers: Sequence[TaskOffer]) -> list[Slot]:
    """One slot per task, in rank order.

    The ranks of a host, and of a place on it, are neighbours, in the order of their tasks; hosts are in the order of
    their smallest task, and so are the places of a host. So task 0 gets rank 0.

    Raises:
        ValueError: the indices of the offers are not 0 to n-1, each once.
    """
    if sorted(offer.task_index for offer in offers) != list(range(len(offers))):
        indices = [offer.task_index for offer in offers]
        raise ValueError(f"Task indices must be 0 to {len(offers) - 1}, each once, got {indices}.")
    by_task = sorted(offers, key=lambda offer: offer.task_index)
    places = _places(by_task)
    first_task: dict[str, int] = {}
    for offer, place in zip(by_task, places, strict=True):
        first_task.setdefault(offer.host_hash, offer.task_index)
        first_task.setdefault(place, offer.task_index)
    return _slots(
        sorted(
            by_task,
            key=lambda offer: (first_task[offer.host_hash], first_task[places[offer.task_index]], offer.task_index),
        )
    )


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
        raise ValueError(f"Ranks must be 0 to {len(offers) - 1}, got {sorted(offer_of)}.")
    return _slots([offer_of[rank] for rank in range(len(offers))])


def _slots(in_rank_order: Sequence[TaskOffer]) -> list[Slot]:
    places = _places(in_rank_order)
    return [Slot(*one) for one in zip(layout(places), in_rank_order, places, strict=True)]


def _places(offers: Sequence[TaskOffer]) -> list[str]:
    """The place of each: its host, or its container on a host where two containers call different GPUs the same.

    YARN shows each container its own GPUs alone, counted from 0.
    """
    containers: dict[tuple[str, str], set[str]] = {}
    for offer in offers:
        for device in offer.devices:
            containers.setdefault((offer.host_hash, device), set()).add(offer.container)
    apart = {host for (host, _), found in containers.items() if len(found) > 1}
    return [f"{offer.host_hash}/{offer.container}" if offer.host_hash in apart else offer.host_hash for offer in offers]
