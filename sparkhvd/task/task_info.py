"""Where a Spark task runs and what it was given."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sparkhvd._util.addresses import without_brackets
from sparkhvd.config import visible_devices
from sparkhvd.task.devices import cuda_names, device_kind


@dataclass(frozen=True)
class TaskInfo:
    """What Spark says of a task.

    Attributes:
        index: its number in the stage.
        hosts: how the cluster calls the hosts of all tasks, by index.
        cpus: its cores.
        devices: its GPUs, as CUDA calls them.
        device_kind: what its rank computes on; empty without a GPU.
        parent: the process that it must not outlive.
        attempt: the number of this attempt of the task, unlike that of any other task of the application.
    """

    index: int
    hosts: tuple[str, ...]
    cpus: int
    devices: tuple[str, ...] = ()
    device_kind: str = ""
    parent: int = 0
    attempt: int = 0

    @property
    def host(self) -> str:
        return self.hosts[self.index]


def current_task_info() -> TaskInfo:
    """The place of the barrier task that calls this."""
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - only tasks of Spark come here

    context = BarrierTaskContext.get()
    gpus = context.resources().get("gpu")
    devices = cuda_names(gpus.addresses, visible_devices()) if gpus else ()
    return TaskInfo(
        index=context.partitionId(),
        hosts=tuple(host_of(info.address) for info in context.getTaskInfos()),
        cpus=context.cpus(),
        devices=devices,
        device_kind=device_kind(devices, visible_devices()),
        parent=os.getppid(),
        attempt=context.taskAttemptId(),
    )


def host_of(address: str) -> str:
    """``host`` of ``host:port``; an IPv6 host stands in brackets."""
    return without_brackets(address.rpartition(":")[0] or address)
