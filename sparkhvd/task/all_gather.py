"""Where the tasks of a barrier stage hear from each other by Spark's own means."""

from __future__ import annotations

import math

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.errors import LaunchError
from sparkhvd.task.job import Job
from sparkhvd.task.task_info import TaskInfo


def all_gather(message: str, job: Job, place: TaskInfo) -> list[str]:
    """What all tasks say, by index; ``BarrierTaskContext.allGather`` itself knows no limit that a job could set.

    Raises:
        LaunchError: not all came within ``start_timeout``. There is no such limit where others may be with their rows.
    """
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - only in Spark's tasks

    context = BarrierTaskContext.get()
    gathered = in_background(lambda: context.allGather(message), "sparkhvd-all-gather")
    if not is_done_within(gathered, math.inf if job.gives_rows and job.driver_connection else job.start_timeout):
        raise LaunchError(
            f"Task {place.index} on host {place.host} waited start_timeout={job.start_timeout:g} s for the other tasks "
            "of this job. One of them is stopped or hangs; see the executors' logs."
        )
    return gathered.result()
