"""The callbacks before and after the user's: they combine the epochs of all ranks and report them to the hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self

import keras
import numpy as np
import numpy.typing as npt

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.objects import allgather_object
from sparkhvd.estimators.keras.checkpoint.arrays import arrays_from_bytes, arrays_to_bytes, value_of
from sparkhvd.estimators.keras.checkpoint.module_buffers import Arrays
from sparkhvd.estimators.keras.checkpoint.randomness import RandomStates
from sparkhvd.estimators.keras.dataset import BatchDataset
from sparkhvd.estimators.keras.graph_flags import GraphFlags
from sparkhvd.estimators.keras.losses.divisors import CurrentBatch
from sparkhvd.estimators.keras.losses.metrics import Logs, MetricSums, as_number, is_number, summed_results
from sparkhvd.estimators.keras.statistics import LayerStatistics, variables_independent_of_rows, without_sums
from sparkhvd.estimators.plugin import Trainer, TrainHooks
from sparkhvd.estimators.reports import EpochReport, StepReport, StepTimes

_VALIDATION = "val_"  # begins the names of validation metrics in logs
_STATISTICS = "statistics."  # begins the names of a rank's own statistics in its state


@dataclass
class EpochMetrics:
    """The metrics of one epoch on this rank."""

    train: dict[str, tuple[float, int]] = field(default_factory=dict)
    validation: dict[str, tuple[float, int]] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)

    def names(self) -> set[str]:
        """Return the names of the metrics in the logs."""
        return {*self.train, *(f"{_VALIDATION}{name}" for name in self.validation)}

    def add(self, metrics: Mapping[str, tuple[float, int]]) -> None:
        """Add metrics by their names in the logs."""
        for name, pair in metrics.items():
            split = self.validation if name.startswith(_VALIDATION) else self.train
            split[name.removeprefix(_VALIDATION)] = pair


@dataclass(frozen=True)
class _OwnStatistics:
    """The statistics of one rank before their synchronization, and its rows since the previous one."""

    values: Arrays
    rows: int

    def arrays(self) -> Arrays:
        """Return the entries for the state of the rank."""
        named = {f"{_STATISTICS}{name}": value for name, value in without_sums(self.values).items()}
        return {**named, "rows of statistics": np.array(self.rows)}

    @classmethod
    def of_rank_state(cls, arrays: Arrays) -> Self | None:
        """Return the statistics in the state of a rank; None without any, as in checkpoints of older versions."""
        if "rows of statistics" not in arrays:
            return None
        own = {name: value for name, value in arrays.items() if name.startswith(_STATISTICS)}
        values = {name.removeprefix(_STATISTICS): value for name, value in own.items()}
        return cls(values, int(arrays["rows of statistics"]))


class EpochBeginCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Runs before the user's callbacks: sets the epoch, undoes empty steps, and averages the logs over all ranks."""

    def __init__(  # noqa: PLR0917
        self,
        data: BatchDataset,
        validation: BatchDataset | None,
        sync_layers: list[keras.Layer],
        seeds: RandomStates,
        statistics: LayerStatistics,
        current: CurrentBatch,
        graph_flags: GraphFlags,
        hooks: TrainHooks,
    ) -> None:
        super().__init__()
        world = session.current().world
        # The metric states from before the interruption, for a resumed epoch.
        self._earlier_metrics = hooks.metrics[world.rank :: world.size]
        self._before_update = hooks.before_update
        self._statistics = statistics
        self._current = current
        self.graph_flags = graph_flags
        self._equal_rows = 0  # this rank's rows in the epoch at the last synchronization of the statistics
        self._own_statistics: _OwnStatistics | None = None  # while the model has those of all ranks within an epoch
        self._rank_state = hooks.rank_state  # of a run that resumes within an epoch, until its first batch
        self._seeds = seeds
        self.batches_before = 0  # batches of the epoch that the interrupted run trained
        self.metrics = EpochMetrics()
        # The statistics of all ranks' rows, which must change even in this rank's empty steps.
        self._shared = {id(variable) for layer in sync_layers for variable in layer.non_trainable_variables}
        self.data = data
        self.validation = validation
        self._saved: list[tuple[keras.Variable, npt.NDArray[np.generic]]] = []
        self._saved_buffers: dict[str, npt.NDArray[np.generic]] = {}
        self._summed: dict[str, float] = {}
        self._started = self._data_wait = 0.0
        self._waits = session.current().channel().waits
        self._communicated = 0.0  # seconds of communication before the epoch
        self.step_ended = 0.0

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self.sums = MetricSums(model)
        self._shared.update(map(id, variables_independent_of_rows(model)))

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        self.data.epoch = epoch
        self._seeds.begin_epoch(epoch)
        self._equal_rows = 0
        self._started = self.step_ended = time.monotonic()
        self._data_wait, self._communicated = 0.0, self._waits.seconds

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        batch -= self.batches_before
        self._seeds.begin_batch()
        if batch == 0:  # Keras has reset the metrics
            self.sums.begin(self._earlier_metrics if self.data.begins_within() else ())
        self._resume_statistics()
        self._save_variables(batch, self.data)
        self._current.begin(self.data, batch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        batch -= self.batches_before
        self._before_update(self.data.epoch)  # a failure in the step itself precedes the update, see can_keep_state
        self.graph_flags.end_batch()
        self._current.end()
        self._restore_variables(batch, self.data)
        self._data_wait += self.data.waited(batch, self.step_ended)
        if batch == len(self.data) - 1:
            self._equalize(batch)
            self.metrics.times = self._times()
            self.sums.sum_over_ranks(f"epoch {self.data.epoch} metrics")  # Keras then computes the logs from them
            self._summed = summed_results(self.model)

    def _equalize(self, batch: int) -> None:
        """Synchronize the statistics of the model's layers over the ranks after a batch; collective."""
        rows = self.data.rows_until(batch)
        self._statistics.equalize(rows - self._equal_rows, f"epoch {self.data.epoch} statistics after {batch}")
        self._equal_rows = rows

    def equalize_until_taken(self, batch: int) -> None:
        """Synchronize for a checkpoint after a batch, until ``take_own_statistics()``; collective."""
        if self._own_statistics is None:
            rows = self.data.rows_until(batch) - self._equal_rows
            self._own_statistics = _OwnStatistics(self._statistics.own_values(), rows)
            self._equalize(batch)

    def take_own_statistics(self) -> None:
        """Continue with this rank's own statistics after a checkpoint; see ``LayerStatistics``."""
        own, self._own_statistics = self._own_statistics, None
        if own is not None:
            self._statistics.take(own.values)
            self._equal_rows -= own.rows

    def _resume_statistics(self) -> None:
        """Take the statistics that this rank had when a run was interrupted within the epoch."""
        state, self._rank_state = self._rank_state, None
        if state is not None:
            self._own_statistics = _OwnStatistics.of_rank_state(arrays_from_bytes(state))
            self.take_own_statistics()

    def rank_state(self) -> bytes:
        """Return the state of this rank at a checkpoint, for ``StepReport``."""
        own = self._own_statistics
        return arrays_to_bytes(self._seeds.state() | ({} if own is None else own.arrays()))

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        if self.validation is not None:
            if batch == 0:
                self.sums.begin()
            self._save_variables(batch, self.validation)
            self._current.begin(self.validation, batch)

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        self._current.end()
        if self.validation is not None:
            self._restore_variables(batch, self.validation)
            if batch == len(self.validation) - 1:
                self.sums.sum_over_ranks(f"epoch {self.data.epoch} validation metrics")
                self._summed |= {f"{_VALIDATION}{name}": value for name, value in summed_results(self.model).items()}

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replace the logs, which callbacks read, with the means over the rows of all ranks; collective.

        Logs of summed metrics are equal on all ranks and keep their values.
        """
        logs = {} if logs is None else logs
        logs.update({name: value for name, value in self._summed.items() if name in logs})
        rows = {"train": self.data.rows, "val": self.validation.rows if self.validation is not None else 0}
        names = sorted(logs)
        counts = [rows["val" if name.startswith(_VALIDATION) else "train"] for name in names]
        sums = [as_number(logs[name]) * count if count else 0.0 for name, count in zip(names, counts, strict=True)]
        self.metrics = EpochMetrics(times=self.metrics.times)
        self.metrics.add(dict(zip(names, zip(sums, counts, strict=True), strict=True)))
        totals = session.current().allreduce(
            np.array([sums, counts], np.float64), ReduceOp.SUM, name=f"epoch {epoch} logs"
        )
        logs.update(zip(names, (totals[0] / np.maximum(totals[1], 1)).tolist(), strict=True))

    def _times(self) -> StepTimes:
        """Return the times of the epoch's steps, which Keras' own loop does not measure."""
        total = time.monotonic() - self._started
        communicated = self._waits.seconds - self._communicated
        return StepTimes(self._data_wait, max(total - self._data_wait - communicated, 0.0), communicated)

    def _save_variables(self, batch: int, data: BatchDataset) -> None:
        """Save the variables that an empty step must not change, if the step may be empty at all: copies take time."""
        self._saved, self._saved_buffers = [], {}
        if data.may_be_empty(batch):
            model = self.model
            own = [variable for variable in model.non_trainable_variables if id(variable) not in self._shared]
            self._saved = [(variable, value_of(variable)) for variable in (*model.metrics_variables, *own)]
            self._saved_buffers = self._statistics.buffers.values()

    def _restore_variables(self, batch: int, data: BatchDataset) -> None:
        if data.was_empty(batch):
            for variable, value in self._saved:
                variable.assign(value)
            self._statistics.buffers.restore(self._saved_buffers)
        self._saved, self._saved_buffers = [], {}


class EqualizeStatisticsCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs before a callback that may save the model after any batch, on all ranks."""

    def __init__(self, begin: EpochBeginCallback) -> None:
        super().__init__()
        self._begin = begin

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        self._begin.equalize_until_taken(batch - self._begin.batches_before)


class EpochEndCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs after the user's callbacks, so that the checkpoint contains their changes."""

    def __init__(
        self,
        begin: EpochBeginCallback,
        data: BatchDataset,
        hooks: TrainHooks,
        trainer: Trainer,
        prepare_recovery: Callable[[], Callable[[], bytes | None]] | None,
        *,
        after_callbacks: bool,
    ) -> None:
        super().__init__()
        self._prepare_recovery = prepare_recovery
        self._after_callbacks = after_callbacks  # whether the user has callbacks, equal on all ranks
        self._logs: dict[str, float] = {}  # the logs of this rank's last step with rows in the epoch
        self._wants_end = False
        self.ended = False
        self._begin = begin
        self._data = data
        self._hooks = hooks
        self._trainer = trainer

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        self._begin.graph_flags.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Report the end of a step to the hooks; the logs are means over this rank's rows in the epoch so far."""
        batch -= self._begin.batches_before
        # A rank that stopped within the epoch would leave the other ranks waiting.
        self._wants_end = self._wants_end or bool(self.model.stop_training)
        self.model.stop_training = False
        if self._data.is_end_of_step(batch):
            self._report(batch, logs)
        self._begin.take_own_statistics()
        self._begin.step_ended = time.monotonic()

    def _report(self, batch: int, logs: Logs) -> None:
        data = self._data
        rows, is_empty, metric_sums = data.rows_until(batch), data.was_empty(batch), self._begin.sums
        if not is_empty or not rows:  # the logs of an empty step count its placeholder row
            self._logs = dict(logs or {})
        values = self._logs

        def sums() -> dict[str, tuple[float, int]]:
            means = {} if metric_sums.cover(values) else values
            return {name: (as_number(value) * rows if rows else 0.0, rows) for name, value in means.items()}

        def metrics() -> bytes:
            return metric_sums.state() if metric_sums.cover(values) else b""

        loss = None if is_empty or "loss" not in values else float(values["loss"])
        step = data.first_step + batch + 1

        report = StepReport(
            data.epoch,
            step,
            data.first_step + len(data),
            loss,
            sums,
            self._begin.rank_state,
            allows_checkpoint=self._ends_optimizer_step(),
            synchronize=lambda: self._begin.equalize_until_taken(batch),
            metrics=metrics,
            wants_end=self._wants_end,
            prepare_recovery=self._prepare_recovery,
        )
        self._hooks.on_step_end(report, self._trainer)

    def _ends_optimizer_step(self) -> bool:
        """Return whether the optimizer has no sums of gradients, which would differ between the ranks."""
        passes = self.model.optimizer.gradient_accumulation_steps
        return not passes or int(value_of(self.model.optimizer._iterations)) % passes == 0  # noqa: SLF001

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        metrics = self._begin.metrics
        if self._after_callbacks:
            metrics.add(self._values_of_callbacks(epoch, logs or {}))
        wants_end = self._wants_end or bool(self.model.stop_training)
        report = EpochReport(
            epoch, metrics.train, metrics.validation, metrics.times, len(self._data), lambda _record: wants_end
        )
        self.ended = not self._hooks.on_epoch_end(report, self._trainer)
        self.model.stop_training = self.ended

    def _values_of_callbacks(self, epoch: int, logs: Mapping[str, object]) -> dict[str, tuple[float, int]]:
        """Return the numbers that callbacks have added to the logs, such as the learning rate; collective.

        The ranks count alike, and only those whose callbacks have added the number: a callback may act on one rank.
        """
        known = self._begin.metrics.names()
        own = {name: as_number(value) for name, value in logs.items() if name not in known and is_number(value)}
        ranks = allgather_object(session.current(), list(own), name=f"epoch {epoch} names of callbacks")
        names = sorted({name for names in ranks for name in names})
        return {name: (own.get(name, 0.0), int(name in own)) for name in names}
