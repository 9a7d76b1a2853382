"""The GPUs of the ranks: their names, their kinds and the environment variables that select them."""

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
# The order of CUDA's device numbers. CUDA's default is fastest first; nvidia-smi and Spark's discovery scripts number
# devices in bus order.
ORDER = "CUDA_DEVICE_ORDER"
# NVIDIA's driver describes its devices here, without CUDA.
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")


def device_kind(assigned: Sequence[str], visible: str | None, driver: Path = _DRIVER_FOLDER) -> str:
    """Return the kind of device of a rank, like ``GPU (NVIDIA H100)``; empty without a GPU.

    Args:
        assigned: the CUDA names of the devices that Spark or Ray assigned to the rank.
        visible: CUDA_VISIBLE_DEVICES of the rank's task; None if unset.
        driver: the folder in which NVIDIA's driver describes its devices.
    """
    gpus = [facts for path in sorted(driver.glob("*/information")) if (facts := _facts(path)).get("Model")]
    hidden = visible is not None and visible.strip() in {"", "-1"}
    if not assigned and (hidden or not gpus):
        return ""
    own_gpus = [_facts_of(name, gpus) for name in assigned or _device_names(visible)]
    described = [facts for facts in own_gpus if facts is not None]
    are_all_described = bool(own_gpus) and len(described) == len(own_gpus)
    models = sorted({facts["Model"] for facts in (described if are_all_described else gpus)})
    return f"GPU ({', '.join(models)})" if models else "GPU"


def _facts_of(name: str, gpus: Sequence[dict[str, str]]) -> dict[str, str] | None:
    """Return the facts about a device. ``name`` is its number in bus order, or the beginning of its UUID."""
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
    """Return an error message when only some ranks of a job have GPUs; otherwise empty.

    A job that sets CUDA_VISIBLE_DEVICES is exempt, because its user has chosen the devices.
    """
    if any(name == VISIBLE for name, _ in job.env):
        return ""
    with_gpu = [offer for offer in offers if offer.device_kind]
    without_gpu = [offer for offer in offers if not offer.device_kind]
    if not with_gpu or not without_gpu:
        return ""
    return (
        f"Ranks must all run on GPUs or all on CPUs: task {with_gpu[0].task_index} on host {with_gpu[0].host} has a "
        f"{with_gpu[0].device_kind}, task {without_gpu[0].task_index} on host {without_gpu[0].host} has none. Assign a "
        f'GPU to every rank (gpus_per_task=1), or hide the GPUs from all of them (env={{"{VISIBLE}": ""}}).'
    )


def different_gpus_notice(offers: Sequence[TaskOffer]) -> str:
    """Return a notice if the ranks are known to have different kinds of GPUs; otherwise empty."""
    host_of_kind = {offer.device_kind: offer.host for offer in offers if "(" in offer.device_kind}
    if len(host_of_kind) < 2:
        return ""
    kinds = "; ".join(f"{kind} on host {host}" for kind, host in sorted(host_of_kind.items()))
    return f"The ranks have different GPUs: {kinds}. Every step waits for the slowest one."


def cuda_names(addresses: Sequence[str], visible: str | None) -> tuple[str, ...]:
    """Return the CUDA names of the devices with Spark's ``addresses``.

    Args:
        addresses: Spark's addresses of the resource ``gpu``.
        visible: the task's CUDA_VISIBLE_DEVICES; None if unset. If it has as many entries as there are addresses, all
            entries are the task's devices. Otherwise, Spark's addresses are indices into it, as in Spark's
            TorchDistributor.
    """
    listed = _device_names(visible)
    if not listed:
        return tuple(addresses)
    if (all_listed := task_gpus(addresses, listed)) is not None:
        return all_listed
    return tuple(
        listed[int(address)] if address.isdecimal() and int(address) < len(listed) else address for address in addresses
    )


def _device_names(visible: str | None) -> list[str]:
    return [name.strip() for name in (visible or "").split(",") if name.strip()]


def device_variables(slots: Sequence[Slot], slot: Slot) -> tuple[tuple[str, str], ...]:
    """Return the environment variables that select the GPUs of a slot; none if its local group has no assigned GPU.

    CUDA_VISIBLE_DEVICES lists the devices of the slot's local group in the order of local ranks: the first device of
    each rank, then the remaining ones. So device ``hvd.local_rank()`` belongs to the rank, and other ranks' devices
    stay visible for peer-to-peer copies. If ranks of the group share a device, or a rank has none, each rank sees only
    its own devices, from device 0.
    """
    group = [candidate for candidate in slots if candidate.local_group == slot.local_group]
    by_local_rank = sorted(group, key=lambda candidate: candidate.world.local_rank)
    device_lists = [candidate.offer.devices for candidate in by_local_rank]
    if not any(device_lists):
        return ()
    all_devices = [name for devices in device_lists for name in devices]
    rank_devices = slot.offer.devices
    if len(set(all_devices)) < len(all_devices) or not all(device_lists):
        visible_devices: Sequence[str] = rank_devices
    else:
        first_devices = [devices[0] for devices in device_lists]
        visible_devices = [*first_devices, *(name for devices in device_lists for name in devices[1:])]
    return selection_variables(visible_devices, rank_devices)


def selection_variables(visible_devices: Sequence[str], rank_devices: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that make ``visible_devices`` visible to a process and name the devices of its rank."""
    return ((VISIBLE, ",".join(visible_devices)), (ORDER, "PCI_BUS_ID"), (OWN_DEVICES, ",".join(rank_devices)))


def drop_user_variables(
    variables: Sequence[tuple[str, str]], env: Sequence[tuple[str, str | None]]
) -> tuple[tuple[str, str], ...]:
    """Return the variables that the user's ``env`` neither sets nor removes.

    If the user selects GPUs, these are the rank's own.
    """
    set_by_user = dict(env)
    values = dict(variables)
    if (selection := set_by_user.get(VISIBLE)) is not None and OWN_DEVICES in values:
        values[OWN_DEVICES] = ",".join(_device_names(selection))
    if VISIBLE in set_by_user:
        set_by_user[ORDER] = None  # the user chose the device numbers
    return tuple((name, value) for name, value in values.items() if name not in set_by_user)


def shared_gpus_notice(slots: Sequence[Slot]) -> str:
    """Return a notice when Spark assigned one GPU to several ranks, which see only their own GPUs; otherwise empty."""
    users: dict[tuple[str, str], list[Slot]] = {}
    for slot in slots:
        for name in slot.offer.devices:
            users.setdefault((slot.local_group, name), []).append(slot)
    shared = [
        f"GPU {name} on host {ranks[0].offer.host} to ranks {', '.join(str(user.world.rank) for user in ranks)}"
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
    """Return a line per rank with its host and GPUs, and notices about them; empty without any GPU."""
    lines = [
        f"rank {slot.world.rank}: host {slot.offer.host}, local rank {slot.world.local_rank}, "
        f"GPU {', '.join(slot.offer.devices) or 'none'}"
        for slot in slots
        if any(other.offer.devices for other in slots)
    ]
    different = different_gpus_notice([slot.offer for slot in slots])
    notices = (shared_gpus_notice(slots), _container_gpus_notice(slots), different)
    return "\n".join([*lines, *(sentence for sentence in notices if sentence)])


def _container_gpus_notice(slots: Sequence[Slot]) -> str:
    """Return a notice when containers of a host are local groups of their own; otherwise empty."""
    hosts = {slot.offer.host for slot in slots if slot.local_group != slot.offer.host_hash}
    if not hosts:
        return ""
    return (
        f"Containers on host {', '.join(sorted(hosts))} use the same GPU indices: sparkhvd assumes that YARN isolates "
        "their GPUs, and hvd.local_rank() counts within each container. If YARN does not isolate the GPUs, the "
        "containers share them."
    )


def write_device_map(slots: Sequence[Slot], log: RankLog) -> None:
    """Write the device map to the log at the start of a job that has GPUs."""
    text = device_map(slots)
    if text:
        log.write("stdout", text.encode())
