"""Process sets, with Horovod's answers before they are registered."""

from __future__ import annotations

from collections.abc import Iterable

from sparkhvd.comm import interface
from sparkhvd.comm.connect.mpi import MpiCommunicator
from sparkhvd.comm.interface import global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet(interface.ProcessSet):
    """See ``sparkhvd.comm.interface.ProcessSet``. Programs may ask a set that is not registered about itself."""

    def size(self) -> int | None:  # type: ignore[override]
        """Return the number of ranks in the set; None if it is not registered."""
        return None if self.process_set_id is None else super().size()

    def rank(self) -> int | None:  # type: ignore[override]
        """Return this process's number in the set; None if it is not registered."""
        return None if self.process_set_id is None else super().rank()

    def included(self) -> bool | None:  # type: ignore[override]
        """Return whether this process is in the set; None for an MPI communicator that is not registered."""
        if self.process_set_id is not None:
            return super().included()
        return None if self.given_ranks is None else interface.rank() in self.given_ranks


def add_process_set(process_set: interface.ProcessSet | Iterable[int] | MpiCommunicator) -> interface.ProcessSet:
    """Register a set of ranks and return it; collective over all ranks."""
    return interface.add_process_set(
        process_set if isinstance(process_set, interface.ProcessSet) else ProcessSet(process_set)
    )
