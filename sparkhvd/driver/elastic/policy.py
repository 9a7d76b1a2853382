"""The decisions of an elastic job: a pure function of its members, the offered slots, its limits and the time.

A *generation* is one fixed group of ranks. The job is idle once a member has left the generation or is lost. The
survivors then form the next generation as soon as all of them have arrived. Workers that become ready after that join
in a later generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from sparkhvd._util.counts import counted

# How long a ready worker waits for workers that are still starting: if they join together, the ranks reset only once.
JOIN_SECONDS = 5.0
# How long a job waits before it starts with fewer than num_proc ranks, if no further worker is starting.
SETTLE_SECONDS = 10.0
# A job fails after this many generations in a row that ended with an error although no member was lost, and without a
# new commit in between.
MAX_FRUITLESS = 3
# A job fails after this many generations if none of their ranks ever had a state.
MAX_STATELESS = 5
# How long a job waits for slots before it logs a warning.
SHORTAGE_SECONDS = 10.0
# The default of max_same_errors: a job fails once the same error of the user's function has ended this many generations
# without a new commit in between.
MAX_SAME_ERRORS = 3
# A job fails after this many times num_proc workers have failed in a row, before any worker has reached hvd.init().
MAX_FAILED_STARTS = 3
# The default of answer_timeout. In this time, a rank sends at least three segments to open a connection.
ANSWER_SECONDS = 5.0
# The search for the hosts to leave out is exact up to this number of hosts that cannot reach others. For more hosts, an
# exact search would take exponential time.
_EXACT_HOSTS = 24
_SHOWN_PAIRS = 5


class Phase(Enum):
    """The phase of a worker."""

    STARTING = "starting"
    WAITING = "waiting"  # in hvd.init(), for a generation
    RUNNING = "running"  # a member of the current generation
    FINISHED = "finished"  # the training function has returned on all ranks
    RETURNED = "returned"  # its result has arrived


@dataclass(frozen=True)
class Member:
    """One worker.

    Attributes:
        worker: its number, which is unique within the job.
        host: the host that it runs on.
        phase: its phase.
        since: the time at which the phase began.
        generation: the last generation that it was a member of; 0 if none.
        rank: its rank in that generation.
        commit: the number of its newest commit; -1 while it does not have the state of the job.
    """

    worker: int
    host: str
    phase: Phase
    since: float
    generation: int = 0
    rank: int = -1
    commit: int = -1


@dataclass(frozen=True)
class Limits:
    """The user's limits.

    Attributes:
        num_proc: the number of ranks that a job waits for at its start.
        min_size: the smallest number of ranks.
        max_size: the largest number of ranks; None uses all slots.
        start_timeout: seconds for the first generation to form, and for each worker to reach ``hvd.init()``.
        elastic_timeout: seconds for the next generation to form, and for a survivor to leave a broken one.
        reset_limit: the largest number of generations after the first; None sets no limit.
        max_restarts: how many times the job may start again after all ranks with its state were lost.
        max_same_errors: the job fails once the same error has ended this many generations without a new commit in
            between.
        answer_timeout: seconds for which a rank dials a peer whose host does not answer; see ``Form.separated``.
    """

    num_proc: int
    min_size: int
    max_size: int | None
    start_timeout: float
    elastic_timeout: float
    reset_limit: int | None = None
    max_restarts: int = 0
    max_same_errors: int = MAX_SAME_ERRORS
    answer_timeout: float = ANSWER_SECONDS


@dataclass(frozen=True)
class View:
    """The state of a job.

    Attributes:
        generation: the number of the current generation; 0 before the first.
        members: all workers that are not lost.
        capacity: the number of offered slots by host, without the slots of ``withdrawn``.
        withdrawn: workers whose slots are withdrawn, and will be gone soon.
        cooling: hosts that get no new worker now, because a worker failed there.
        idle: whether no generation is intact.
        gathered_since: the time at which an idle job began to wait only for new workers; None while survivors are on
            their way, or while the generation is intact.
        notified: whether the members of the current generation were asked to leave it.
        stateful: whether any generation has had the state of the job.
        restarts: how many times a generation has formed without the state of the job, because the state was lost.
        fruitless: see ``MAX_FRUITLESS``.
        failed_starts: the number of workers that failed before ``hvd.init()`` since the last worker that reached it; 0
            as long as an offered host has had no such failure.
        failed_end: why a rank failed, or left its generation, after others had finished; empty if no rank has.
        final_error: an error that the user's function would raise in every attempt; empty if there was none.
        same_error: the error of the user's function that has ended the most generations since the last new commit.
        same_errors: how many generations ``same_error`` has ended since then.
        unreachable: pairs of workers that have failed to connect since the last generation that has synchronized, and
            that have not connected in a later generation.
        reasons: the latest failures, oldest first.
    """

    generation: int
    members: tuple[Member, ...]
    capacity: Mapping[str, int]
    withdrawn: frozenset[int] = frozenset()
    cooling: frozenset[str] = frozenset()
    idle: bool = True
    gathered_since: float | None = 0.0
    notified: bool = False
    stateful: bool = False
    restarts: int = 0
    fruitless: int = 0
    failed_starts: int = 0
    failed_end: str = ""
    final_error: str = ""
    same_error: str = ""
    same_errors: int = 0
    unreachable: frozenset[tuple[int, int]] = frozenset()
    reasons: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Start:
    """Start a worker on a host."""

    host: str


@dataclass(frozen=True)
class Stop:
    """End a worker; ``failed`` counts as a failure of its host."""

    worker: int
    why: str
    failed: bool


@dataclass(frozen=True)
class Notify:
    """Ask the members of the current generation to leave it at their next commit."""


@dataclass(frozen=True)
class Abandon:
    """End the attempt of the current generation to connect, because new ranks make another choice of hosts possible."""

    why: str


@dataclass(frozen=True)
class LeaveOut:
    """End these workers, because their hosts cannot reach other hosts; this counts as a failure of their hosts."""

    workers: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Form:
    """Form the next generation of these workers, in rank order.

    Attributes:
        workers: the workers.
        separated: hosts that cannot reach each other although the job needs them all; empty if none are known. If set,
            the ranks dial each other for the whole ``start_timeout``, or until ``Abandon``.
    """

    workers: tuple[int, ...]
    separated: str = ""


@dataclass(frozen=True)
class Done:
    """All ranks have returned; ``workers`` are their workers in rank order."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """End the job.

    Attributes:
        why: the reason.
        started: whether any generation has formed.
        error: the error of the user's function that ended the job; empty if something else ended it.
    """

    why: str
    started: bool
    error: str = ""


Decision = Start | Stop | Notify | Abandon | LeaveOut | Form | Done | Fail


def decide(view: View, limits: Limits, now: float) -> list[Decision]:
    """Return the decisions for this view and time. Carry them out, then decide again with the new view."""
    current = [member for member in view.members if member.generation == view.generation > 0]
    if view.failed_end:
        return [
            Fail(_text_with_reasons("A rank failed after others had finished, so its result is missing.", view), True)
        ]
    if view.final_error:
        why = "Every attempt would raise this error, so the job has ended."
        return [Fail(why, view.generation > 0, view.final_error)]
    if any(member.phase in {Phase.FINISHED, Phase.RETURNED} for member in view.members):
        if all(member.phase is Phase.RETURNED for member in current):
            return [Done(tuple(member.worker for member in sorted(current, key=lambda member: member.rank)))]
        return []
    leaving = _workers_without_slots(view)
    decisions: list[Decision] = []
    if view.idle:
        next_step = _leave_out_decision(view, limits, leaving) or _next_generation(view, limits, leaving, now)
        if next_step is not None:
            return [next_step]
    elif not view.notified and _needs_no_separated_hosts(view, limits, leaving):
        decisions.append(Abandon("New ranks are ready, so the job no longer needs hosts that cannot reach each other"))
    elif not view.notified and _should_regroup(view, limits, leaving, now):
        decisions.append(Notify())
    decisions += _stop_decisions(view, limits, leaving, now)
    stopped = {decision.worker for decision in decisions if isinstance(decision, Stop)}
    return decisions + _start_decisions(view, limits, leaving, stopped)


def shortage(view: View, limits: Limits, now: float) -> str:
    """Return a warning that an idle job waits for slots; empty if it waits for something else or only for a moment."""
    if view.gathered_since is None or now < view.gathered_since + SHORTAGE_SECONDS:
        return ""
    if view.cooling or any(member.phase is not Phase.WAITING for member in view.members):
        return ""
    ready, offered = len(view.members), _slots(view)
    return (
        f"The job waits for slots: {ready} of at least {limits.min_size} ranks are ready. Offered slots: {offered}. It "
        f"fails after {_timeout(view, limits)}."
    )


def _timeout(view: View, limits: Limits) -> str:
    if view.generation == 0:
        return f"start_timeout={limits.start_timeout:g} s"
    return f"elastic_timeout={limits.elastic_timeout:g} s"


def _slots(view: View) -> str:
    return ", ".join(f"{host}:{count}" for host, count in sorted(view.capacity.items())) or "none"


def _workers_without_slots(view: View) -> frozenset[int]:
    """Return the workers whose slots are no longer offered.

    If a host has fewer slots, but no particular slot is withdrawn, stateless workers leave first, then the newest.
    """
    leaving = {member.worker for member in view.members if member.worker in view.withdrawn}
    for host in {member.host for member in view.members}:
        members_on_host = sorted(
            (member for member in view.members if member.host == host and member.worker not in view.withdrawn),
            key=lambda member: (member.commit < 0, member.generation < view.generation, member.worker),
        )
        leaving.update(member.worker for member in members_on_host[view.capacity.get(host, 0) :])
    return frozenset(leaving)


def _should_regroup(view: View, limits: Limits, leaving: frozenset[int], now: float) -> bool:
    """Return whether the members of an intact generation should regroup, to admit joiners or to release slots."""
    if _is_limit_reached(view, limits):
        return False  # a further generation would end the job, which may finish before the slots are gone
    current = [member for member in view.members if member.phase is Phase.RUNNING]
    staying = [member for member in current if member.worker not in leaving]
    joining = [m for m in view.members if m.phase is Phase.WAITING and m.worker not in leaving]
    is_short = len(staying) + len(joining) < limits.min_size
    if is_short and all(member.worker in view.withdrawn for member in current if member.worker in leaving):
        return False  # the ranks train until their slots are gone, or until others take their places
    if len(staying) < len(current) and (any(member.commit >= 0 for member in staying) or not view.stateful):
        return True
    if not joining or not any(member.commit >= 0 for member in current):
        return False  # a generation that has just formed first agrees on its state
    if limits.max_size is not None and len(staying) >= limits.max_size:
        return False
    starting = [m for m in view.members if m.phase is Phase.STARTING and m.worker not in leaving]
    return not starting or min(member.since for member in joining) + JOIN_SECONDS <= now


def _next_generation(view: View, limits: Limits, leaving: frozenset[int], now: float) -> Form | Fail | None:
    """Return the next generation, or the failure of the job; None while it must wait."""
    if any(member.phase is Phase.RUNNING for member in view.members):
        return None  # survivors are on their way
    waiting = _arrived_workers(view)
    holders = [member for member in waiting if member.commit >= 0]
    recurs = view.same_errors >= limits.max_same_errors
    if hopeless := _same_error_text(view) if recurs else _why_hopeless(view, limits, holders):
        return Fail(_text_with_reasons(hopeless, view), view.generation > 0, view.same_error if recurs else "")
    candidates = [member for member in waiting if member.worker not in leaving]
    if candidates and holders and candidates[0].commit < holders[0].commit:
        candidates.insert(0, holders[0])  # it hands over the state, and leaves in the following generation
    chosen = candidates[: limits.max_size]
    starting = [m for m in view.members if m.phase is Phase.STARTING and m.worker not in leaving]
    is_first = view.generation == 0
    timeout = limits.start_timeout if is_first else limits.elastic_timeout
    is_late = view.gathered_since is not None and now >= view.gathered_since + timeout
    if len(chosen) >= limits.min_size:
        if is_first and not is_late and not _first_is_complete(chosen, starting, limits, now):
            return None
        return Form(tuple(member.worker for member in chosen), _separated_text(view, limits))
    if not is_late:
        return None
    return Fail(_text_with_reasons(_too_few_ranks_text(view, limits, len(chosen), starting), view), not is_first)


def _arrived_workers(view: View) -> list[Member]:
    """Return the workers that wait for a generation, in the order of their ranks there."""
    return sorted(
        (member for member in view.members if member.phase is Phase.WAITING),
        key=lambda member: (-member.commit, member.rank if member.generation else 0, member.worker),
    )


def _separated_hosts(view: View) -> list[tuple[str, str]]:
    """Return the hosts of waiting workers that could not connect, in pairs. A worker that has ended proves nothing."""
    hosts = {member.worker: member.host for member in view.members if member.phase is Phase.WAITING}
    pairs = (sorted((hosts[one], hosts[other])) for one, other in view.unreachable if {one, other} <= hosts.keys())
    return sorted({(one, other) for one, other in pairs})


def _leave_out_decision(view: View, limits: Limits, leaving: frozenset[int]) -> LeaveOut | None:
    """Return the workers to leave out so that all others reach each other; None if all do, or if too few would remain.

    If there is a choice of hosts, the job loses as few ranks as possible. The next criteria are to lose as few workers
    with the newest commit as possible, and to keep the host of the next rank 0. At least one worker with the newest
    commit always stays. So a host that keeps failing is left out again, because its new workers have no commit.
    """
    pairs = [(one, other) for one, other in _separated_hosts(view) if one != other]
    if not pairs or any(member.phase is Phase.RUNNING for member in view.members):
        return None
    arrived = _arrived_workers(view)
    first = arrived[0]
    holders = [member.host for member in arrived if member.commit == first.commit]
    ranks = Counter(member.host for member in arrived if member.worker not in leaving)

    def cost(hosts: frozenset[str]) -> tuple[int, int, bool]:
        return sum(ranks[host] for host in hosts), sum(host in hosts for host in holders), first.host in hosts

    hosts = _smallest_cover(pairs, cost)
    if first.commit >= 0 and hosts.issuperset(holders):
        others = _unreachable_from(first.host, pairs)
        hosts = others | _smallest_cover([pair for pair in pairs if not others.intersection(pair)], cost)
    if ranks.total() - cost(hosts)[0] < limits.min_size:
        return None
    names = ", ".join(f"{host} ({counted(ranks[host], 'rank')})" for host in sorted(hosts))
    why = f"{_pairs_text(pairs)}. The job continues without {names} and tries again after a pause"
    return LeaveOut(tuple(member.worker for member in arrived if member.host in hosts), why)


def _needs_no_separated_hosts(view: View, limits: Limits, leaving: frozenset[int]) -> bool:
    """Return whether a generation connects that has separated hosts, although waiting workers could replace them."""
    if not view.unreachable or _is_limit_reached(view, limits):
        return False
    arrived = tuple(
        replace(member, phase=Phase.WAITING) if member.phase is Phase.RUNNING else member for member in view.members
    )
    return _leave_out_decision(replace(view, members=arrived), limits, leaving) is not None


def _separated_text(view: View, limits: Limits) -> str:
    """Return the text of ``Form.separated``."""
    if not (all_pairs := _separated_hosts(view)):
        return ""
    pairs = [(one, other) for one, other in all_pairs if one != other]
    if not pairs:
        names = ", ".join(host for host, _ in all_pairs[:_SHOWN_PAIRS])
        return f"Ranks on the same host cannot reach each other, so they try again: {names}"
    return (
        f"{_pairs_text(pairs)}. The job needs at least {limits.min_size} ranks, so it cannot leave any of these hosts "
        "out and tries again"
    )


def _pairs_text(pairs: Sequence[tuple[str, str]]) -> str:
    listed = ", ".join(f"{one} and {other}" for one, other in pairs[:_SHOWN_PAIRS])
    more = f" and {len(pairs) - _SHOWN_PAIRS} more pairs" if len(pairs) > _SHOWN_PAIRS else ""
    return f"Hosts reach the driver but not each other: {listed}{more}"


def _unreachable_from(host: str, pairs: Sequence[tuple[str, str]]) -> frozenset[str]:
    """Return the hosts that form a pair with a host."""
    return frozenset(other for pair in pairs if host in pair for other in pair if other != host)


def _smallest_cover(
    pairs: Sequence[tuple[str, str]], cost: Callable[[frozenset[str]], tuple[int, int, bool]]
) -> frozenset[str]:
    """Return the cheapest set of hosts that has one host of each pair; with many hosts, approximately the cheapest."""
    chosen = frozenset[str]()
    while len(counts := Counter(host for pair in pairs for host in pair)) > _EXACT_HOSTS:
        best = max(sorted(counts), key=lambda host: counts[host] / max(1, cost(frozenset([host]))[0]))
        chosen |= {best}
        pairs = [pair for pair in pairs if best not in pair]
    return chosen | _exact_cover(pairs, cost)


def _exact_cover(
    pairs: Sequence[tuple[str, str]], cost: Callable[[frozenset[str]], tuple[int, int, bool]]
) -> frozenset[str]:
    counts = Counter(host for pair in pairs for host in pair)
    if not counts:
        return frozenset()
    worst = max(sorted(counts), key=counts.__getitem__)
    if counts[worst] == 1:
        return frozenset(min(pair, key=lambda host: cost(frozenset([host]))) for pair in pairs)
    leaving_worst_out = frozenset([worst]) | _exact_cover([pair for pair in pairs if worst not in pair], cost)
    others = _unreachable_from(worst, pairs)
    keeping_worst = others | _exact_cover([pair for pair in pairs if not others.intersection(pair)], cost)
    return min(leaving_worst_out, keeping_worst, key=cost)


def _too_few_ranks_text(view: View, limits: Limits, ready: int, starting: Sequence[Member]) -> str:
    text = (
        f"Only {ready} of at least {limits.min_size} ranks were ready within {_timeout(view, limits)}. Offered slots: "
        f"{_slots(view)}."
    )
    if starting:
        listed = ", ".join(f"{member.worker} on host {member.host}" for member in starting)
        text += f" Workers that have not reached hvd.init(): {listed}."
    return text


def _same_error_text(view: View) -> str:
    if view.same_errors == 1:
        return "The job has ended, because max_same_errors=1."
    return (
        f"Ranks have failed like this {view.same_errors} times without a new commit in between, so the same error "
        f"probably returns every time. The job has reached max_same_errors={view.same_errors}."
    )


def _why_hopeless(view: View, limits: Limits, holders: Sequence[Member]) -> str:
    """Return why no generation may form any more; empty if one may."""
    if view.stateful and not holders and view.restarts >= limits.max_restarts:
        times = f" {view.restarts + 1} times" if view.restarts else ""
        return (
            f"All ranks that held the state of the training were lost{times}, so it cannot continue. Start the job "
            "again from a checkpoint of your own."
        )
    none_is_ready = view.generation == 0 and all(member.phase is Phase.STARTING for member in view.members)
    if none_is_ready and view.failed_starts >= MAX_FAILED_STARTS * limits.num_proc:
        return (
            f"All of the first {view.failed_starts} workers failed before they reached hvd.init(). The same error "
            "probably returns every time."
        )
    if not view.stateful and view.generation >= MAX_STATELESS:
        return (
            f"The first {view.generation} generations all ended before their ranks had synchronized a state. The same "
            "error probably returns every time."
        )
    if view.fruitless >= MAX_FRUITLESS:
        return (
            f"The ranks were reset {view.fruitless} times in a row without progress, although none of them was lost. "
            "The same error probably returns every time."
        )
    if _is_limit_reached(view, limits):
        return f"The job has reached reset_limit={limits.reset_limit}."
    return ""


def _is_limit_reached(view: View, limits: Limits) -> bool:
    return limits.reset_limit is not None and view.generation > limits.reset_limit


def _first_is_complete(chosen: Sequence[Member], starting: Sequence[Member], limits: Limits, now: float) -> bool:
    """Return whether the first generation need not wait for more workers."""
    if limits.max_size is not None and len(chosen) >= limits.max_size:
        return True
    newest = max(member.since for member in chosen)
    if len(chosen) >= limits.num_proc:
        return not starting or newest + JOIN_SECONDS <= now
    return not starting and newest + SETTLE_SECONDS <= now


def _stop_decisions(view: View, limits: Limits, leaving: frozenset[int], now: float) -> list[Decision]:
    stops: list[Decision] = []
    needed = _last_holder(view, leaving)
    for member in view.members:
        if member.phase is Phase.STARTING and member.since + limits.start_timeout <= now:
            why = f"it did not reach hvd.init() within start_timeout={limits.start_timeout:g} s"
            stops.append(Stop(member.worker, why, True))
        elif view.idle and member.phase is Phase.RUNNING and member.since + limits.elastic_timeout <= now:
            why = f"it did not leave the broken generation within elastic_timeout={limits.elastic_timeout:g} s"
            stops.append(Stop(member.worker, why, True))
        elif member.worker in leaving and member.phase is not Phase.RUNNING and member.worker != needed:
            stops.append(Stop(member.worker, "its slot is no longer offered", False))
    return stops


def _last_holder(view: View, leaving: frozenset[int]) -> int | None:
    """Return the worker that must stay although its slot is withdrawn, because no other worker has the newest state."""
    # The members of an intact generation have agreed on a state, which is newer than the state of any other worker.
    newest = max((member.commit for member in view.members), default=-1) if view.idle else 0
    holders = [member for member in view.members if member.commit >= max(newest, 0)]
    if not holders or any(member.worker not in leaving for member in holders):
        return None
    return max(holders, key=lambda member: (member.commit, -member.rank)).worker


def _start_decisions(view: View, limits: Limits, leaving: frozenset[int], stopped: set[int]) -> list[Decision]:
    """Return the workers to start on free slots, on the hosts with the most free slots first."""
    alive = [member for member in view.members if member.worker not in stopped]
    wanted = sum(view.capacity.values()) if limits.max_size is None else limits.max_size
    missing = wanted - sum(member.worker not in leaving for member in alive)
    used = Counter(member.host for member in alive if member.worker not in view.withdrawn)
    free = {host: count - used[host] for host, count in view.capacity.items() if host not in view.cooling}
    starts: list[Decision] = []
    for host in sorted(free, key=lambda host: (-free[host], host)):
        starts += [Start(host)] * max(0, min(free[host], missing - len(starts)))
    return starts


def _text_with_reasons(text: str, view: View) -> str:
    if not view.reasons:
        return text
    listed = "\n".join(f"- {reason}" for reason in view.reasons)
    return f"{text} What happened before:\n{listed}"
