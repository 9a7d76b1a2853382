"""The host and the resources of a Spark task."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from sparkhvd._util.addresses import without_brackets
from sparkhvd.compat.spark import task_number
from sparkhvd.config import visible_devices
from sparkhvd.errors import LaunchError
from sparkhvd.task.devices import cuda_names, device_kind


@dataclass(frozen=True)
class TaskInfo:
    """A Spark task, as Spark describes it.

    Attributes:
        index: its index in the stage.
        hosts: the hosts of all tasks in the cluster, by index.
        cpus: the number of its cores.
        devices: the CUDA names of its GPUs.
        device_kind: the kind of GPU that its rank computes on; empty without one.
        parent: the process that it must not outlive.
        attempt: the number of this attempt, unique in the application. The tasks of a stage have consecutive numbers,
            in the order of their indices.
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
    """Return the description of the calling task; an ordinary task counts as the only one of its stage."""
    from pyspark import BarrierTaskContext, TaskContext  # noqa: PLC0415 - only Spark tasks call this function

    context = TaskContext.get()
    if context is None:
        raise LaunchError("Only a Spark task can be described.")
    gpus = context.resources().get("gpu")
    devices = cuda_names(gpus.addresses, visible_devices()) if gpus else ()
    index, hosts, attempt = 0, [socket.gethostname()], context.taskAttemptId()
    if isinstance(context, BarrierTaskContext):
        index, hosts = context.partitionId(), [host_of(info.address) for info in context.getTaskInfos()]
        attempt = task_number(context)
    return TaskInfo(
        index=index,
        hosts=tuple(hosts),
        cpus=context.cpus(),
        devices=devices,
        device_kind=device_kind(devices, visible_devices()),
        parent=os.getppid(),
        attempt=attempt,
    )


def host_of(address: str) -> str:
    """Return the host of ``host:port``; IPv6 hosts are in brackets."""
    return without_brackets(address.rpartition(":")[0] or address)
