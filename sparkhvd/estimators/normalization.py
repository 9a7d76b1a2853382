"""Batch normalization across ranks: the layers of a model that it concerns, and the warnings before training."""

from __future__ import annotations

from dataclasses import dataclass

from sparkhvd.errors import ParamError


@dataclass(frozen=True)
class Normalization:
    """The layers of a model that normalize by their batch.

    Attributes:
        local: names of the layers that see this rank's rows only.
        synchronized: what to use instead to normalize over the rows of all ranks.
        pairs: names of the layers that cannot train on a single row.
    """

    local: tuple[str, ...] = ()
    synchronized: str = ""
    pairs: tuple[str, ...] = ()

    def remark(self, num_proc: int, batch_size: int) -> str | None:
        """Return a one-line warning for the log; None if the layers are synchronized or there is one rank."""
        if num_proc == 1 or not self.local:
            return None
        return (
            f"the model's batch normalization ({_listed(self.local)}) sees the {batch_size} rows of its own rank, "
            f"not the {num_proc * batch_size} rows of all {num_proc} ranks. To normalize over all of them, "
            f"use {self.synchronized}."
        )

    def refuse_single_rows(self, batch_size: int, num_proc: int) -> ParamError:
        """Return the error for a batch with a single row."""
        return ParamError(
            f"With batch_size={batch_size} and {num_proc} ranks, a batch has a single row, and the model's batch "
            f"normalization ({_listed(self.pairs)}) cannot train on one row. Set batch_size to at least 3, and train "
            "on at least two rows per rank."
        )


_SHOWN = 3


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
