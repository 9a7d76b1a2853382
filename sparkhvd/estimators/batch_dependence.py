"""Warnings about layers and losses whose result for a row depends on the other rows of the rank's batch."""

from __future__ import annotations

from dataclasses import dataclass

from sparkhvd.errors import ParamError


@dataclass(frozen=True)
class BatchDependence:
    """The parts of a model and its losses that make the result of a row depend on the other rows of its batch.

    Attributes:
        local: names of the normalizing layers that see this rank's rows only.
        synchronized: the layer or setting that normalizes over the rows of all ranks.
        need_two_rows: names of the normalizing layers that cannot train on a single row.
        need_two_pixels: names of the normalizing layers that can train on a single row only if their input has several
            pixels, or as long as they are in evaluation mode.
        losses: names of the losses that compute one value for the whole batch instead of a mean over rows.
        frequencies: names of the embeddings that divide gradients by the frequency of a value in the batch.
    """

    local: tuple[str, ...] = ()
    synchronized: str = ""
    need_two_rows: tuple[str, ...] = ()
    need_two_pixels: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    frequencies: tuple[str, ...] = ()

    @property
    def avoids_single_rows(self) -> bool:
        """Whether a batch with a single row may fail."""
        return bool(self.need_two_rows or self.need_two_pixels)

    def remarks(self, num_proc: int, batch_size: int) -> list[str]:
        """Return one-line warnings for the log; an empty list if all ranks together equal one big batch."""
        if num_proc == 1:
            return []
        scope = f"the {batch_size} rows of its own rank, not the {num_proc * batch_size} rows of all {num_proc} ranks"
        remarks = []
        if self.local:
            remarks.append(
                f"the model's batch normalization ({_listed(self.local)}) sees {scope}. To normalize over all of them, "
                f"use {self.synchronized}."
            )
        if self.frequencies:
            remarks.append(
                f"scale_grad_by_freq of the model's embeddings ({_listed(self.frequencies)}) counts values in {scope}. "
                "The training is therefore not that of one big batch; leave scale_grad_by_freq out for an exact result."
            )
        if self.losses:
            remarks.append(
                f"the loss {_listed(self.losses)} relates the rows of a batch and sees {scope}. The training is "
                "therefore not that of one big batch; use a larger batch_size to come closer."
            )
        return remarks

    def check_changing_ranks(self, batch_size: int) -> None:
        """Check that no number of ranks leaves a batch with a single row.

        Raises:
            ParamError: the batches are too small to give a row to a last batch that has only one.
        """
        if self.need_two_rows and batch_size < _MIN_ROWS_TO_SHARE:
            raise ParamError(
                f"elastic_batch='rank' with batch_size={batch_size} leaves a batch with a single row for some numbers "
                f"of ranks, and the model's batch normalization ({_listed(self.need_two_rows)}) cannot train on one "
                f"row. Set batch_size to at least {_MIN_ROWS_TO_SHARE}, or elastic_batch='global'."
            )

    def single_row_error(self, batch_size: int, num_proc: int) -> ParamError:
        """Return the error for a batch with a single row."""
        return ParamError(
            f"With batch_size={batch_size} and {num_proc} ranks, a batch has a single row, and the model's batch "
            f"normalization ({_listed(self.need_two_rows)}) cannot train on one row. Set batch_size to at least 3, and "
            "train on at least two rows per rank."
        )


_MAX_LISTED_NAMES = 3
# A batch of three can give a row to the next batch and still have two.
_MIN_ROWS_TO_SHARE = 3


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MAX_LISTED_NAMES} more" if len(names) > _MAX_LISTED_NAMES else ""
    return ", ".join(names[:_MAX_LISTED_NAMES]) + more
