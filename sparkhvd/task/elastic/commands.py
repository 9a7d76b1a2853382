"""The driver's commands to a process that holds slots of an elastic job."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from sparkhvd.rpc.messages import EndLease, Message, SetRank, StartWorker, StopWorker
from sparkhvd.task.elastic.worker import RunningWorkers, WorkerLocation

# The interval at which the process checks whether it is orphaned.
_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class DriverLost:
    """The driver cannot be reached any more; ``why`` describes how the loss was noticed."""

    why: str


def carry_out_commands(
    workers: RunningWorkers,
    location: WorkerLocation,
    commands: queue.SimpleQueue[Message | DriverLost],
    is_orphaned: Callable[[], bool] = lambda: False,
) -> DriverLost | None:
    """Start and stop workers as commanded, until ``EndLease``, or the loss of the driver or of this process's parent.

    Args:
        workers: the workers of this process.
        location: where they run.
        commands: the commands, as they arrive.
        is_orphaned: whether the process that this one must not outlive has ended.

    Returns:
        The loss of the driver if that ended the commands, else None.
    """
    while not is_orphaned():
        try:
            command = commands.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue
        if isinstance(command, DriverLost):
            return command
        if isinstance(command, EndLease):
            return None
        if isinstance(command, StartWorker):
            workers.start(command.worker, location)
        elif isinstance(command, SetRank):
            workers.set_rank(command.worker, command.rank)
        elif isinstance(command, StopWorker):
            workers.stop(command.worker)
    return None
