"""Which GPUs a rank sees."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparkhvd.compat.databricks import task_gpus
from sparkhvd.config import OWN_DEVICES
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.assignment import Slot
from sparkhvd.task.job import Job
from sparkhvd.task.worker.output import RankLog

# The GPUs that CUDA lets a process see.
VISIBLE = "CUDA_VISIBLE_DEVICES"
# How CUDA counts them: by itself the fastest first; nvidia-smi, and with it Spark's discovery scripts, goes by bus.
ORDER = "CUDA_DEVICE_ORDER"
# What NVIDIA's driver tells of its devices, without CUDA.
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


def device_kind(assigned: Sequence[str], visible: str | None, driver: Path = _DRIVER_FOLDER) -> str:
    """What a rank computes on, in words, like ``GPU (NVIDIA H100)``; empty where it has no GPU.

    Args:
        assigned: the devices that Spark gave its task, as CUDA calls them.
        visible: CUDA_VISIBLE_DEVICES of its task, None when it is not set.
        driver: where the driver tells of its devices.
    """
    gpus = [facts for path in sorted(driver.glob("*/information")) if (facts := _facts(path)).get("Model")]
    hidden = visible is not None and visible.strip() in {"", "-1"}
    if not assigned and (hidden or not gpus):
        return ""
    own = [_named(name, gpus) for name in assigned or _listed(visible)]
    known = [facts for facts in own if facts is not None]
    models = sorted({facts["Model"] for facts in (known if own and len(known) == len(own) else gpus)})
    return f"GPU ({', '.join(models)})" if models else "GPU"


def _named(name: str, gpus: Sequence[dict[str, str]]) -> dict[str, str] | None:
    """The device that CUDA calls ``name``: a number in the order of the bus, or the beginning of its UUID."""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    return next((facts for facts in gpus if facts.get("GPU UUID", "").startswith(name)), None)


def _facts(information: Path) -> dict[str, str]:
    try:
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def mixed_devices(offers: Sequence[TaskOffer], job: Job) -> str:
    """What is wrong when some ranks of a job would compute on GPUs and others not; empty when nothing is.

    A job that sets CUDA_VISIBLE_DEVICES itself has decided that itself.
    """
    if any(name == VISIBLE for name, _ in job.env):
        return ""
    with_gpu = [offer for offer in offers if offer.device_kind]
    without = [offer for offer in offers if not offer.device_kind]
    if not with_gpu or not without:
        return ""
    return (
        f"Ranks must all run on GPUs or all on CPUs: task {with_gpu[0].task_index} on host {with_gpu[0].host} has a "
        f"{with_gpu[0].device_kind}, task {without[0].task_index} on host {without[0].host} has none. Assign a "
        f'GPU to every rank (gpus_per_task=1), or hide the GPUs from all of them (env={{"{VISIBLE}": ""}}).'
    )


def different_gpus(offers: Sequence[TaskOffer]) -> str:
    """A sentence where the ranks of a job compute on GPUs of different kinds; empty where not, or nobody knows."""
    where = {offer.device_kind: offer.host for offer in offers if "(" in offer.device_kind}
    if len(where) < 2:
        return ""
    found = "; ".join(f"{kind} on host {host}" for kind, host in sorted(where.items()))
    return f"The ranks have different GPUs: {found}. Every step waits for the slowest one."


def cuda_names(addresses: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """What CUDA calls the devices that Spark calls ``addresses``.

    Args:
        addresses: Spark's, of the resource ``gpu``.
        visible: the task's own CUDA_VISIBLE_DEVICES, None when it has none. Where it is set, Spark's addresses count
            within it, as they do for Spark's own TorchDistributor.
    """
    listed = _listed(visible)
    if not listed:
        return tuple(addresses)
    if (own := task_gpus(addresses, listed)) is not None:
        return own
    return tuple(listed[int(one)] if one.isdecimal() and int(one) < len(listed) else one for one in addresses)


def _listed(visible: str | None) -> list[str]:
    return [name.strip() for name in (visible or "").split(",") if name.strip()]


def device_variables(slots: Sequence[Slot], slot: Slot) -> tuple[tuple[str, str], ...]:
    """The environment variables that give the rank of ``slot`` its GPUs; none where Spark gave its host none.

    CUDA_VISIBLE_DEVICES lists the job's devices at its place in the order of the local ranks: the first one of each,
    then what is left. So device ``hvd.local_rank()`` is the rank's own, and the other ranks' devices can be reached for
    peer-to-peer copies. Ranks that share a device each see their own ones alone, as device 0.
    """
    neighbours = sorted((one for one in slots if one.place == slot.place), key=lambda one: one.world.local_rank)
    lists = [one.offer.devices for one in neighbours]
    if not any(lists):
        return ()
    every = [name for devices in lists for name in devices]
    own = slot.offer.devices
    if len(set(every)) < len(every) or not all(lists):
        seen: Sequence[str] = own
    else:
        seen = [*(devices[0] for devices in lists), *(name for devices in lists for name in devices[1:])]
    return ((VISIBLE, ",".join(seen)), (ORDER, "PCI_BUS_ID"), (OWN_DEVICES, ",".join(own)))


def same_gpus(slots: Sequence[Slot]) -> str:
    """A sentence where Spark gave one GPU to several ranks, which see it as device 0 then; empty where it did not."""
    users: dict[tuple[str, str], list[Slot]] = {}
    for slot in slots:
        for name in slot.offer.devices:
            users.setdefault((slot.place, name), []).append(slot)
    shared = [
        f"GPU {name} on host {ranks[0].offer.host} to ranks {', '.join(str(one.world.rank) for one in ranks)}"
        for (_, name), ranks in users.items()
        if len(ranks) > 1
    ]
    if not shared:
        return ""
    return (
        f"Spark assigned {'; '.join(shared)}. On such a host each rank sees only its own GPUs: use set_device(0) "
        "there, not set_device(hvd.local_rank()). For one GPU per rank, set gpus_per_task=1 and let no two Spark "
        "workers on a host report the same GPUs."
    )


def device_map(slots: Sequence[Slot]) -> str:
    """A line per rank with its host and its GPUs, and one when these differ or are shared; empty without any."""
    lines = [
        f"rank {slot.world.rank}: host {slot.offer.host}, local rank {slot.world.local_rank}, "
        f"GPU {', '.join(slot.offer.devices) or 'none'}"
        for slot in slots
        if any(one.offer.devices for one in slots)
    ]
    different = different_gpus([slot.offer for slot in slots])
    said = (same_gpus(slots), _counted_apart(slots), different)
    return "\n".join([*lines, *(sentence for sentence in said if sentence)])


def _counted_apart(slots: Sequence[Slot]) -> str:
    """A sentence where containers of a host are places of their own; empty where none are."""
    hosts = {slot.offer.host for slot in slots if slot.place != slot.offer.host_hash}
    if not hosts:
        return ""
    return (
        f"Containers on host {', '.join(sorted(hosts))} use the same GPU indices: sparkhvd assumes that YARN isolates "
        "their GPUs, and hvd.local_rank() counts within each container. If YARN does not isolate the GPUs, the "
        "containers share them."
    )


def write_device_map(slots: Sequence[Slot], log: RankLog) -> None:
    """Print the map at the start of a job that has GPUs."""
    text = device_map(slots)
    if text:
        log.write("stdout", text.encode())
