"""Exact class losses over all ranks, for losses that do not divide by the number of rows.

``CrossEntropyLoss(weight=...)`` divides by the sum of the weights of its labels, and with ``ignore_index`` by the
number of labels that are not ignored. One big batch would divide by the total over all rows of the step. The loss of a
rank is therefore weighted by its share of this total, not by its share of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.data.read.batches import Batch
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.schema.manifest import LabelRanges
from sparkhvd.estimators.torch.losses.objective import (
    Measure,
    Objective,
    is_class_loss,
    is_unmodified_torch_loss,
    name_of,
)

_DEFAULT_IGNORE_INDEX = -100  # torch's default, which is not a class index
# One per loss: 0 if all labels of this rank are ignored, None if all labels of the whole step are.
LossFactors = tuple[float | None, ...] | None


@dataclass(frozen=True)
class Divisor:
    """The divisor of a class loss.

    Attributes:
        label: the column with the class indices; empty if only ``value`` is used.
        weights: weights of the classes; None counts labels.
        ignored: the class index that is ignored.
    """

    label: str
    weights: npt.NDArray[np.float64] | None
    ignored: int

    def value(self, labels: npt.NDArray[Any]) -> float:
        """Return the divisor for these labels."""
        numbers = labels.reshape(-1).astype(np.int64)
        counted = numbers[numbers != self.ignored]
        return float(len(counted)) if self.weights is None else float(np.take(self.weights, counted, mode="clip").sum())


def batch_divisors(objective: Objective, labels: Sequence[torch.Tensor], rows: int) -> list[float]:
    """Return the divisor of each loss for a batch; the number of rows if the divisor is unknown.

    Args:
        objective: holds the losses.
        labels: label tensors in the form that the losses take.
        rows: number of rows in the batch.
    """
    counts = []
    for loss, label in zip(objective.losses, labels, strict=True):
        # Class indices are integers; a loss of class probabilities divides by the rows.
        known = objective.weight_col is None and is_class_loss(loss) and is_unmodified_torch_loss(loss)
        numbers = known and label.dtype is torch.int64
        counts.append(_divisor(loss, "").value(label.detach().cpu().numpy()) if numbers else float(rows))
    return counts


def loss_divisors(objective: Objective, schema: DataSchema, ranges: LabelRanges = ()) -> tuple[Divisor | None, ...]:
    """Return the divisor of each loss in a training step; None if it is the number of rows, or unknown.

    Args:
        objective: holds the losses.
        schema: the columns.
        ranges: known ranges of the label columns; a column without one may hold any label.
    """
    columns = {column.name: column for column in schema.of("label")}
    divisors: list[Divisor | None] = []
    for loss, label in zip(objective.losses, objective.label_cols, strict=True):
        # Several floats per row may be class probabilities; their loss ignores the divisor (``Objective.combined``).
        known = is_unmodified_torch_loss(loss) and not columns[label].sparse
        differs = _has_own_divisor(objective, loss) or _may_contain_ignored(objective, loss, columns[label], ranges)
        divisors.append(_divisor(loss, label) if known and differs else None)
    return tuple(divisors)


def inexact_losses(objective: Objective, schema: DataSchema, *, own_steps: bool = False) -> list[str]:
    """Return the names of losses for which N ranks only approximate one big batch.

    Args:
        objective: holds the losses.
        schema: the columns.
        own_steps: whether the user's ``train_minibatch_fn`` takes the steps.
    """
    divisors = loss_divisors(objective, schema)
    return [
        name_of(loss)
        for loss, divisor in zip(objective.losses, divisors, strict=True)
        if _has_own_divisor(objective, loss) and (own_steps or divisor is None)
    ]


def loss_factors(divisors: Sequence[Divisor | None], step: Sequence[Batch]) -> list[LossFactors]:
    """Return the factors of the losses of each batch of a step, to apply before weighting by rows; collective.

    Without divisors the factors are None, and nothing is exchanged.
    """
    if not any(divisors):
        return [None] * len(step)
    own = np.array(
        [
            [0.0 if divisor is None else divisor.value(batch.columns[divisor.label]) for divisor in divisors]
            for batch in step
        ]
    ) * np.array([[batch.rows > 0] for batch in step])
    totals = session.current().allreduce(own.sum(axis=0), ReduceOp.SUM, name="divisors of the losses")
    rows = sum(batch.global_rows for batch in step)
    return [
        tuple(
            1.0 if divisor is None else _factor(part, total, rows / batch.rows)
            for divisor, part, total in zip(divisors, parts, totals, strict=True)
        )
        if batch.rows
        else None
        for batch, parts in zip(step, own, strict=True)
    ]


def _factor(part: float, total: float, row_ratio: float) -> float | None:
    return part / total * row_ratio if total else None


def counted_rows(rows: int, factors: LossFactors) -> int:
    """Return how many rows a batch's loss counts for in the epoch's mean: 0 if all labels of the step are ignored."""
    return 0 if factors is not None and all(factor is None for factor in factors) else rows


def _has_own_divisor(objective: Objective, loss: Measure) -> bool:
    """Return whether a class loss has weights or ignores labels, so that it does not divide by the rows."""
    if objective.weight_col is not None or not is_class_loss(loss):
        return False
    weights, ignored = _settings(loss)
    return weights is not None or ignored != _DEFAULT_IGNORE_INDEX


def _may_contain_ignored(objective: Objective, loss: Measure, label: ColumnSpec, ranges: LabelRanges) -> bool:
    """Return whether a label column may hold the ``ignore_index`` of its loss; ``ranges`` do not cover its fill."""
    if objective.weight_col is not None or not is_class_loss(loss):
        return False
    ignored = _settings(loss)[1]
    known = {name: (low, high) for name, low, high in ranges}
    low, high = known.get(label.name, (ignored, ignored))
    return low <= ignored <= high or label.fill == ignored


def _divisor(loss: object, label: str) -> Divisor:
    weights, ignored = _settings(loss)
    return Divisor(label, None if weights is None else weights.detach().cpu().double().numpy(), ignored)


def _settings(loss: object) -> tuple[torch.Tensor | None, int]:
    settings = dict(loss.keywords) if isinstance(loss, partial) else {}
    if isinstance(loss, torch.nn.Module):
        settings = {**vars(loss), **dict(loss.named_buffers())}
    return settings.get("weight"), int(settings.get("ignore_index", _DEFAULT_IGNORE_INDEX))
