"""One worker of an elastic job: its process, from its start to its end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sparkhvd.comm.connect.launch_context import LaunchContext, MembershipAddress
from sparkhvd.config import changed_environment
from sparkhvd.deadline import Deadline
from sparkhvd.task.failure_report import CONNECTED, ENDED, IN_FN, STARTING, FailureReport, describe_exit
from sparkhvd.task.job import RESULT_CAP_BYTES, Job
from sparkhvd.task.supervision import EXIT_SECONDS, GRACE_SECONDS, JOB_SECONDS, TERM_SECONDS
from sparkhvd.task.worker import spec
from sparkhvd.task.worker.exit import Exited
from sparkhvd.task.worker.import_path import IMPORT_PATH
from sparkhvd.task.worker.output import RankLog
from sparkhvd.task.worker.process import WorkerProcess, spawn_worker
from sparkhvd.task.worker.threads import thread_defaults


@dataclass(frozen=True)
class WorkerResult:
    """The pickled result of a worker has arrived."""

    worker: int
    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Lost:
    """A worker raised, exited, was killed, or could not be started."""

    worker: int
    failure: FailureReport


End = WorkerResult | Lost


@dataclass(frozen=True)
class WorkerLocation:
    """Where a worker runs, for the other ranks.

    Attributes:
        host_key: equal for workers that may share memory.
        host: the name of the host in messages.
        bind_host: the address at which the other ranks reach it best.
    """

    host_key: str
    host: str
    bind_host: str


# Receives the id of a worker's process and its temporary folder, and returns what to call after the worker's end.
Guard = Callable[[int, str | None], Callable[[], None]]


def unguarded(leader: int, folder: str | None) -> Callable[[], None]:  # noqa: ARG001 - see ``Guard``
    """Guard nothing: a worker whose parent is killed ends itself."""
    return lambda: None


@dataclass(frozen=True)
class _Stop:
    """Ends a worker."""


class ElasticWorker:
    """A worker process, and the thread that supervises it.

    Args:
        number: the number of the worker.
        location: where it runs.
        job: the job.
        membership: the address of the membership server, without a worker's number.
        defaults: environment variables that apply unless something else sets them.
        log: receives the output of the worker; the log's rank changes with every generation.
        report: called at most once, from the thread, with the end of the worker; not called if ``stop`` ended it.
        variables: environment variables for ``fn``.
        guard: see ``RunningWorkers``.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(  # noqa: PLR0917
        self,
        number: int,
        location: WorkerLocation,
        job: Job,
        membership: MembershipAddress,
        defaults: Mapping[str, str],
        log: RankLog,
        report: Callable[[End], None],
        variables: tuple[tuple[str, str], ...] = (),
        guard: Guard = unguarded,
    ) -> None:
        self._number = number
        self._host = location.host
        self._result_timeout = job.config.result_timeout
        self._report = report
        self._log = log
        log.rank = number  # until its first generation
        env = dict(job.env)
        spawned = spawn_worker(env, defaults, job.preload, job.executable, job.config.warm_seconds)
        self._process = WorkerProcess(spawned, log)
        try:
            self._unguard = guard(self._process.pid, spawned.scratch)
        except BaseException:
            self._process.close()
            raise
        self._process.output.start()
        context = LaunchContext(
            host_key=location.host_key,
            bind_host=location.bind_host,
            config=replace(job.config, network_interfaces=",".join(job.nics)) if job.nics else job.config,
            membership=replace(membership, worker=number),
        )
        all_variables = (("SPARKHVD_LOG_LEVEL", str(job.log_level)), *variables)
        path = changed_environment(env).get(IMPORT_PATH)
        self._process.send(spec.WorkerSpec(context, job.payload, all_variables, path, job.commits))
        self._thread = threading.Thread(target=self._supervise, name="sparkhvd-elastic-worker", daemon=True)
        self._thread.start()

    def set_rank(self, rank: int) -> None:
        """Set the rank under which logs and reports name the worker, in a new generation."""
        self._log.rank = rank

    def stop(self) -> None:
        """Begin to end the worker, without waiting until it has ended."""
        self._process.events.put(_Stop())

    def wait(self, deadline: Deadline) -> bool:
        """Wait until the worker has ended, and return whether it ended in time."""
        self._thread.join(deadline.remaining())
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        try:
            self._await_end()
        finally:
            self._process.close(TERM_SECONDS)
            self._unguard()
            self._log.close()

    def _await_end(self) -> None:
        process = self._process
        phase, fn_has_ended, deadline = STARTING, False, Deadline.after(JOB_SECONDS)
        while True:
            try:
                event = process.events.get(timeout=deadline.remaining())
            except queue.Empty:
                self._lose(f"did not deliver the result of fn within {self._result_timeout:g} s after fn ended")
                return
            if isinstance(event, spec.Ready):
                phase = IN_FN
            elif isinstance(event, spec.Joined):
                phase = CONNECTED
            elif isinstance(event, spec.FnEnded):
                fn_has_ended, deadline = True, Deadline.after(event.seconds)
            elif isinstance(event, spec.Returned):
                self._return(event.content)
                process.send(spec.Leave(EXIT_SECONDS))
                process.wait_for_exit(EXIT_SECONDS)
                return
            elif isinstance(event, spec.Raised):
                failure_phase = phase if event.phase is None else event.phase
                failure = FailureReport(
                    self._log.rank,
                    self._host,
                    event.cause,
                    traceback=event.traceback,
                    phase=failure_phase,
                    secondary=event.secondary,
                    error=event.error,
                    is_final=event.is_final,
                )
                self._report(Lost(self._number, failure))
                process.send(spec.Leave(GRACE_SECONDS))
                process.wait_for_exit(GRACE_SECONDS)
                return
            elif isinstance(event, Exited):
                process.close(TERM_SECONDS)  # so that its stderr is complete
                failure_phase = ENDED if fn_has_ended else phase
                self._lose(describe_exit(event.returncode), failure_phase, stderr_tail=process.output.stderr_tail())
                return
            elif isinstance(event, _Stop):
                return

    def _return(self, content: bytes) -> None:
        if len(content) > RESULT_CAP_BYTES:
            self._lose(
                f"returned {len(content):,} bytes; the driver accepts at most {RESULT_CAP_BYTES:,} bytes from all "
                "ranks together",
                ENDED,
            )
        else:
            self._report(WorkerResult(self._number, content))

    def _lose(self, cause: str, phase: str = "", *, stderr_tail: str = "") -> None:
        report = FailureReport(self._log.rank, self._host, cause, stderr_tail=stderr_tail, phase=phase)
        self._report(Lost(self._number, report))


class RunningWorkers:
    """The workers of one process, by number; used by one thread.

    Args:
        job: the job of the workers.
        membership: the address of the membership server, without a worker's number.
        cpus: the number of cores of each worker.
        open_log: returns a destination for the output of one worker.
        report: called with the end of each worker, from a thread of the worker; not called if ``stop`` ended it.
        variables: environment variables for ``fn``.
        guard: called with the process and the temporary folder of each worker; the result is called after its end.
    """

    def __init__(  # noqa: PLR0917
        self,
        job: Job,
        membership: MembershipAddress,
        cpus: int,
        open_log: Callable[[], RankLog],
        report: Callable[[End], None],
        variables: tuple[tuple[str, str], ...] = (),
        guard: Guard = unguarded,
    ) -> None:
        self._job = job
        self._membership = membership
        self._defaults = thread_defaults(cpus)
        self._open_log = open_log
        self._report = report
        self._variables = variables
        self._guard = guard
        self._workers: dict[int, ElasticWorker] = {}

    def start(self, number: int, location: WorkerLocation) -> None:
        """Start a worker, or report that it did not start."""
        self._workers = {key: worker for key, worker in self._workers.items() if not worker.wait(Deadline.after(0.0))}
        log = self._open_log()
        try:
            self._workers[number] = ElasticWorker(
                number,
                location,
                self._job,
                self._membership,
                self._defaults,
                log,
                self._report,
                self._variables,
                self._guard,
            )
        except OSError as error:
            log.close()
            why = f"did not start: {error.strerror or error}"
            self._report(Lost(number, FailureReport(number, location.host, why, phase=STARTING)))

    def set_rank(self, number: int, rank: int) -> None:
        """Set the rank of a worker in a new generation; do nothing if the worker is unknown."""
        if number in self._workers:
            self._workers[number].set_rank(rank)

    def stop(self, number: int) -> None:
        """Begin to end a worker; do nothing if it is unknown."""
        if number in self._workers:
            self._workers[number].stop()

    def close(self, seconds: float) -> list[int]:
        """End all workers, and return the numbers of those that have not ended in time."""
        for worker in self._workers.values():
            worker.stop()
        deadline = Deadline.after(seconds)
        return [number for number, worker in self._workers.items() if not worker.wait(deadline)]
