"""Batches as torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from sparkhvd._util.closable import Closable
from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.readers import RowSource
from sparkhvd.data.schema.columns import coordinates, sparse_widths
from sparkhvd.errors import ConfigError, SchemaError

Tensors = dict[str, torch.Tensor]


class TorchBatches(Closable, IterableDataset[Tensors]):
    """The batches of one rank; see ``sparkhvd.data.torch_loader``.

    Columns that no tensor can hold (strings, binary, dates, exact decimals) must be transformed or left out. Vectors
    that were prepared as ``sparse_cols`` are sparse tensors of shape ``(rows, size)``.
    """

    def __init__(self, source: RowSource, close: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._source = source
        self._close = close
        self._sparse = sparse_widths(source.schema)
        self._epoch = 0
        self._first_step = 0

    def __len__(self) -> int:
        """Return the number of batches in a full epoch, which is the same on every rank."""
        return self._source.steps()

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Select the next epoch and its first batch, for example to resume an interrupted run.

        Args:
            epoch: from 0; with ``shuffle`` every epoch has its own order.
            first_step: batches to skip in the next iteration only; the other batches are the same as without it.
        """
        self._epoch, self._first_step = epoch, first_step

    def close(self) -> None:
        """Release the rows; call it after the last batch."""
        self._close()

    def __getstate__(self) -> dict[str, object]:
        raise _no_workers()  # a DataLoader pickles its dataset for workers that it does not fork

    def __iter__(self) -> Iterator[Tensors]:
        if get_worker_info() is not None:
            raise _no_workers()
        first, self._first_step = self._first_step, 0
        return self._batches(first)

    def _batches(self, first_step: int) -> Iterator[Tensors]:
        with closing(self._source.epoch(self._epoch, first_step)) as batches:  # type: ignore[type-var]  # a generator
            for batch in batches:
                yield _tensors(batch, self._sparse)


def _no_workers() -> ConfigError:
    return ConfigError(
        "torch_loader decodes in its own threads and already yields only the rows of this rank; use it with "
        "DataLoader(..., num_workers=0), or without a DataLoader."
    )


def sparse_tensor(array: npt.NDArray[np.generic], width: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return a sparse column's rows (see ``sparkhvd.data.schema.columns``) as a tensor of shape ``(rows, width)``."""
    rows, positions, values = coordinates(array)
    indices = torch.from_numpy(np.stack([rows, positions]))
    # The indices of a row ascend, so the tensor is coalesced already.
    return torch.sparse_coo_tensor(
        indices, torch.from_numpy(values).to(dtype), (len(array), width), is_coalesced=True, check_invariants=False
    )


def _tensors(batch: Batch, sparse: dict[str, int]) -> Tensors:
    try:
        return {
            name: torch.from_numpy(array) if array.dtype.names is None else sparse_tensor(array, sparse[name])
            for name, array in batch.columns.items()
        }
    except TypeError as error:
        unsupported = {name: array.dtype for name, array in batch.columns.items() if array.dtype.kind not in "biuf"}
        name, kind = next(iter(unsupported.items()))
        raise SchemaError(
            f"Column {name!r} ({kind}) cannot become a tensor; leave it out (columns=) or convert it to a number "
            "(transformation_fn=)."
        ) from error
