"""A batch source of arrays, for trainers without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.estimators.plugin import TrainSpec
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepReport


def schema(**columns: tuple[str, str, tuple[int, ...] | None, str]) -> DataSchema:
    """Return a schema; pass each column as ``name=(role, dtype, shape, kind)``."""
    return DataSchema(tuple(ColumnSpec(n, d, s, r, k) for n, (r, d, s, k) in columns.items()))


@dataclass
class ArraySource:
    """The batches of a rank, from the row numbers of its steps and the numbers of rows of all ranks' steps."""

    schema: DataSchema
    columns: dict[str, np.ndarray]
    mine: list[list[int]]
    everyones: list[int]

    def steps(self) -> int:
        return len(self.mine)

    def rows(self) -> int:
        return sum(self.everyones)

    def has_rows(self, step: int) -> bool:
        return bool(self.mine[step])

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:
        for rows, together in list(zip(self.mine, self.everyones, strict=True))[first_step:]:
            yield Batch({name: array[rows] for name, array in self.columns.items()}, len(rows), together)


def partition_rows(
    columns: dict[str, np.ndarray], sizes: Sequence[Sequence[int]], rank: int, of: DataSchema
) -> ArraySource:
    """Return the rows of a rank: in every step, each rank in turn takes the next rows."""
    mine, start = [], 0
    for step in sizes:
        first = start + sum(step[:rank])
        mine.append(list(range(first, first + step[rank])))
        start += sum(step)
    return ArraySource(of, columns, mine, [sum(step) for step in sizes])


@dataclass
class Hooks:
    """Hooks that record the reports."""

    first_epoch: int = 0
    reports: list[EpochReport] = field(default_factory=list)
    first_step: int = 0
    first_epoch_batches: int | None = None
    steps_done: int = 0
    rank_state: bytes | None = None
    metrics: tuple[bytes, ...] = ()
    steps: list[StepReport] = field(default_factory=list)
    history: tuple[EpochRecord, ...] = ()
    ended: bool = False

    def keep_file(self, path: Path) -> None:
        raise AssertionError(f"no file is requested, but {path} was kept")

    def before_update(self, epoch: int, sums: Mapping[str, tuple[float, int]] | None = None) -> None:
        pass

    def on_step_end(self, report: StepReport, trainer: object) -> None:
        self.steps.append(report)

    def on_epoch_end(self, report: EpochReport, trainer: object) -> bool:
        self.reports.append(report)
        means = {name: total / max(rows, 1) for name, (total, rows) in report.train.items()}
        return report.on_record is None or not report.on_record(EpochRecord(report.epoch, means))

    def on_train_end(self, trainer: object) -> None:
        self.ended = True


def spec(data: DataSchema, epochs: int = 1, **more: object) -> TrainSpec:
    return TrainSpec(data, epochs, batch_size=4, val_batch_size=4, seed=1, **{"scale_lr": False, **more})
