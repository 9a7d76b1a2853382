"""Processes in place of Spark tasks, which test Open MPI without a new Spark cluster for each test.

A test chooses the container id of each process, so that Open MPI sees one machine as several hosts.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from sparkhvd.config import changed_environment, from_environment
from sparkhvd.driver.launchers.mpi import MpiHandle, MpiSetup
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.mpi.command import find_mpirun
from sparkhvd.driver.user_code.payload import pickle_call
from sparkhvd.task.job import Job
from sparkhvd.task.mpi.job import MpiJob
from sparkhvd.task.task_info import TaskInfo

SECONDS = 100.0
_ROOT = Path(__file__).parents[2]


class ProcessStage:
    """Run one process per task, with the interface of a Spark stage that a driver needs.

    Args:
        job: the job of all tasks.
        on_end: called when all tasks have ended.
        containers: the container id of each task.
        environments: additional variables for tasks, by index.
    """

    def __init__(
        self,
        job: MpiJob,
        on_end: Callable[[], None],
        containers: Sequence[str],
        environments: dict[int, dict[str, str]],
    ) -> None:
        self.error: Exception | None = None
        self.rows: list[SimpleNamespace] = []
        self._on_end = on_end
        hosts = ("127.0.0.1",) * len(containers)
        self.processes = []
        for index, container in enumerate(containers):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.mpi.task_process"],
                cwd=_ROOT,
                env={**os.environ, "CONTAINER_ID": container, **environments.get(index, {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            process.stdin.write(pickle.dumps((job, TaskInfo(index, hosts, 1, attempt=index))))
            process.stdin.close()
            self.processes.append(process)
        self._thread = threading.Thread(target=self._collect, name="task processes")
        self._thread.start()

    def wait(self, seconds: float = math.inf) -> bool:
        self._thread.join(seconds if math.isfinite(seconds) else None)
        return not self._thread.is_alive()

    def host_of(self, executor: str) -> str:
        return ""

    def task_hosts(self) -> dict[int, str]:
        return {}

    def wait_started(self, started: threading.Event, deadline, seconds: float) -> None:
        assert started.wait(deadline.remaining())

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self._thread.join()

    def _collect(self) -> None:
        outputs = [process.stdout.read() for process in self.processes]
        codes = [process.wait() for process in self.processes]
        for process in self.processes:
            process.stdout.close()
        for code, output in zip(codes, outputs, strict=True):
            if code == 0:
                self.rows += [SimpleNamespace(**row) for row in pickle.loads(output)]
            else:
                self.error = RuntimeError(f"tasks ended with {codes}")
        self._on_end()


class Launched:
    """One job on task processes; ``handle`` is the driver's side of it."""

    def __init__(self, fn, *args, containers=("a", "b"), environments=None, extra=(), env=(), stdout=None):
        job = Job(
            payload=pickle_call(fn, args, {}),
            num_proc=len(containers),
            env=tuple(dict(env).items()),
            config=replace(from_environment(changed_environment(dict(env))), start_timeout=SECONDS),
            secret=b"s" * 32,
        )
        self.stage: ProcessStage | None = None

        def stage(mpi_job, on_end):
            self.stage = ProcessStage(mpi_job, on_end, containers, environments or {})
            return self.stage

        stream = LogStream(stdout or io.StringIO(), stdout or io.StringIO(), timestamps=False)
        self.handle = MpiHandle(job, stream, stage, MpiSetup("127.0.0.1", "127.0.0.1", find_mpirun(), tuple(extra)))

    def phases(self) -> list[str]:
        """Return the phase of each rank that the driver knows."""
        return [attending.phase for attending in self.handle._service.tasks().values()]
