"""Batches of a rank for Lightning: a loader that knows the share of each batch in its global batch."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch

from sparkhvd.data.read.batches import Batch, BatchSource
from sparkhvd.data.schema import columns as columns_of
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import ParamError
from sparkhvd.estimators.torch.inputs import ModelInput, model_dtype, plan_inputs
from sparkhvd.estimators.torch.losses.divisors import Divisor, LossFactors, loss_factors

Columns = Mapping[str, npt.NDArray[np.generic]]
Tensors = torch.Tensor | tuple[torch.Tensor, ...]
LightningBatch = Columns | dict[str, torch.Tensor] | tuple[Tensors, ...]

_SYNTHETIC_ROWS = 2  # batch normalization refuses a single row


@dataclass(frozen=True)
class BatchFormat:
    """Conversion of columns to the batch that ``training_step`` receives.

    Attributes:
        kind: ``"dict"`` for tensors by column; ``"tuple"`` for the features, the labels and, with a weight column, the
            weights: each a tensor, or a tuple of several tensors.
        columns: one input per column, for ``"dict"``.
        features: the inputs of ``forward``, for ``"tuple"``.
        labels: names of the label columns.
        weights: name of the weight column; empty without a weight column.
    """

    kind: str
    columns: tuple[ModelInput, ...]
    features: tuple[ModelInput, ...]
    labels: tuple[str, ...]
    weights: tuple[str, ...]

    def __call__(self, columns: Columns) -> LightningBatch:
        """Return the batch of some rows."""
        rows = len(next(iter(columns.values())))
        tensors = {part.columns[0]: part.tensor(columns, rows) for part in self.columns}
        if self.kind == "dict":
            return tensors
        parts = [
            tuple(part.tensor(columns, rows) for part in self.features),
            tuple(tensors[name] for name in self.labels),
            *([tuple(tensors[name] for name in self.weights)] if self.weights else []),
        ]
        return tuple(part[0] if len(part) == 1 else part for part in parts)


def build_batch_format(
    kind: str,
    model: torch.nn.Module,
    schema: DataSchema,
    input_shapes: Sequence[Sequence[int]] | None,
    label_shapes: Sequence[Sequence[int]] | None,
) -> BatchFormat:
    """Return the batch format for a model: floats get the model's dtype, integers become int64, booleans stay."""
    features, labels, weights = schema.of("feature"), schema.of("label"), schema.of("weight")
    shapes = dict(zip([c.name for c in features], input_shapes or (), strict=False))
    shapes |= dict(zip([c.name for c in labels], label_shapes or (), strict=False))
    floating = model_dtype(model)
    return BatchFormat(
        kind,
        tuple(_column_input(c, floating, shapes.get(c.name)) for c in (*features, *labels, *weights)),
        plan_inputs(model, features, input_shapes) if kind == "tuple" else (),
        tuple(column.name for column in labels),
        tuple(column.name for column in weights),
    )


def _column_input(column: ColumnSpec, floating: torch.dtype, shape: Sequence[int] | None) -> ModelInput:
    kind = np.dtype(column.dtype).kind
    dtype = floating if kind == "f" else torch.bool if kind == "b" else torch.int64
    row_shape = None if shape is None else tuple(shape[1:] if shape and shape[0] == -1 else shape)
    size = (column.shape[0] if column.shape else 0) if column.sparse else None
    return ModelInput((column.name,), row_shape, dtype, size)


@dataclass
class BatchShare:
    """The share of the latest batch in its step.

    Attributes:
        rows: rows of this rank that count.
        weight: factor for the gradient of the mean loss of these rows. It applies before ranks are averaged, and after
            Lightning has divided the loss by the number of batches that it accumulates.
        is_substitute: whether the rank has no rows in this step, so that the batch is a substitute without any effect.
        is_foreign: whether the batch comes from the user's own loader, so that its rows are unknown.
        factors: factors of a plain module's losses, see ``loss_factors``.
    """

    rows: int = 0
    weight: float = 1.0
    is_substitute: bool = False
    factors: LossFactors = None
    is_foreign: bool = False


# The share of a batch that comes from the user's own loader.
FOREIGN = BatchShare(1, is_foreign=True)


class RankLoader:
    """The batches of one rank, epoch by epoch; a loader for a Lightning Trainer.

    A rank without rows in a step receives a substitute, so that it takes part in the collectives of that step: the
    previous batch, the rows of the sample, or synthetic rows.

    Attributes:
        share: share of the latest batch that Lightning has begun in its step.
        batches_left: the steps of a resumed epoch if it has more of them than a whole epoch; None otherwise.
        rows: rows returned in the current epoch.
        waited: seconds spent waiting for rows.
    """

    def __init__(
        self,
        source: BatchSource,
        to_batch: Callable[[Columns], LightningBatch],
        size: int,
        sample: Columns | None = None,
    ) -> None:
        self.divisors: Sequence[Divisor | None] = ()  # the divisors of a plain module's losses
        self._source = source
        self._to_batch = to_batch
        self._size = size
        self._sample = sample
        self._batches: Iterator[LightningBatch] | None = None
        self.epoch: Callable[[], int] = lambda: 0
        self.passes: Callable[[], int] = lambda: 1
        self.limit: Callable[[], float] = lambda: math.inf  # the batches of an epoch that Lightning uses
        self.on_epoch: Callable[[int], None] = lambda _epoch: None
        self.repeats_first_epoch = False  # as Lightning's overfit_batches requires
        self.used = False
        self.batches_left: int | None = None
        self._resume_position = (-1, 0, 0)
        self._shares: deque[BatchShare] = deque()  # of the batches that Lightning has fetched but not begun
        self.share, self.rows, self.waited, self.started = BatchShare(), 0, 0.0, time.monotonic()

    def __len__(self) -> int:
        """Return the number of steps of this epoch, the same on every rank."""
        return self.batches_left or self._source.steps()

    def __iter__(self) -> Iterator[LightningBatch]:
        self.close()
        batches = self._batches = self._epoch_batches()
        return self._sole_reading(batches)

    def _sole_reading(self, batches: Iterator[LightningBatch]) -> Iterator[LightningBatch]:
        """Yield the batches of the loader's latest iteration, which has ended all earlier ones."""
        yield from batches
        if self._batches is not batches and self._batches is not None:
            raise ParamError(
                "data_module reads one of its loaders again before the first reading has ended, for example because a "
                "CombinedLoader contains it twice. Each batch is read once: use the loader in one place only."
            )

    def begin_batch(self) -> None:
        """Set ``share`` for the batch that Lightning begins. It may have fetched more, if a wrapper has no length."""
        self.share = self._shares.popleft() if self._shares else FOREIGN

    def begin_within(self, epoch: int, first_step: int, done: int) -> None:
        """Start an epoch that was interrupted in the middle.

        Args:
            epoch: the epoch.
            first_step: the step from which the source resumes.
            done: batches of the epoch that Lightning counts as done; they decide where optimizer steps end.
        """
        self._resume_position = (epoch, first_step, done)

    def state_dict(self) -> dict[str, int]:
        """Return an empty state: the run's checkpoint holds the position, but Lightning requires both methods."""
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """See ``state_dict``."""

    def close(self) -> None:
        """Stop reading the current epoch."""
        if (close := getattr(self._batches, "close", None)) is not None:
            close()
        self._batches = None
        self._shares.clear()

    def _epoch_batches(self) -> Iterator[LightningBatch]:
        epoch = self.epoch()
        self.on_epoch(epoch)
        self.used, self.rows, self.waited, self.started = True, 0, 0.0, time.monotonic()
        resumed_epoch, first_step, done = self._resume_position
        first_step, done = (first_step, done) if epoch == resumed_epoch else (0, 0)
        batches = self._source.epoch(0 if self.repeats_first_epoch else epoch, first_step)
        latest_columns: Columns | None = None
        try:
            while group := self._next_group(batches, done):
                total, passes = sum(batch.global_rows for batch in group), self.passes()
                done += len(group)
                for batch, factors in zip(group, loss_factors(self.divisors, group), strict=True):
                    is_substitute = batch.rows == 0
                    if not is_substitute:
                        latest_columns = batch.columns
                    elif latest_columns is None:
                        latest_columns = self._substitute_rows()
                    self.rows += batch.rows
                    weight = batch.rows * self._size * passes / total
                    self._shares.append(BatchShare(batch.rows, weight, is_substitute, factors))
                    yield self._to_batch(latest_columns)
        finally:
            if (close := getattr(batches, "close", None)) is not None:
                close()

    def _next_group(self, batches: Iterator[Batch], done: int) -> list[Batch]:
        """Return the batches of one optimizer step. Steps end at multiples of ``passes``, and at ``limit``."""
        before, passes = time.monotonic(), self.passes()
        group = list(islice(batches, int(min(passes - done % passes, max(self.limit() - done, 0)))))
        self.waited += time.monotonic() - before
        return group

    def _substitute_rows(self) -> Columns:
        """Return at least two rows of the sample, or synthetic rows without a sample."""
        if self._sample is not None:
            rows = {name: np.concatenate([array, array]) for name, array in self._sample.items()}
            return {name: array[: max(_SYNTHETIC_ROWS, len(array) // 2)] for name, array in rows.items()}
        return {column.name: columns_of.blank(column, _SYNTHETIC_ROWS) for column in self._source.schema.columns}
