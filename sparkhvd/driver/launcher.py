"""The seam between ``run`` and the ways to start a job's ranks."""

from __future__ import annotations

from typing import Protocol

from sparkhvd.deadline import Deadline
from sparkhvd.task.job import Job


class LaunchHandle(Protocol):
    """A job on its way; ``close`` ends it if it still runs."""

    def wait_started(self, deadline: Deadline) -> None:
        """Wait until the ranks run (or have ended).

        Raises:
            StartTimeoutError: they did not in time.
        """

    def results(self) -> list[bytes]:
        """Wait for the end of the job: the pickled results in rank order.

        Raises:
            RankFailedError: a rank failed.
            LaunchError: Spark lost the job.
        """

    def close(self) -> None: ...


class Launcher(Protocol):
    """One way to start the ranks."""

    def launch(self, job: Job) -> LaunchHandle: ...
