"""A launcher that starts the workers on the driver's machine, without Spark."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from contextlib import ExitStack
from typing import ClassVar

from sparkhvd._util.addresses import LOOPBACK
from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import allow_local_ranks
from sparkhvd.driver.launcher import LaunchHandle, LaunchRequest
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.results import results_in_order
from sparkhvd.errors import LaunchError, SparkHvdError
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.assignment import assign
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.ranks import run_ranks
from sparkhvd.task.job import Job
from sparkhvd.task.rank import JobPlan, worker_spec
from sparkhvd.task.supervision import OUTCOME
from sparkhvd.task.worker.output import HandlerLog
from sparkhvd.task.worker.process import WorkerProcess, spawn_worker
from sparkhvd.task.worker.threads import thread_defaults

logger = logging.getLogger(__name__)

_END_SECONDS = 30.0


class LocalLauncher:
    """Starts jobs on this machine."""

    on_spark: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False

    def __init__(self, request: LaunchRequest) -> None:
        self._request = request

    def reserve(self, deadline: Deadline) -> int:  # noqa: ARG002 - nothing to wait for
        num_proc = self._request.num_proc or len(os.sched_getaffinity(0))
        allow_local_ranks("num_proc", num_proc)
        return num_proc

    def launch(self, job: Job, stream: LogStream) -> LaunchHandle:
        return LocalHandle(job, stream)


class LocalHandle:
    """The workers of one job, and the thread that waits for them."""

    def __init__(self, job: Job, stream: LogStream) -> None:
        self._job = job
        self._deadline = Deadline.after(job.start_timeout)
        with ExitStack() as stack:
            token = secrets.token_bytes(32)
            self._server = RendezvousServer(token, encrypt=job.config.encrypt)
            stack.callback(self._server.close)
            host = socket.gethostname()
            offers = [TaskOffer(index, host_hash(), host, LOOPBACK) for index in range(job.num_proc)]
            self._plan = JobPlan(tuple(assign(offers)), ((LOOPBACK, self._server.port),), token, job.config.encrypt)
            workers = self._start(stream, stack)
            self._contents = in_background(
                lambda: run_ranks(self._plan, workers, self._deadline, parent=0), "sparkhvd-job"
            )
            self._stack = stack.pop_all()
        stream.started.set()

    def wait_started(self, deadline: Deadline) -> None:
        """Return at once: the workers run when ``launch`` returns, and supervision bounds their start."""

    def results(self) -> list[bytes]:
        is_done_within(self._contents)
        try:
            contents = self._contents.result()
        except (SparkHvdError, OSError) as error:
            raise LaunchError(str(error)) from error
        return results_in_order(contents, self._job.num_proc)

    def close(self) -> None:
        with self._stack:  # closes the workers and the server, even if another Ctrl-C interrupts the wait
            if not self._contents.done():
                host = self._plan.slots[0].offer.host
                self._server.set(OUTCOME, FailureReport(0, host, "was cancelled").to_json())
                if not is_done_within(self._contents, _END_SECONDS):
                    logger.warning("The ranks of this job did not end within %g s.", _END_SECONDS)

    def _start(self, stream: LogStream, stack: ExitStack) -> dict[int, WorkerProcess]:
        job = self._job
        defaults = thread_defaults(max(1, len(os.sched_getaffinity(0)) // job.num_proc))
        workers = {}
        for slot in self._plan.slots:
            log = HandlerLog(stream.handle, job.num_proc)
            log.rank = slot.world.rank
            worker = WorkerProcess(
                spawn_worker(dict(job.env), defaults, job.preload, job.executable, job.config.warm_seconds), log
            )
            stack.callback(worker.close)
            worker.output.start()
            worker.send(worker_spec(job, self._plan, slot))
            workers[slot.world.rank] = worker
        return workers
