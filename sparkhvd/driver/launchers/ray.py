"""A launcher that starts the ranks as actors of a Ray cluster, without Spark.

The driver and the ranks communicate through Ray only: the driver fetches messages from the actors. So the driver needs
no port, and Ray Client works.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.deadline import Deadline
from sparkhvd.driver.launcher import LaunchRequest, warn_of_versions
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.ray.cluster import CONNECTION, RankResources, describe_nodes, node_resources
from sparkhvd.driver.ray.gang import RayGang, RayPlacement, ended_actor
from sparkhvd.driver.results import results_in_order
from sparkhvd.errors import LaunchError, SlotsError, StartTimeoutError
from sparkhvd.rpc.messages import Output
from sparkhvd.task.assignment import assign
from sparkhvd.task.devices import mixed_devices
from sparkhvd.task.failure_report import STARTING, FailureReport
from sparkhvd.task.host.messages import HostDone, HostLost, HostReady
from sparkhvd.task.job import Job
from sparkhvd.task.rank import JobPlan
from sparkhvd.task.ray.messages import Node, RankPart, RankPhase
from sparkhvd.task.supervision import Outcome

_POLL_SECONDS = 1.0
# How long the other actors may take to report the outcome after a failure.
_FAILED_SECONDS = 3.0
# How long Ray may take to report a lost actor after other ranks have noticed that the actor is lost.
_LOSS_SECONDS = 10.0
_END_SECONDS = 30.0


class RayLauncher:
    """Starts jobs on the Ray cluster of this process.

    Args:
        request: the request of ``run``.
        placement: where the ranks run; None makes a placement group for the job.
        takes_commands: whether the ranks run the commands of a ``RayExecutor``.
    """

    on_spark: ClassVar[bool] = False
    takes_rows: ClassVar[bool] = False
    takes_resources: ClassVar[bool] = True

    def __init__(
        self, request: LaunchRequest, placement: RayPlacement | None = None, *, takes_commands: bool = False
    ) -> None:
        self._request = request
        resources = RankResources(request.resources.cpus or 1, float(request.resources.gpus or 0.0))
        self._placement = RayPlacement(resources) if placement is None else placement
        self._takes_commands = takes_commands

    def reserve(self, deadline: Deadline) -> int:  # noqa: ARG002 - the placement group waits
        if self._request.num_proc is not None:
            return self._request.num_proc
        resources = self._placement.resources
        with CONNECTION.opened():
            nodes = node_resources()
        count = sum(resources.ranks_in(node) for node in nodes)
        if count == 0:
            raise SlotsError(
                f"The Ray cluster has no room for a rank with {resources}: it has {describe_nodes(nodes)}. Request "
                "fewer resources, or add nodes."
            )
        return count

    def launch(self, job: Job, stream: LogStream) -> RayHandle:
        return RayHandle(job, stream, self._placement, takes_commands=self._takes_commands)


class RayHandle:
    """The actors of one job, and the thread that communicates with them.

    Attributes:
        started: done once all ranks run; its exception is set if they do not start.
    """

    def __init__(self, job: Job, stream: LogStream, placement: RayPlacement, *, takes_commands: bool = False) -> None:
        self.started: futures.Future[None] = futures.Future()
        self._job = job
        self._stream = stream
        self._placement = placement
        self._takes_commands = takes_commands
        self._deadline = Deadline.after(job.start_timeout)
        self._token = secrets.token_bytes(32)
        self._closing = threading.Event()
        self._actors: list[Any] = []  # by index; complete before ``started`` is done
        self._plan: JobPlan | None = None
        self._phases: dict[int, str] = {}  # by the index of the actor
        with ExitStack() as stack:
            stack.enter_context(CONNECTION.opened())
            self._gang = RayGang(placement, job.num_proc)
            stack.callback(self._gang.close)
            self._stack = stack.pop_all()
        self._contents = in_background(self._run, "sparkhvd-job")

    def wait_started(self, deadline: Deadline) -> None:
        """Return at once: the thread that communicates with the actors ends the job if they do not start."""

    def results(self) -> list[bytes]:
        is_done_within(self._contents)
        return results_in_order(self._contents.result(), self._job.num_proc)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Wait for the end of the job, and return whether it has ended."""
        return is_done_within(self._contents, seconds)

    def execute(self, command: bytes, ranks: Sequence[int]) -> list[Any]:
        """Let ranks of a ``RayExecutor`` run a command, and return the references to their results."""
        if self._plan is None:
            raise LaunchError("The ranks of this job are not running yet.")
        content = ray.put(command)  # once for all ranks
        slots = [self._plan.slots[rank] for rank in ranks]
        return [self._actors[slot.offer.task_index].execute.remote(content) for slot in slots]

    def close(self) -> None:
        self._closing.set()
        with self._stack:  # releases the resources, even if another Ctrl-C interrupts the wait
            # The thread may still start actors; it notices the event within a second.
            if not self.started.done():
                futures.wait([self._contents], _END_SECONDS)
        futures.wait([self._contents], _END_SECONDS)

    def _run(self) -> dict[int, bytes | Outcome]:
        try:
            self._start()
        except BaseException as error:
            self.started.set_exception(error)
            raise
        self._stream.started.set()
        self.started.set_result(None)
        return self._await_outcome()

    def _start(self) -> None:
        limit = self._placement.seconds
        deadline, seconds = (
            (self._deadline, self._job.start_timeout) if limit is None else (Deadline.after(limit), limit)
        )
        self._gang.reserve(deadline, seconds, self._closing.is_set)
        if limit is not None:
            self._deadline = Deadline.after(self._job.start_timeout)
        self._actors = self._gang.start_actors()
        nodes: list[Node] = self._answers([actor.node.remote() for actor in self._actors], "start their actors")
        job, addresses = ray.put(self._job), tuple(node.address for node in nodes)
        cpus = self._placement.resources.cpus
        parts = [
            RankPart(index, addresses, cpus, self._takes_commands, self._token) for index in range(len(self._actors))
        ]
        answers: list[HostReady | HostLost] = self._answers(
            [actor.prepare.remote(job, part) for actor, part in zip(self._actors, parts, strict=True)],
            "prepare their ranks",
        )
        plan = self._plan = self._make_plan(answers)
        self._phases = dict.fromkeys(range(len(self._actors)), STARTING)
        self._answers([actor.start.remote(plan) for actor in self._actors], "start their ranks")

    def _make_plan(self, answers: Sequence[HostReady | HostLost]) -> JobPlan:
        for answer in answers:
            if isinstance(answer, HostLost):
                raise LaunchError(answer.why)
        ready = [answer for answer in answers if isinstance(answer, HostReady)]
        offers = [offer for answer in ready for offer in answer.offers]
        if mixed := mixed_devices(offers, self._job):
            raise LaunchError(mixed)
        warn_of_versions(self._job, offers)
        rendezvous = (offers[0].bind_host, ready[0].rendezvous_port)
        return JobPlan(tuple(assign(offers)), (rendezvous,), self._token, self._job.config.encrypt)

    def _answers(self, refs: Sequence[Any], purpose: str) -> list[Any]:
        """Return the results of calls to all actors.

        Raises:
            LaunchError: an actor was lost, or the job was cancelled.
            StartTimeoutError: not all actors answered in time.
        """
        waiting = list(refs)
        while waiting:
            seconds = max(0.01, min(_POLL_SECONDS, self._deadline.remaining()))
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=seconds)
            for ref in done:
                self._check_answer(ref, refs.index(ref))
            if self._closing.is_set():
                raise LaunchError("The job was cancelled before its ranks had started.")
            if waiting and self._deadline.expired():
                raise StartTimeoutError(
                    f"{len(waiting)} of {len(refs)} Ray actors did not {purpose} within "
                    f"start_timeout={self._job.start_timeout:g} s. Run `ray list actors` to see what they wait "
                    "for, and check that imports do not hang on the nodes. If they need more time, raise start_timeout."
                )
        return [ray.get(ref) for ref in refs]

    def _check_answer(self, ref: Any, index: int) -> None:
        try:
            ray.get(ref)
        except RayError as error:
            raise LaunchError(
                f"The Ray actor of rank {index} did not start: {ended_actor(error)}. Check that every node has "
                "the same Python and sparkhvd as this process, or install them with ray.init(runtime_env=...)."
            ) from error

    def _await_outcome(self) -> dict[int, bytes | Outcome]:
        """Handle the messages of the actors until each has reported the outcome of its rank."""
        outcomes = _ReportedOutcomes()
        requests = {actor.messages.remote(): index for index, actor in enumerate(self._actors)}
        while requests and not outcomes.is_overdue():
            for ref in _ready_refs(requests):
                index = requests.pop(ref)
                try:
                    messages = ray.get(ref)
                except RayError as error:
                    return outcomes.after_loss(self._loss(index, error))
                for message in messages:
                    self._handle(index, message, outcomes)
                if index not in outcomes.reported:
                    requests[self._actors[index].messages.remote()] = index
            if self._closing.is_set():
                raise LaunchError("The job was cancelled.")
        return outcomes.contents()

    def _handle(self, index: int, message: object, outcomes: _ReportedOutcomes) -> None:
        if isinstance(message, Output):
            self._stream.handle(message)
        elif isinstance(message, RankPhase):
            self._phases[index] = message.phase
        elif isinstance(message, HostDone | HostLost):
            outcomes.add(index, message)

    def _loss(self, index: int, error: RayError) -> FailureReport:
        if self._plan is None:
            raise LaunchError("The ranks of this job are not running yet.")
        slot = next(slot for slot in self._plan.slots if slot.offer.task_index == index)
        cause = f"was lost ({self._phases[index]}): its Ray actor ended unexpectedly. {ended_actor(error)}"
        return FailureReport(slot.world.rank, slot.offer.host, cause)


class _ReportedOutcomes:
    """The outcomes of the ranks, as their actors report them.

    Attributes:
        reported: the indices of the actors that have reported.
    """

    def __init__(self) -> None:
        self.reported: set[int] = set()
        self._contents: dict[int, bytes | Outcome] = {}
        self._problem = ""
        self._deadline: Deadline | None = None

    def add(self, index: int, message: HostDone | HostLost) -> None:
        self.reported.add(index)
        if isinstance(message, HostLost):
            self._problem = self._problem or message.why
        else:
            self._contents |= message.contents
        if self._problem or self._failures():
            # If all failures are secondary, another rank was lost, and Ray may be the last to notice.
            primary = any(not failure.secondary for failure in self._failures())
            self._deadline = self._deadline or Deadline.after(_FAILED_SECONDS if primary else _LOSS_SECONDS)

    def is_overdue(self) -> bool:
        return self._deadline is not None and self._deadline.expired()

    def contents(self) -> dict[int, bytes | Outcome]:
        """Return the results and outcomes by rank.

        Raises:
            LaunchError: a host was lost, and no rank reported a failure.
        """
        if self._problem and not self._failures():
            raise LaunchError(self._problem)
        return self._contents

    def after_loss(self, loss: FailureReport) -> dict[int, bytes | Outcome]:
        """Return the outcomes after the loss of an actor: only the loss itself, unless a rank has failed on its own."""
        if any(not failure.secondary for failure in self._failures()):
            return self._contents
        return {loss.rank: Outcome(loss)}

    def _failures(self) -> list[FailureReport]:
        outcomes = [content for content in self._contents.values() if isinstance(content, Outcome)]
        return [outcome.failure for outcome in outcomes if outcome.failure is not None]


def _ready_refs(requests: Mapping[Any, int]) -> list[Any]:
    """Return all references that are ready; wait up to ``_POLL_SECONDS`` for the first."""
    refs = list(requests)
    ready, _ = ray.wait(refs, num_returns=1, timeout=_POLL_SECONDS)
    return ray.wait(refs, num_returns=len(refs), timeout=0)[0] if ready else []
