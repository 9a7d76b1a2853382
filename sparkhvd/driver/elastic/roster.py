"""The workers of an elastic job: turns reports, which may be late or repeated, into the view for ``policy.decide``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from sparkhvd.driver.elastic.policy import Member, Phase, View

_MAX_REASONS = 8
# A failure of a host is forgotten after this many times the longest cooldown.
_REMEMBERED_COOLDOWNS = 10


@dataclass(frozen=True)
class Cooldown:
    """The time for which no worker is started on a host after a failure.

    The time is ``shortest`` seconds after the first failure. Every further failure doubles it, up to ``longest``
    seconds.
    """

    shortest: float = 1.0
    longest: float = 60.0

    def seconds(self, failures: int) -> float:
        return min(self.longest, self.shortest * 2.0 ** min(failures - 1, 60))


class Roster:
    """All workers of a job.

    Methods that note a report return whether it counts. No method does I/O. Methods take the time as an argument, which
    must not decrease from call to call.
    """

    def __init__(self, cooldown: Cooldown, now: float) -> None:
        self._cooldown = cooldown
        self._members: dict[int, Member] = {}
        self._capacity: dict[str, int] = {}
        self._withdrawn: frozenset[int] = frozenset()
        self._failures: dict[str, deque[float]] = {}
        self._cooling: dict[str, float] = {}
        self._generation = 0
        self._idle = True
        self._gathered_since: float | None = now
        self._notified = False
        self._stateful = False
        self._restarts = 0
        self._fruitless = 0
        self._failed_starts = 0
        self._hosts_of_failed_starts: set[str] = set()
        self._newest = 0  # the commit that the current generation began with
        self._undisturbed = True  # whether the current generation has lost no member and was not asked to regroup
        self._has_finished = False  # whether the training function has returned on all ranks
        self._failed_end = ""
        # The newest commit so far; reset to 0 when the job begins anew after a commit was published to its Store.
        self._furthest = 0
        self._store_has_advanced = False  # whether a commit was published to the Store since the job last began
        self._has_published = False  # whether the current generation has published a commit to the job's Store
        self._raised: set[str] = set()  # the errors of the user's function in the current generation
        self._same_errors: dict[str, int] = {}  # generations that an error has ended, since the last new commit
        self._final_error = ""
        self._unreachable: set[tuple[int, int]] = set()  # see ``View``
        self._reasons: deque[str] = deque(maxlen=_MAX_REASONS)

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def is_idle(self) -> bool:
        """Return whether no generation is intact."""
        return self._idle

    def member(self, worker: int) -> Member | None:
        """Return a worker that is not lost."""
        return self._members.get(worker)

    def view(self, now: float) -> View:
        cooling = frozenset(host for host, until in self._cooling.items() if until > now)
        same_error, same_errors = max(self._errors_so_far().items(), key=itemgetter(1), default=("", 0))
        return View(
            generation=self._generation,
            members=tuple(self._members.values()),
            capacity=dict(self._capacity),
            withdrawn=self._withdrawn,
            cooling=cooling,
            idle=self._idle,
            gathered_since=self._gathered_since,
            notified=self._notified,
            stateful=self._stateful,
            restarts=self._restarts,
            fruitless=self._fruitless,
            failed_starts=self._failed_starts if self._capacity.keys() <= self._hosts_of_failed_starts else 0,
            failed_end=self._failed_end,
            final_error=self._final_error,
            same_error=same_error,
            same_errors=same_errors,
            unreachable=frozenset(self._unreachable),
            reasons=tuple(self._reasons),
        )

    def offer(self, capacity: Mapping[str, int], withdrawn: frozenset[int] = frozenset()) -> None:
        """Set the offered slots by host, and the workers whose slots are withdrawn."""
        self._capacity = {host: count for host, count in capacity.items() if count > 0}
        self._withdrawn = withdrawn

    def note(self, reason: str) -> None:
        """Add a reason to the list in the job's error message, unless it equals the latest one."""
        if not self._reasons or self._reasons[-1] != reason:
            self._reasons.append(reason)

    def started(self, worker: int, host: str, now: float) -> None:
        self._members[worker] = Member(worker, host, Phase.STARTING, now)

    def waiting(self, worker: int, generation: int, commit: int, reason: str, now: float) -> bool:
        """Note that a worker waits in ``hvd.init()`` for the generation after ``generation``."""
        member = self._members.get(worker)
        if member is None or generation != member.generation or member.phase in {Phase.WAITING, Phase.RETURNED}:
            return False
        self._failed_starts = 0
        self._hosts_of_failed_starts.clear()
        was_member = member.phase is not Phase.STARTING
        if was_member and self._has_finished:
            reason = f"{reason or 'it called hvd.init() again'} (after the training had ended)"
            self._failed_end = self._failed_end or reason
        self._members[worker] = replace(member, phase=Phase.WAITING, since=now, commit=commit)
        if was_member:
            if reason:
                self.note(f"Rank {member.rank} on host {member.host} left generation {generation}: {reason}")
            self._break(now)
            self._lose_early_returns(now)
        self._gather(now)
        return True

    def unreachable(self, worker: int, ranks: Iterable[int]) -> None:
        """Note that a worker could not connect to these ranks of its generation."""
        workers = {m.rank: m.worker for m in self._members.values() if m.generation == self._generation}
        self._unreachable.update((worker, workers[rank]) for rank in ranks if rank in workers)

    def connected(self, worker: int, generation: int) -> None:
        """Note that a worker has reached all ranks of its generation."""
        member = self._members.get(worker)
        if member is not None and member.generation == generation == self._generation:
            reached = {other.worker for other in self._members.values() if other.generation == generation}
            self._unreachable -= {pair for pair in self._unreachable if worker in pair and reached.issuperset(pair)}

    def synced(self, worker: int, generation: int, commit: int) -> bool:
        """Note that a member has the state of the job."""
        member = self._members.get(worker)
        if member is None or member.phase is not Phase.RUNNING or generation != member.generation:
            return False
        self._members[worker] = replace(member, commit=max(commit, 0))
        self._stateful = True
        self._unreachable.clear()
        self._newest = max(self._newest, commit)  # a Store may have had a newer commit than the members
        self._furthest = max(self._furthest, commit)
        return True

    def published(self) -> None:
        """Note that the current generation has published a commit to the job's Store."""
        self._has_published = self._store_has_advanced = True

    def finished(self, worker: int, generation: int, now: float) -> bool:
        """Note that the training function has returned on all ranks of a generation."""
        member = self._members.get(worker)
        if member is None or member.phase is not Phase.RUNNING or generation != self._generation:
            return False
        self._has_finished = True
        self._members[worker] = replace(member, phase=Phase.FINISHED, since=now)
        return True

    def returned(self, worker: int, now: float) -> bool:
        """Note that the result of a worker has arrived."""
        member = self._members.get(worker)
        if member is None or member.phase is Phase.RETURNED:
            return False
        if member.generation != self._generation or self._generation == 0:
            why = "returned without being a member of the current generation"
            if member.phase is Phase.STARTING:
                why = "ended without calling hvd.init(), which every rank of an elastic job must call"
            return self.lost(worker, f"Worker {worker} on host {member.host} {why}", now)
        if member.phase is Phase.RUNNING and self._idle:  # the worker has not noticed that its generation is broken
            return self.lost(worker, _early_return(member), now)
        self._members[worker] = replace(member, phase=Phase.RETURNED, since=now)
        return True

    def raised(self, worker: int, error: str, *, is_final: bool) -> None:
        """Note the error of the user's function in a worker, before the worker is lost; see ``FailureReport``."""
        member = self._members.get(worker)
        if member is None or not error:
            return
        if member.phase is Phase.RUNNING:
            self._raised.add(error)
        # If a new worker fails while others train, the cause may be its host.
        if is_final and (self._idle or member.phase is not Phase.STARTING):
            self._final_error = self._final_error or error

    def lost(self, worker: int, reason: str, now: float, *, failed: bool = True) -> bool:
        """Note the end of a worker; ``failed`` counts as a failure of its host."""
        member = self._members.get(worker)
        if member is None or member.phase is Phase.RETURNED:
            return False
        del self._members[worker]
        self.note(reason)
        if failed:
            self._cool(member.host, now)
            if member.phase is Phase.STARTING:
                self._failed_starts += 1
                self._hosts_of_failed_starts.add(member.host)
        ending = any(other.phase in {Phase.FINISHED, Phase.RETURNED} for other in self._members.values())
        if member.phase is Phase.FINISHED or (ending and member.phase is Phase.RUNNING):
            self._failed_end = self._failed_end or reason
        if member.phase is Phase.RUNNING or member.generation == self._generation > 0:
            self._undisturbed = False
        if member.phase is Phase.RUNNING:
            self._break(now)
        self._gather(now)
        return True

    def notified(self) -> None:
        """Note that the members of the current generation were asked to leave it."""
        self._notified = True
        self._undisturbed = False

    def formed(self, workers: Sequence[int], now: float) -> int:
        """Begin the next generation and return its number."""
        commits = [self._members[worker].commit for worker in workers]
        newest = max(0, *commits)
        begins_anew = self._stateful and max(commits) < 0
        self._restarts += begins_anew
        if self._generation > 0:
            fruitless = self._undisturbed and newest <= self._newest
            self._fruitless = self._fruitless + 1 if fruitless else 0
        self._same_errors = self._errors_so_far()
        self._raised.clear()
        self._has_published = False
        self._furthest = max(self._furthest, newest)
        if begins_anew and self._store_has_advanced:
            self._furthest, self._store_has_advanced = 0, False
        self._newest = newest
        self._generation += 1
        for rank, worker in enumerate(workers):
            self._members[worker] = replace(
                self._members[worker], phase=Phase.RUNNING, since=now, generation=self._generation, rank=rank
            )
        self._idle, self._notified, self._undisturbed = False, False, True
        self._gathered_since = None
        return self._generation

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Set the ranks of the members of the current generation, if grouping by host requires another order."""
        for worker, rank in ranks.items():
            self._members[worker] = replace(self._members[worker], rank=rank)

    def _has_progressed(self) -> bool:
        """Return whether the current generation has made a commit that is newer than all earlier ones.

        A job that has begun anew repeats earlier commits, and the same error may return there.
        """
        newest = max((member.commit for member in self._members.values()), default=-1)
        return newest > self._furthest or self._has_published

    def _errors_so_far(self) -> dict[str, int]:
        """Return how many generations each error of the user's function has ended since the last new commit."""
        before = {} if self._has_progressed() else self._same_errors
        return {**before, **{error: before.get(error, 0) + 1 for error in self._raised}}

    def _lose_early_returns(self, now: float) -> None:
        """Count ranks as lost whose ``fn`` returned in a generation that another member has left to continue."""
        if self._has_finished:
            return
        for worker, member in list(self._members.items()):
            if member.phase is Phase.RETURNED:
                self._members[worker] = replace(member, phase=Phase.WAITING)  # `lost` ignores returned workers
                self.lost(worker, _early_return(member), now)

    def _break(self, now: float) -> None:
        if not self._idle:
            self._idle = True
            for worker, member in self._members.items():
                if member.phase is Phase.RUNNING:
                    self._members[worker] = replace(member, since=now)  # from now on, elastic_timeout limits its return

    def _gather(self, now: float) -> None:
        outstanding = any(member.phase is Phase.RUNNING for member in self._members.values())
        if self._idle and not outstanding and self._gathered_since is None:
            self._gathered_since = now

    def _cool(self, host: str, now: float) -> None:
        if self._cooling.get(host, now) > now:
            return  # the failure of a host ends all of its workers, but counts once
        failures = self._failures.setdefault(host, deque(maxlen=64))
        memory = _REMEMBERED_COOLDOWNS * self._cooldown.longest
        while failures and failures[0] < now - memory:
            failures.popleft()
        failures.append(now)
        self._cooling[host] = now + self._cooldown.seconds(len(failures))


def _early_return(member: Member) -> str:
    return (
        f"Rank {member.rank} on host {member.host} returned from fn or called sys.exit(0) before the training had "
        "ended on all ranks"
    )
