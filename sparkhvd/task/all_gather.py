"""An all-gather among the tasks of a barrier stage, through Spark."""

from __future__ import annotations

import math

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.errors import LaunchError
from sparkhvd.task.job import Job
from sparkhvd.task.task_info import TaskInfo


def all_gather(message: str, job: Job, task: TaskInfo) -> list[str]:
    """Return the messages of all tasks by index, within a time limit that ``BarrierTaskContext.allGather`` lacks.

    Raises:
        LaunchError: some tasks are missing after ``start_timeout``. No limit applies while tasks may still read rows.
    """
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - only in Spark's tasks

    context = BarrierTaskContext.get()
    gathered = in_background(lambda: context.allGather(message), "sparkhvd-all-gather")
    if not is_done_within(gathered, math.inf if job.has_rows and job.driver_connection else job.start_timeout):
        raise LaunchError(
            f"Task {task.index} on host {task.host} waited start_timeout={job.start_timeout:g} s for the other tasks "
            "of this job. One of them is stopped or hangs; see the executors' logs."
        )
    return gathered.result()
