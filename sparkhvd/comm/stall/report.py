"""The report on stalled collectives: a pure function of the ranks' answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkhvd._util.counts import counted
from sparkhvd.comm.stall.snapshot import Condition, PendingCollective, ProcessIdentity

_MAX_TENSORS = 10
_MAX_RANKS = 16
_JOIN = "join 'join()'"  # the title of every join, whose name the core reserves


@dataclass(frozen=True)
class StalledTensor:
    """A stalled collective.

    Attributes:
        title: such as ``allreduce 'grad/7'``, with the process set unless it has all ranks.
        age: the longest that a rank has waited for it, in seconds.
        waiting: the ranks that have submitted it.
        missing: the ranks that have answered but not submitted it, except ranks that have joined its process set.
        silent: the ranks that did not answer.
        joined: the missing ranks that wait in a ``join()`` of another process set.
    """

    title: str
    age: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    silent: tuple[int, ...]
    joined: tuple[int, ...] = ()


@dataclass(frozen=True)
class StallReport:
    """The reasons why collectives do not end; ``str()`` returns the text that was logged.

    Attributes:
        tensors: the stalled collectives, the longest wait first.
        conditions: the answers of the ranks, by rank; only those of the ``shown`` ranks have stacks.
        silent: why ranks did not answer, as far as it is known, by rank.
        identities: the processes of the ranks, by rank, as far as they are known.
    """

    tensors: tuple[StalledTensor, ...]
    conditions: Mapping[int, Condition]
    silent: Mapping[int, str]
    identities: Mapping[int, ProcessIdentity] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks that keep others waiting, silent ones included."""
        late = {rank for tensor in self.tensors for rank in tensor.missing}
        return tuple(sorted(late | set(self.silent)))

    @property
    def stragglers(self) -> tuple[int, ...]:
        """Return the ranks that the longest wait is for and that wait for no other rank themselves."""
        late = {rank for tensor in self.tensors[:1] for rank in (*tensor.missing, *tensor.silent)}
        return tuple(sorted(late - {rank for tensor in self.tensors for rank in tensor.waiting}))

    @property
    def shown(self) -> tuple[int, ...]:
        """Return the ranks that the text describes: the stragglers first, or any ranks if none is missing."""
        return (tuple(dict.fromkeys(self.stragglers + self.missing)) or tuple(self.conditions))[:_MAX_RANKS]

    def headline(self) -> str:
        """Return one sentence that names the longest wait and its missing ranks."""
        if not self.tensors:
            return "no collective is waiting"
        first = self.tensors[0]
        others = f" and {len(self.tensors) - 1} more" if len(self.tensors) > 1 else ""
        return f"{first.title}{others} not done after {first.age:.0f} s: {_missing_ranks_text(first)}"

    def __str__(self) -> str:
        lines = [f"Stalled: {self.headline()}."]
        shown = self.tensors[:_MAX_TENSORS]
        lines += [f"  {tensor.title}: {tensor.age:.0f} s; {_missing_ranks_text(tensor)}" for tensor in shown]
        if len(self.tensors) > _MAX_TENSORS:
            lines.append(f"  and {len(self.tensors) - _MAX_TENSORS} more")
        for rank in self.shown:
            lines += self._lines_about(rank)
        if len(self.missing) > _MAX_RANKS:
            lines.append(f"  and {counted(len(self.missing) - _MAX_RANKS, 'more rank')}")
        return "\n".join(lines)

    def _lines_about(self, rank: int) -> list[str]:
        identity = self.identities.get(rank)
        name = f"  rank {rank}" + (f" ({identity.host}, pid {identity.pid})" if identity else "")
        if rank in self.silent:
            return [f"{name} does not answer: {self.silent[rank]}"]
        condition = self.conditions[rank]
        pending = ", ".join(map(str, condition.pending[:_MAX_TENSORS])) or "nothing"
        facts = [
            f"waits for {pending}",
            f"it has completed {condition.operations} collectives, none for {condition.idle:.0f} s",
        ]
        if condition.progress:
            facts.append(f"its progress: {condition.progress}")
        lines = [f"{name} is alive and {'; '.join(facts)}"]
        for thread, stack in condition.stacks.items():
            lines.append(f"    {thread}:")
            lines += [f"    {line}" for line in stack.rstrip().splitlines()]
        return lines


def report(
    conditions: Mapping[int, Condition],
    identities: Mapping[int, ProcessIdentity],
    sets: Mapping[int, tuple[int, ...]],
    *,
    since: float,
) -> StallReport:
    """Build the report from the answers.

    Args:
        conditions: the answers that came, by rank.
        identities: the identities of the ranks' processes, as far as they are known.
        sets: the ranks of every process set, by its number; 0 is all.
        since: the number of seconds after which a wait counts as too long.
    """
    silent = {rank: _silence_reason(rank, conditions, identities) for rank in sets[0] if rank not in conditions}
    waits: dict[str, dict[int, PendingCollective]] = {}
    for rank, condition in conditions.items():
        for collective in condition.pending:
            if collective.process_set in sets:  # the set may have been removed in the meantime
                waits.setdefault(str(collective), {})[rank] = collective
    tensors = [
        _stalled_tensor(title, by_rank, conditions, sets)
        for title, by_rank in waits.items()
        if max(collective.age for collective in by_rank.values()) >= since
    ]
    tensors.sort(key=lambda tensor: -tensor.age)
    return StallReport(tuple(tensors), conditions, silent, identities)


def _stalled_tensor(
    title: str,
    waiting: Mapping[int, PendingCollective],
    conditions: Mapping[int, Condition],
    sets: Mapping[int, tuple[int, ...]],
) -> StalledTensor:
    first = next(iter(waiting.values()))
    members = set(sets[first.process_set])
    others = sorted((members & conditions.keys()) - waiting.keys())
    missing = tuple(rank for rank in others if first.process_set not in _joined_sets(conditions[rank]))
    return StalledTensor(
        title,
        max(collective.age for collective in waiting.values()),
        tuple(sorted(waiting)),
        missing,
        tuple(sorted(members - conditions.keys())),
        tuple(rank for rank in missing if _joined_sets(conditions[rank])),
    )


def _joined_sets(condition: Condition) -> set[int]:
    return {collective.process_set for collective in condition.pending if collective.title == _JOIN}


def _silence_reason(rank: int, conditions: Mapping[int, Condition], identities: Mapping[int, ProcessIdentity]) -> str:
    if rank not in identities:
        return "it has not joined the stall check yet"
    for condition in conditions.values():
        if rank in condition.neighbours:
            return f"its process {condition.neighbours[rank]}"
    host = identities[rank].host
    if any(identities[other].host == host for other in conditions if other in identities):
        return "its process is alive but executes code that lets no other thread run"
    return f"no rank of its host {host} answers either"


def _missing_ranks_text(tensor: StalledTensor) -> str:
    parts = []
    if tensor.missing:
        parts.append(f"not submitted by {_ranks(tensor.missing)}")
    if tensor.silent:
        parts.append(f"no answer from {_ranks(tensor.silent)}")
    if not parts:
        return "all ranks have submitted it, but its data does not arrive"
    text = f"{' and '.join(parts)}, while {_ranks(tensor.waiting)} waited"
    if tensor.joined:
        verb = "waits" if len(tensor.joined) == 1 else "wait"
        text += f"; {_ranks(tensor.joined)} {verb} in join() of another process set, which has no effect on this one"
    return text


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_RANKS])) + (", ..." if len(ranks) > _MAX_RANKS else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
