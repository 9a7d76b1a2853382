"""Subsets of the ranks that run collectives among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index

from sparkhvd.comm.connect.mpi import MpiCommunicator, have_all_called
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DeadlineExceededError, MismatchError, NotInitializedError

# Far above the size of a job, and small enough for the 64-bit integers in which ranks travel.
_MAX_RANK = 2**31 - 1


@dataclass(frozen=True)
class Proposal:
    """The process set that one rank proposes.

    Attributes:
        ranks: the ranks, ascending.
        split: whether other ranks may propose other sets at the same time, as after ``MPI.Comm.Split``.
    """

    ranks: tuple[int, ...]
    split: bool = False


@dataclass(frozen=True)
class RegisteredSet:
    """A process set as registered on all ranks.

    Attributes:
        number: its id.
        ranks: the ranks, ascending.
        own_rank: this process's rank in the job.
    """

    number: int
    ranks: tuple[int, ...]
    own_rank: int


class ProcessSet:
    """Some of the ranks, usable once ``init(process_sets=[...])`` or ``add_process_set()`` has registered it.

    Args:
        ranks_or_comm: ranks of the job, or an ``mpi4py`` communicator: the set is then the ranks that hold it. Ranks
            may pass different communicators, such as those of ``Split``; each becomes a set.

    Attributes:
        mpi_comm: the communicator; None for a set made from ranks. The set of all ranks has the communicator that was
            passed to ``init(comm=...)``.

    Raises:
        ConfigError: there are no ranks, one of them appears twice, or one is not an integer.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | MpiCommunicator) -> None:
        self.mpi_comm: MpiCommunicator | None = None
        self._requested_ranks: tuple[int, ...] = ()
        if isinstance(ranks_or_comm, MpiCommunicator):
            self.mpi_comm = ranks_or_comm
        else:
            if not isinstance(ranks_or_comm, Iterable):
                raise ConfigError(
                    f"ProcessSet({ranks_or_comm!r}) is invalid: pass a list of ranks or a communicator of mpi4py."
                )
            entries = list(ranks_or_comm)
            try:
                self._requested_ranks = tuple(sorted(map(index, entries)))
            except TypeError:
                raise ConfigError(f"ProcessSet({entries}) is invalid: ranks must be integers.") from None
            if any(abs(rank) > _MAX_RANK for rank in self._requested_ranks):
                raise ConfigError(f"ProcessSet({entries}) is invalid: ranks must be at most {_MAX_RANK}.")
            if not self._requested_ranks or len(set(self._requested_ranks)) < len(self._requested_ranks):
                raise ConfigError(
                    f"ProcessSet({list(self._requested_ranks)}) is invalid: it needs at least one rank and no "
                    "duplicates."
                )
        self._registration: RegisteredSet | None = None

    @property
    def process_set_id(self) -> int | None:
        """Return the set's number: 0 for the set of all ranks; None if it is not registered."""
        return None if self._registration is None else self._registration.number

    @property
    def ranks(self) -> list[int]:
        """Return the set's ranks in the job, ascending. With a communicator, they are known after the registration."""
        return list(self._requested_ranks if self._registration is None else self._registration.ranks)

    @property
    def given_ranks(self) -> tuple[int, ...] | None:
        """Return the ranks with which the set was made, ascending; None if an MPI communicator provides them."""
        return self._requested_ranks if self.mpi_comm is None else None

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self._require_registration().ranks)

    def included(self) -> bool:
        """Return whether this process is in the set."""
        registration = self._require_registration()
        return registration.own_rank in registration.ranks

    def rank(self) -> int:
        """Return this process's number in the set.

        Raises:
            ConfigError: this process is not in the set.
        """
        registration = self._require_registration()
        if registration.own_rank not in registration.ranks:
            raise ConfigError(f"Rank {registration.own_rank} is not in {self}; check included() first.")
        return registration.ranks.index(registration.own_rank)

    def register(self, registration: RegisteredSet | None) -> None:
        """Make the set usable, or with None unusable; only the communicator calls this."""
        self._registration = registration

    def proposal(self, own_rank: int, start_timeout: float) -> Proposal:
        """Return the proposal of rank ``own_rank``; collective among the members of an MPI communicator.

        Raises:
            DeadlineExceededError: not all members call it within ``start_timeout`` seconds.
        """
        if self.mpi_comm is None:
            return Proposal(self._requested_ranks)
        if not self.mpi_comm:
            return Proposal((), split=True)
        if not have_all_called(self.mpi_comm, Deadline.after(start_timeout)):
            raise DeadlineExceededError(
                f"Rank {own_rank} waited start_timeout={start_timeout:g} s for all members of an MPI communicator to "
                "register their process set, but at least one of them did not. Register the set on all members, with "
                "the same communicator, or raise SPARKHVD_START_TIMEOUT."
            )
        return Proposal(tuple(sorted(self.mpi_comm.allgather(own_rank))), split=True)

    def _require_registration(self) -> RegisteredSet:
        if self._registration is None:
            raise NotInitializedError(
                f"{self} is not registered; pass it to hvd.init(process_sets=[...]) or hvd.add_process_set()."
            )
        return self._registration

    def __repr__(self) -> str:
        return f"ProcessSet(id={self.process_set_id}, ranks={self.ranks})"


def exchanges_with(process_set: ProcessSet | None) -> bool:
    """Return whether this process exchanges gradients in the set: False only if the set is registered without it."""
    return process_set is None or process_set.process_set_id is None or process_set.included()


def require_addable(sets: Sequence[ProcessSet], size: int) -> None:
    """Raise ``ConfigError`` unless a new communicator can add these sets, as far as this rank knows their ranks.

    Every rank can call this before it connects, so that all of them fail in the same way and at once.

    Args:
        sets: the sets that ``init(process_sets=...)`` adds.
        size: the number of ranks in the job.
    """
    positions: dict[tuple[int, ...], int] = {}
    for position, process_set in enumerate(sets):
        ranks = process_set.given_ranks
        if process_set.process_set_id is not None:
            raise ConfigError(f"process_sets[{position}] is already registered: {process_set}.")
        if ranks is None:
            continue
        _require_ranks_of_job(ranks, size)
        if len(ranks) == size:
            raise ConfigError(
                f"process_sets[{position}] has all ranks of the job, {list(ranks)}; use hvd.global_process_set instead."
            )
        if ranks in positions:
            raise ConfigError(
                f"process_sets[{position}] has the ranks {list(ranks)}, as does process_sets[{positions[ranks]}]; "
                "pass each set once."
            )
        positions[ranks] = position


def _require_ranks_of_job(ranks: tuple[int, ...], size: int) -> None:
    if ranks[0] < 0 or ranks[-1] >= size:
        raise ConfigError(f"Process set {list(ranks)} has ranks outside 0..{size - 1}; use ranks of this job.")


def agreed_sets(
    proposals: Sequence[Proposal], known: Mapping[int, tuple[int, ...]], size: int
) -> list[tuple[int, ...]]:
    """Return the sets that the ranks propose together, in the same order on all of them.

    Args:
        proposals: the proposals, by rank.
        known: the sets that are already registered.
        size: the number of ranks in the job.

    Raises:
        MismatchError: the ranks propose different sets.
        ConfigError: a rank is not in the job, the sets of a split overlap, or a set is already registered.
    """
    first = proposals[0]
    for rank, proposal in enumerate(proposals):
        if proposal.split != first.split or (proposal.ranks != first.ranks and not first.split):
            raise MismatchError(
                f"All ranks must add the same process set: rank 0 added {_proposal_text(first)}, "
                f"rank {rank} added {_proposal_text(proposal)}."
            )
    sets = sorted({proposal.ranks for proposal in proposals if proposal.ranks})
    members = [rank for ranks in sets for rank in ranks]
    if not sets or len(set(members)) < len(members):
        raise ConfigError(f"Process sets from one split must be non-empty and disjoint, got {sets}.")
    for ranks in sets:
        _require_ranks_of_job(ranks, size)
        for number, others in known.items():
            if others == ranks:
                raise ConfigError(f"Process set {number} already has the ranks {list(ranks)}; use that one.")
    return sets


def _proposal_text(proposal: Proposal) -> str:
    if proposal.split and not proposal.ranks:  # null, or unknown because not all ranks have passed one
        return "a communicator"
    return f"{'a communicator of ' if proposal.split else ''}{list(proposal.ranks)}"
