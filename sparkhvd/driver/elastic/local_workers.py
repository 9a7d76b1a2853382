"""Workers of an elastic job on this machine."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from dataclasses import dataclass, replace

from sparkhvd._util.addresses import LOOPBACK
from sparkhvd.comm.connect.launch_context import LaunchContext, MembershipAddress
from sparkhvd.config import changed_environment
from sparkhvd.deadline import Deadline
from sparkhvd.driver.elastic.workers import Event, Lost, Place, Returned
from sparkhvd.driver.host_process import is_this_machine
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.task.failure_report import CONNECTED, ENDED, IN_FN, STARTING, FailureReport, describe_exit
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.job import Job
from sparkhvd.task.supervision import EXIT_SECONDS, GRACE_SECONDS, JOB_SECONDS, TERM_SECONDS
from sparkhvd.task.worker import spec
from sparkhvd.task.worker.exit import Exited
from sparkhvd.task.worker.import_path import IMPORT_PATH
from sparkhvd.task.worker.output import HandlerLog
from sparkhvd.task.worker.process import WorkerProcess, spawn_worker
from sparkhvd.task.worker.threads import thread_defaults

logger = logging.getLogger(__name__)

_END_SECONDS = 20.0


@dataclass(frozen=True)
class _Stop:
    """Ends a worker."""


@dataclass
class _Running:
    """One worker process and the thread that supervises it."""

    process: WorkerProcess
    log: HandlerLog
    thread: threading.Thread


class LocalWorkers:
    """Starts workers on this machine.

    Args:
        job: the job of the workers; ``num_proc`` is the number of ranks that share the cores.
        membership: the address of the membership server, without a worker's number.
        stream: receives the workers' output.
        inbox: receives their ends.
    """

    def __init__(
        self,
        job: Job,
        membership: MembershipAddress,
        stream: LogStream,
        inbox: queue.SimpleQueue[Event],
    ) -> None:
        self._job = job
        self._membership = membership
        self._stream = stream
        self._inbox = inbox
        self._workers: dict[int, _Running] = {}  # of the controller's thread

    def unusable(self, host: str) -> str:
        """Return why no worker can run on a host; empty if it can."""
        if is_this_machine(host):
            return ""
        return f"{host} is not this machine; elastic jobs do not start ranks on other machines yet"

    def start(self, worker: int, host: str) -> Place:
        """Start a worker, or report ``Lost`` for it."""
        job = self._job
        place = Place(host_hash(), host, LOOPBACK)
        defaults = thread_defaults(max(1, len(os.sched_getaffinity(0)) // job.num_proc))
        log = HandlerLog(self._stream.handle, job.num_proc)
        log.rank = worker  # until its first generation
        try:
            spawned = spawn_worker(dict(job.env), defaults, job.preload, job.executable, job.config.warm_seconds)
        except OSError as error:
            why = f"did not start: {error.strerror or error}"
            self._inbox.put(Lost(worker, FailureReport(worker, host, why, phase=STARTING)))
            return place
        process = WorkerProcess(spawned, log)
        process.output.start()
        thread = threading.Thread(
            target=self._supervise, args=(worker, host, process, log), name="sparkhvd-elastic-worker", daemon=True
        )
        self._workers[worker] = _Running(process, log, thread)
        context = LaunchContext(
            host_key=place.host_key,
            bind_host=place.bind_host,
            config=job.config,
            membership=replace(self._membership, worker=worker),
        )
        variables = (("SPARKHVD_LOG_LEVEL", str(job.log_level)),)
        path = changed_environment(dict(job.env)).get(IMPORT_PATH)
        process.send(spec.WorkerSpec(context, job.payload, variables, path))
        thread.start()
        return place

    def assign(self, worker: int, rank: int, num_proc: int) -> None:  # noqa: ARG002 - for tasks that report it
        """Note the rank of a worker in a new generation."""
        if worker in self._workers:
            self._workers[worker].log.rank = rank

    def stop(self, worker: int) -> None:
        """Begin to end a worker; does not wait."""
        if worker in self._workers:
            self._workers[worker].process.events.put(_Stop())

    def close(self) -> None:
        """End all workers and wait for their ends."""
        for running in self._workers.values():
            running.process.events.put(_Stop())
        deadline = Deadline.after(_END_SECONDS)
        for worker, running in self._workers.items():
            running.thread.join(deadline.remaining())
            if running.thread.is_alive():
                logger.warning("Worker %d of this job did not end within %g s.", worker, _END_SECONDS)

    def _supervise(self, worker: int, host: str, process: WorkerProcess, log: HandlerLog) -> None:
        try:
            self._await_end(worker, host, process, log)
        finally:
            process.close(TERM_SECONDS)

    def _await_end(self, worker: int, host: str, process: WorkerProcess, log: HandlerLog) -> None:
        phase, has_ended, deadline = STARTING, False, Deadline.after(JOB_SECONDS)
        while True:
            try:
                event = process.events.get(timeout=deadline.remaining())
            except queue.Empty:
                why = f"did not deliver the result of fn within {self._job.config.result_timeout:g} s after fn ended"
                self._inbox.put(Lost(worker, FailureReport(log.rank, host, why)))
                return
            if isinstance(event, spec.Ready):
                phase = IN_FN
            elif isinstance(event, spec.Joined):
                phase = CONNECTED
            elif isinstance(event, spec.FnEnded):
                has_ended, deadline = True, Deadline.after(event.seconds)
            elif isinstance(event, spec.Returned):
                self._inbox.put(Returned(worker, event.content))
                process.send(spec.Leave(EXIT_SECONDS))
                process.wait_for_exit(EXIT_SECONDS)
                return
            elif isinstance(event, spec.Raised):
                self._inbox.put(Lost(worker, _failure(event, log.rank, host, phase)))
                process.send(spec.Leave(GRACE_SECONDS))
                process.wait_for_exit(GRACE_SECONDS)
                return
            elif isinstance(event, Exited):
                process.close(TERM_SECONDS)  # so that its stderr is complete
                tail = process.output.stderr_tail()
                cause, where = describe_exit(event.returncode), ENDED if has_ended else phase
                self._inbox.put(Lost(worker, FailureReport(log.rank, host, cause, phase=where, stderr_tail=tail)))
                return
            elif isinstance(event, _Stop):
                return


def _failure(event: spec.Raised, rank: int, host: str, phase: str) -> FailureReport:
    where = phase if event.phase is None else event.phase
    return FailureReport(rank, host, event.cause, traceback=event.traceback, phase=where, secondary=event.secondary)


def own_host() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
