"""Subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sparkhvd.errors import ConfigError, MismatchError, NotInitializedError


@runtime_checkable
class MpiCommunicator(Protocol):
    """What is needed of an ``mpi4py.MPI.Comm``; a null communicator is false."""

    def allgather(self, sendobj: int) -> list[int]:
        """The objects of all members."""
        ...


@dataclass(frozen=True)
class Proposal:
    """The set that one rank asks for.

    Attributes:
        ranks: ascending.
        split: whether other ranks may ask for other sets at the same time, as after ``MPI.Comm.Split``.
    """

    ranks: tuple[int, ...]
    split: bool = False


@dataclass(frozen=True)
class RegisteredSet:
    """What a process set is once all ranks know it.

    Attributes:
        number: its id.
        ranks: ascending.
        me: this process's rank in the job.
    """

    number: int
    ranks: tuple[int, ...]
    me: int


class ProcessSet:
    """Some of the ranks. It may be used after ``init(process_sets=[...])`` or ``add_process_set()`` has registered it.

    Args:
        ranks: ranks of the job, or an ``mpi4py`` communicator: the set is then the ranks that hold it. Ranks may come
            with different communicators, as ``Split`` makes them; each becomes a set.

    Raises:
        ConfigError: no ranks, or one of them twice.
    """

    def __init__(self, ranks: Iterable[int] | MpiCommunicator) -> None:
        self._communicator: MpiCommunicator | None = None
        self._given: tuple[int, ...] = ()
        if isinstance(ranks, MpiCommunicator):
            self._communicator = ranks
        else:
            self._given = tuple(sorted(int(rank) for rank in ranks))
            if not self._given or len(set(self._given)) < len(self._given):
                raise ConfigError(f"A process set has one rank at least and no rank twice, unlike {list(self._given)}.")
        self._registration: RegisteredSet | None = None

    @property
    def process_set_id(self) -> int | None:
        """The set's number, 0 for the set of all ranks; None while it is not registered."""
        return None if self._registration is None else self._registration.number

    @property
    def ranks(self) -> list[int]:
        """The ranks of the job that are in it, ascending; those of a communicator are known once it is registered."""
        return list(self._given if self._registration is None else self._registration.ranks)

    def size(self) -> int:
        """How many ranks are in it."""
        return len(self._registered().ranks)

    def included(self) -> bool:
        """Whether this process is in it."""
        registration = self._registered()
        return registration.me in registration.ranks

    def rank(self) -> int:
        """This process's number in the set.

        Raises:
            ConfigError: it is not in it.
        """
        registration = self._registered()
        if registration.me not in registration.ranks:
            raise ConfigError(f"Rank {registration.me} is not in {self}; ask included() first.")
        return registration.ranks.index(registration.me)

    def register(self, registration: RegisteredSet | None) -> None:
        """Make it usable, or no longer; the communicator's business."""
        self._registration = registration

    def proposal(self, me: int) -> Proposal:
        """What rank ``me`` asks for; collective among the members of an MPI communicator."""
        if self._communicator is None:
            return Proposal(self._given)
        return Proposal(tuple(sorted(self._communicator.allgather(me))) if self._communicator else (), split=True)

    def _registered(self) -> RegisteredSet:
        if self._registration is None:
            raise NotInitializedError(
                f"{self} is not registered; pass it to hvd.init(process_sets=[...]) or hvd.add_process_set()."
            )
        return self._registration

    def __repr__(self) -> str:
        return f"ProcessSet(id={self.process_set_id}, ranks={self.ranks})"


def agreed_sets(
    proposals: Sequence[Proposal], known: Mapping[int, tuple[int, ...]], size: int
) -> list[tuple[int, ...]]:
    """The sets that the ranks make together, in an order that is the same on all of them.

    Args:
        proposals: by rank.
        known: the sets there are.
        size: ranks in the job.

    Raises:
        MismatchError: the ranks ask for different sets.
        ConfigError: a rank is not in the job, the sets of a split overlap, or such a set exists already.
    """
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if proposal.split != first.split or (proposal.ranks != first.ranks and not first.split):
            raise MismatchError(
                f"All ranks must add the same process set: rank 0 added {_text(first)}, rank {rank} {_text(proposal)}."
            )
    sets = sorted({proposal.ranks for proposal in proposals if proposal.ranks})
    members = [rank for ranks in sets for rank in ranks]
    if not sets or len(set(members)) < len(members):
        raise ConfigError(f"Process sets that are made by one split must hold each rank once at most: {sets}.")
    for ranks in sets:
        if ranks[0] < 0 or ranks[-1] >= size:
            raise ConfigError(f"Process set {list(ranks)} has ranks outside of 0..{size - 1}.")
        for number, others in known.items():
            if others == ranks:
                raise ConfigError(f"Process set {number} has the ranks {list(ranks)} already; use that one.")
    return sets


def _text(proposal: Proposal) -> str:
    return f"{'a communicator of ' if proposal.split else ''}{list(proposal.ranks)}"
