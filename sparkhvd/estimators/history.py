"""What a training run reports: one record per epoch, averaged over the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.estimators.plugin import EpochReport


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of a run.

    Attributes:
        epoch: from 0.
        train: metric name -> mean over the training rows of all ranks.
        validation: the same over the validation rows; empty without validation.
        rows_per_second: training rows of all ranks per second of training.
        step_seconds: mean duration of a training step.
        shares: parts of that duration by what they went to: data_wait, compute, communication.
    """

    epoch: int
    train: dict[str, float]
    validation: dict[str, float] = field(default_factory=dict)
    rows_per_second: float = 0.0
    step_seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)

    def line(self, epochs: int) -> str:
        """The record on one line, for people who watch the run."""
        parts = [f"epoch {self.epoch + 1}/{epochs}"]
        parts += [f"{name} {value:.4g}" for name, value in self.train.items()]
        parts += [f"val_{name} {value:.4g}" for name, value in self.validation.items()]
        parts.append(f"{self.rows_per_second:,.0f} rows/s")
        spent = " + ".join(f"{kind.split('_')[0]} {share:.0%}" for kind, share in self.shares.items())
        parts.append(f"step {self.step_seconds * 1000:.1f} ms = {spent}")
        return "  ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON knows it."""
        return asdict(self)


def record_from_json(content: dict[str, Any]) -> EpochRecord:
    """The inverse of ``EpochRecord.to_json``."""
    return EpochRecord(**content)


def averaged(report: EpochReport, communicator: Communicator) -> EpochRecord:
    """The record of an epoch from the reports of all ranks; collective, one small allreduce."""
    times = report.times
    mine = [
        *(number for pair in report.train.values() for number in pair),
        *(number for pair in report.validation.values() for number in pair),
        *(times.data_wait, times.compute, times.communication),
    ]
    total = communicator.allreduce(np.array(mine, np.float64), ReduceOp.SUM, name=f"epoch {report.epoch} report")
    train, total = _means(list(report.train), total)
    rows = float(total[0])
    validation, total = _means(list(report.validation), total[1:])
    spent = total[1:] / communicator.world.size
    seconds = max(float(spent.sum()), 1e-9)
    kinds = ("data_wait", "compute", "communication")
    return EpochRecord(
        epoch=report.epoch,
        train=train,
        validation=validation,
        rows_per_second=rows / seconds,
        step_seconds=seconds / max(1, report.steps),
        shares={kind: float(part) / seconds for kind, part in zip(kinds, spent, strict=True)},
    )


def _means(names: list[str], numbers: Any) -> tuple[dict[str, float], Any]:
    """The means of (sum, rows) pairs, and the rest of the numbers, with the rows of the last pair before it."""
    pairs = numbers[: 2 * len(names)].reshape(-1, 2)
    means = {
        name: float(total / rows) if rows else float("nan") for name, (total, rows) in zip(names, pairs, strict=True)
    }
    rows = pairs[-1:, 1] if len(pairs) else np.zeros(1)
    return means, np.concatenate([rows, numbers[2 * len(names) :]])
