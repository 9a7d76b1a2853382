"""The stall detector: finds out why a collective does not end.

If a collective takes too long, a waiting rank posts a question in the rendezvous. Every rank has a thread that answers,
even while the rank's main thread is busy in Python. The answer contains the rank's pending collectives and the problems
of processes on its host, such as one that has ended. All waiting ranks then make a report, and the first of them logs
it. The stacks of a rank's threads are much larger than its answer, so only those that a report shows are transferred.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from sparkhvd import _core
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.comm.stall.report import StallReport, report
from sparkhvd.comm.stall.snapshot import (
    Condition,
    PendingCollective,
    ProcessIdentity,
    decode_condition,
    decode_identity,
    decode_stacks,
    encode,
    own_identity,
    process_problem,
    stacks,
)
from sparkhvd.comm.stall.stragglers import Straggler, publish_straggler
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, SparkHvdError

_log = logging.getLogger(__name__)

# The interval at which the thread polls. A process that did not call shutdown() exits up to this much later, or later
# still while the thread collects answers.
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 3.0
_STORE_SECONDS = 10.0
# The longest time before the collective timeout at which the straggler is published for the job's supervisors.
_PUBLISH_EARLIER_SECONDS = 1.5


@dataclass
class _Watched:
    """State that any thread may read."""

    progress: str = ""
    report: StallReport | None = None


class WatchedChannel(Protocol):
    """The part of a ``Channel`` that the detector uses."""

    @property
    def engine(self) -> _core.Engine:
        """Return the engine whose operations are watched."""


class StallDetector:
    """One rank's part in finding stragglers; owns a thread from construction to ``close()``.

    Args:
        channels: the channels whose collectives are watched, by process set id; may change at any time.
        sets: the ranks of every process set; may change at any time.
        rendezvous: where questions and answers are posted; closing it wakes the thread.
        context: the rank's position in the job, and the limits in its configuration.
        scope: distinguishes the communicators of a job.
    """

    def __init__(
        self,
        channels: Mapping[int, WatchedChannel],
        sets: Mapping[int, tuple[int, ...]],
        rendezvous: RendezvousClient,
        context: LaunchContext,
        scope: str,
    ) -> None:
        self._channels = channels
        self._sets = sets
        self._rendezvous = rendezvous
        self._world = context.world
        self._rank_in_job = context.rank_in_job
        self._scope = scope
        self._timeout = context.config.collective_timeout
        self._shutdown_after = context.config.stall_shutdown_seconds
        # The ranks must be asked before the job ends, because the error names the missing rank by their answers.
        end = min(self._timeout, self._shutdown_after or self._timeout)
        self._patience = min(context.config.stall_check_seconds, end / 4)
        self._watched = _Watched()
        self._publish_after = self._timeout - min(_PUBLISH_EARLIER_SECONDS, self._timeout / 4)
        self._next_report = self._patience
        self._identities: dict[int, ProcessIdentity] = {}  # of the ranks that have joined the stall check, by rank
        self._operations, self._changed = 0, time.monotonic()
        self._stopping = threading.Event()
        self._is_posted(0, 0.0)  # opens the connection for questions
        self._rendezvous.set(self._key("identity", self._world.rank), encode(own_identity()), self._store_deadline())
        self._thread = threading.Thread(target=self._run, name="sparkhvd-stall-detector")
        self._thread.start()

    @property
    def last_report(self) -> StallReport | None:
        """Return the latest report that this rank has collected; None while no collective has taken too long."""
        return self._watched.report

    def note_progress(self, text: str) -> None:
        """Set the progress that this rank reports when asked."""
        self._watched.progress = text

    def close(self) -> None:
        """End the thread. Close the rendezvous first, to interrupt the thread's wait. Closing twice is fine."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            question = 0
            interval = min(_POLL_SECONDS, self._patience / 4)
            while not self._is_over():
                if self._is_posted(question, interval):
                    self._answer(question)
                    question += 1
                self._check_for_stall(question)
        except SparkHvdError as error:
            # Without the rendezvous no rank can be asked, and the job is over or about to be.
            _log.debug("The stall detector of rank %d ends: %s", self._world.rank, error)

    def _is_over(self) -> bool:
        # The interpreter waits for this thread at exit, so it ends once the main thread has ended.
        return self._stopping.is_set() or not threading.main_thread().is_alive()

    def _is_posted(self, question: int, seconds: float) -> bool:
        """Return whether the question is posted within ``seconds``."""
        try:
            self._rendezvous.get(self._key("question", question), Deadline.after(seconds))
        except DeadlineExceededError:
            return False
        return True

    def _check_for_stall(self, question: int) -> None:
        operations = self._completed_operations()
        if operations != self._operations:
            self._operations, self._changed = operations, time.monotonic()
        oldest = self._longest_wait()
        if oldest < self._patience:
            self._next_report = self._patience
        elif 0 < self._shutdown_after <= oldest:
            self._end_job()
        elif oldest >= self._publish_after:
            self._publish_straggler(f"SPARKHVD_COLLECTIVE_TIMEOUT={self._timeout:g}")
        elif oldest >= self._next_report:
            # The first rank sets the key; the others find it set.
            self._rendezvous.set(self._key("question", question), b"", self._store_deadline())

    def _pending(self) -> tuple[PendingCollective, ...]:
        """Return the collectives that this rank waits for, the longest wait first."""
        collectives = [
            PendingCollective(title, age, number)
            for number, channel in list(self._channels.items())
            for title, age in channel.engine.pending()
        ]
        return tuple(sorted(collectives, key=lambda collective: -collective.age))

    def _completed_operations(self) -> int:
        return sum(channel.engine.counters()["operations"] for channel in list(self._channels.values()))

    def _longest_wait(self) -> float:
        return max((collective.age for collective in self._pending()), default=0.0)

    def _answer(self, question: int) -> None:
        condition, since = self._own_condition(), self._patience / 2
        for what, content in (
            ("stacks", json.dumps(stacks(without=self._thread)).encode()),
            ("answer", encode(condition)),  # published last, so that every answer has its stacks
        ):
            self._rendezvous.set(self._key(f"{what}/{question}", self._world.rank), content, self._store_deadline())
        if condition.longest_wait < since:
            return
        self._next_report = 2 * condition.longest_wait
        latest = self._collect(question, since)
        self._watched.report = latest
        first = min((rank for rank, other in latest.conditions.items() if other.longest_wait >= since), default=-1)
        if latest.tensors and first == self._world.rank:
            _log.warning("%s", latest)

    def _own_condition(self) -> Condition:
        neighbours = self._channels[0].engine.host_ranks()
        identities = self._identities_of(range(min(neighbours), max(neighbours) + 1))
        problems = {rank: process_problem(identities[rank]) for rank in neighbours if rank in identities}
        return Condition(
            pending=self._pending(),
            operations=self._completed_operations(),
            idle=time.monotonic() - self._changed,
            progress=self._watched.progress,
            neighbours={rank: problem for rank, problem in problems.items() if problem is not None},
        )

    def _collect(self, question: int, since: float) -> StallReport:
        """Return the report on all answers that arrive within a few seconds."""
        everyone = range(self._world.size)
        answers = self._rendezvous.get_present(
            self._prefix(f"answer/{question}"), everyone, Deadline.after(_ANSWER_SECONDS)
        )
        conditions = {rank: decode_condition(answer) for rank, answer in answers.items()}
        stall_report = report(conditions, self._identities_of(everyone), dict(self._sets), since=since)
        deadline = Deadline.after(_ANSWER_SECONDS)
        with suppress(DeadlineExceededError):  # an overloaded server: the report is useful without stacks
            for rank in stall_report.shown:
                if rank in conditions:
                    published = self._rendezvous.get(self._key(f"stacks/{question}", rank), deadline)
                    conditions[rank] = replace(conditions[rank], stacks=decode_stacks(published))
        return replace(stall_report, conditions=conditions)

    def _identities_of(self, ranks: range) -> Mapping[int, ProcessIdentity]:
        """Return the identities of these ranks, as far as they have joined the stall check, and of others."""
        if any(rank not in self._identities for rank in ranks):
            posted = self._rendezvous.get_present(self._prefix("identity"), ranks)
            self._identities |= {rank: decode_identity(identity) for rank, identity in posted.items()}
        return dict(self._identities)

    def _end_job(self) -> None:
        latest, pending = self._watched.report, self._pending()
        if not pending:
            return  # the last collective has just ended
        stalled = latest.headline() if latest is not None and latest.tensors else pending[0]
        _log.error("Aborting the job, which has stalled for %.0f s: %s.", self._shutdown_after, stalled)
        self._publish_straggler(f"SPARKHVD_STALL_SHUTDOWN_SECONDS={self._shutdown_after:g}")
        for channel in list(self._channels.values()):
            channel.engine.abort(f"stalled for more than {self._shutdown_after:g} s: {stalled}")

    def _publish_straggler(self, limit: str) -> None:
        """Publish the rank that the others waited for until this limit."""
        latest = self._watched.report
        if latest is None or not latest.stragglers:
            return
        rank = latest.stragglers[0]
        stack = next(iter(latest.conditions.get(rank, Condition()).stacks.values()), "")
        straggler = Straggler(self._rank_in_job(rank), f"{latest.headline()}, until {limit} ended the job", True, stack)
        with suppress(SparkHvdError):  # the job ends in any case
            publish_straggler(self._rendezvous, straggler)

    def _prefix(self, what: str) -> str:
        return f"{self._scope}/stall/{what}/"

    def _key(self, what: str, number: int) -> str:
        return f"{self._prefix(what)}{number}"

    @staticmethod
    def _store_deadline() -> Deadline:
        return Deadline.after(_STORE_SECONDS)
