"""One rank's training of a Keras model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.data.read.batches import BatchSource
from sparkhvd.estimators.keras import artifact
from sparkhvd.estimators.keras.dataset import BatchDataset
from sparkhvd.estimators.keras.divisors import CurrentBatch, divide_over_ranks
from sparkhvd.estimators.keras.metrics import sum_over_ranks
from sparkhvd.estimators.keras.package import Package, arrays_of_bytes, arrays_to_bytes, refuse_own_optimizers
from sparkhvd.estimators.keras.saving import KeptFiles
from sparkhvd.estimators.keras.statistics import Statistics
from sparkhvd.estimators.plugin import Trainer, TrainHooks, TrainSpec
from sparkhvd.estimators.reports import EpochReport, StepReport, StepTimes
from sparkhvd.keras.callbacks import LearningRateScheduleCallback, broadcast_variables
from sparkhvd.keras.optimizer import DistributedOptimizer
from sparkhvd.world import World


class KerasTrainer:
    """Trains on this rank's part of every global batch, by ``model.fit``.

    The gradient of a step is the mean over the rows of all ranks; BatchNormalization sees this rank's rows only, unless
    it is a SyncBatchNormalization, and dropout draws on every rank for itself.
    """

    def __init__(self, package: Package, spec: TrainSpec, world: World) -> None:
        prepare_devices(world, use_gpu=spec.use_gpu)
        keras.utils.set_random_seed(spec.seed)
        self._package = package
        self._spec = spec
        with self._device():
            self._model = package.build()
        if world.size > 1:
            refuse_own_optimizers(self._model)
        self._package = package.with_ports_for(self._model, spec.schema)
        self._lr_scale = float(world.size) if spec.scale_lr else 1.0
        self._scale_lr(self._lr_scale)

    def state(self) -> bytes:
        """The values of all variables of model and optimizer."""
        arrays = {f"model.{i}": _value(v) for i, v in enumerate(self._model.variables)}
        arrays |= {f"optimizer.{i}": _value(v) for i, v in enumerate(self._model.optimizer.variables)}
        return arrays_to_bytes({**arrays, "lr_scale": np.array(self._lr_scale)})

    def restore(self, state: bytes) -> None:
        """Continue from ``state``; the learning rate is the one of then, in this run's scale."""
        arrays = arrays_of_bytes(state)
        optimizer = self._model.optimizer
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        for kind, variables in (("model", self._model.variables), ("optimizer", optimizer.variables)):
            for index, variable in enumerate(variables):
                variable.assign(arrays[f"{kind}.{index}"])
        self._scale_lr(self._lr_scale / float(arrays["lr_scale"]))

    def _device(self) -> AbstractContextManager[None]:
        """The CPU where the backend would take a GPU by itself, but shall not."""
        if self._spec.use_gpu or keras.config.backend() != "torch":
            return nullcontext()
        return cast("AbstractContextManager[None]", keras.device("cpu"))

    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None:
        """Train from ``hooks.first_epoch`` to the last epoch, or until a hook or a callback ends it; collective."""
        optimizer = DistributedOptimizer(
            self._model.optimizer, sparse_as_dense=True, compression=self._package.gradient_compression()
        )
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        broadcast_variables([*self._model.variables, *optimizer.variables])
        passes = self._spec.backward_passes_per_step
        ports, sample = (self._package.inputs, self._package.outputs), self._spec.sample
        data = BatchDataset(train, *ports, passes, sample)
        validation = None if val is None else BatchDataset(val, *ports, sample=sample)
        with self._device():
            optimizer.weight_by(data.next_share, data.ends_step if passes > 1 else None)
        shared = _synchronized(self._model)
        for layer in shared:
            layer.count_rows_if(data.counts)
        seeds = _Seeds(self._model, self._spec, session.current().world.rank)
        statistics = Statistics(self._model, seeds.variables)
        saved = self._package.checkpoint_callback
        often = saved is not None and saved.save_freq != "epoch"
        current = CurrentBatch()
        divide_over_ranks(self._model, current)
        begin = _EpochBegin(data, validation, shared, partial(seeds.begin, hooks), statistics, current, often)
        end = _EpochEnd(begin, data, hooks, self, seeds)
        saving = self._saving(hooks)
        callbacks = [begin, *self._package.callbacks, *(() if saving is None else saving.callbacks), end]

        def fit(first: int, last: int) -> None:
            with self._device():
                self._model.fit(
                    data,
                    validation_data=validation,
                    initial_epoch=first,
                    epochs=last,
                    callbacks=callbacks,
                    shuffle=False,
                    verbose=0,
                )

        # Keras would do so at the end of every fit, also in the middle of a training; export does it instead.
        object.__setattr__(optimizer, "finalize_variable_values", lambda _variables: None)
        first = hooks.first_epoch
        try:
            if first < self._spec.epochs and (hooks.first_step or hooks.first_epoch_batches is not None):
                # Keras asks once per fit how many batches an epoch has, and this one has fewer.
                self._begin_within(data, hooks.first_step, hooks.first_epoch_batches, train.steps())
                fit(first, first + 1)
                self._begin_within(data, 0, None, None)
                first = self._spec.epochs if end.ended else first + 1
            if first < self._spec.epochs:
                fit(first, self._spec.epochs)
        finally:
            if saving is not None:
                saving.close()
            data.close()
            if validation is not None:
                validation.close()
        hooks.on_train_end(self)

    def _begin_within(self, data: BatchDataset, first_step: int, left: int | None, steps: int | None) -> None:
        """Let epochs begin there; schedules of the learning rate count from there, as in an undisturbed epoch."""
        data.begin_within(first_step, left)
        done = first_step if left is None or steps is None else max(steps - left, 0)
        for callback in self._package.callbacks:
            if isinstance(callback, LearningRateScheduleCallback):
                callback.begin_within(done, steps)

    def _saving(self, hooks: TrainHooks) -> KeptFiles | None:
        """What keeps the files of the user's checkpoint callback, on rank 0."""
        callback = self._package.checkpoint_callback
        if callback is None or session.current().world.rank != 0:
            return None
        return KeptFiles(callback, hooks, self._spec.checkpoints, self._lr_scale)

    def export(self, folder: Path) -> None:
        """Write the model as ``model.fit`` leaves it, its optimizer with the user's unscaled learning rate."""
        self._scale_lr(1.0 / self._lr_scale)
        try:
            package = self._package
            with _averaged(self._model):
                artifact.save(folder, self._model, package.objects, package.inputs, package.outputs)
        finally:
            self._scale_lr(self._lr_scale)

    def _scale_lr(self, factor: float) -> None:
        if factor == 1.0:
            return
        optimizer = self._model.optimizer
        optimizer.learning_rate = float(_value(optimizer.learning_rate)) * factor


@dataclass
class _Measured:
    """The metrics of one epoch on this rank."""

    train: dict[str, tuple[float, int]] = field(default_factory=dict)
    validation: dict[str, tuple[float, int]] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)


class _EpochBegin(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Comes before the user's callbacks: names the epoch, undoes empty steps, makes logs of all ranks' rows."""

    def __init__(  # noqa: PLR0917
        self,
        data: BatchDataset,
        validation: BatchDataset | None,
        shared: list[Any],
        seed: Callable[[int], None],
        statistics: Statistics,
        current: CurrentBatch,
        saves_within: bool,
    ) -> None:
        super().__init__()
        self._statistics = statistics
        self._current = current
        self._equal_rows = 0  # of this rank in the epoch when the statistics were last made equal
        self._saves_within = saves_within  # whether the model may be saved after any batch
        self._seed = seed  # called with the number of every epoch
        self.measured = _Measured()
        # Of layers whose statistics are those of all ranks; an empty step of this rank must change them too.
        self._shared = {id(variable) for layer in shared for variable in layer.non_trainable_variables}
        self._data = data
        self._validation = validation
        self._kept: list[tuple[Any, Any]] = []
        self._started = self._data_wait = 0.0
        self._waits = session.current().channel().waits
        self._communicated = 0.0  # before the epoch
        self.step_ended = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._data.epoch = epoch
        self._seed(epoch)
        self._equal_rows = 0
        self._started = self.step_ended = time.monotonic()
        self._data_wait, self._communicated = 0.0, self._waits.seconds

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._keep(batch, self._data)
        self._current.begin(self._data, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._current.end()
        self._give_back(batch, self._data)
        self._data_wait += self._data.waited(batch, self.step_ended)
        last = batch == len(self._data) - 1
        if last or self._saves_within:
            self.equalize(batch)
        if last:
            self.measured.times = self._times()
            sum_over_ranks(self.model, f"epoch {self._data.epoch} metrics")  # of which Keras makes the logs next

    def equalize(self, batch: int) -> None:
        """Make what the model's layers keep beside their weights equal on all ranks after a batch; collective."""
        rows = self._data.rows_until(batch)
        self._statistics.equalize(rows - self._equal_rows, f"epoch {self._data.epoch} statistics after {batch}")
        self._equal_rows = rows

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        if self._validation is not None:
            self._keep(batch, self._validation)
            self._current.begin(self._validation, batch)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._current.end()
        if self._validation is not None:
            self._give_back(batch, self._validation)
            if batch == len(self._validation) - 1:
                sum_over_ranks(self.model, f"epoch {self._data.epoch} validation metrics")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the logs, which callbacks read, by the means over the rows of all ranks; collective.

        Those of summed metrics, which are equal on all ranks, stay what they are.
        """
        logs = {} if logs is None else logs
        rows = {"train": self._data.rows, "val": self._validation.rows if self._validation is not None else 0}
        names = sorted(logs)
        counts = [rows["val" if name.startswith("val_") else "train"] for name in names]
        sums = [float(logs[name]) * count if count else 0.0 for name, count in zip(names, counts, strict=True)]
        pairs = dict(zip(names, zip(sums, counts, strict=True), strict=True))
        self.measured.train = {name: pair for name, pair in pairs.items() if not name.startswith("val_")}
        self.measured.validation = {n.removeprefix("val_"): p for n, p in pairs.items() if n.startswith("val_")}
        totals = session.current().allreduce(
            np.array([sums, counts], np.float64), ReduceOp.SUM, name=f"epoch {epoch} logs"
        )
        logs.update(zip(names, (totals[0] / np.maximum(totals[1], 1)).tolist(), strict=True))

    def _times(self) -> StepTimes:
        """Where the time went; Keras' own loop does not say it."""
        whole = time.monotonic() - self._started
        communicated = self._waits.seconds - self._communicated
        return StepTimes(self._data_wait, max(whole - self._data_wait - communicated, 0.0), communicated)

    def _keep(self, batch: int, data: BatchDataset) -> None:
        """What an empty step must leave as it was; a copy costs time, so only of steps that could be empty."""
        self._kept = []
        if data.may_be_empty(batch):
            model = self.model
            own = [variable for variable in model.non_trainable_variables if id(variable) not in self._shared]
            found = [*model.metrics_variables, *own]
            self._kept = [(variable, _value(variable)) for variable in found]

    def _give_back(self, batch: int, data: BatchDataset) -> None:
        if data.was_empty(batch):
            for variable, value in self._kept:
                variable.assign(value)
        self._kept = []


class _EpochEnd(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes after the user's callbacks, so that the checkpoint holds what they changed."""

    def __init__(
        self, begin: _EpochBegin, data: BatchDataset, hooks: TrainHooks, trainer: Trainer, seeds: _Seeds
    ) -> None:
        super().__init__()
        self._seeds = seeds
        self._wants_end = False
        self.ended = False
        self._begin = begin
        self._data = data
        self._hooks = hooks
        self._trainer = trainer

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell the hooks at the end of a step; the logs are means over this rank's rows of the epoch so far."""
        if self._data.is_end_of_step(batch):
            self._tell(batch, logs)
        # A rank that ended the epoch by itself would leave the others waiting.
        self._wants_end = self._wants_end or bool(self.model.stop_training)
        self.model.stop_training = False
        self._begin.step_ended = time.monotonic()

    def _tell(self, batch: int, logs: dict[str, Any] | None) -> None:
        data = self._data
        values, rows = dict(logs or {}), data.rows_until(batch)

        def sums() -> dict[str, tuple[float, int]]:
            return {name: (float(value) * rows if rows else 0.0, rows) for name, value in values.items()}

        loss = None if data.was_empty(batch) or "loss" not in values else float(values["loss"])
        step = data.first_step + batch + 1

        def rank_state() -> bytes:
            self._begin.equalize(batch)  # every rank is asked before rank 0 keeps the model
            return self._seeds.state()

        report = StepReport(data.epoch, step, data.first_step + len(data), loss, sums, rank_state)
        self._hooks.on_step_end(report, self._trainer)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        measured = self._begin.measured
        wants_end = self._wants_end or bool(self.model.stop_training)
        report = EpochReport(
            epoch, measured.train, measured.validation, measured.times, len(self._data), lambda _record: wants_end
        )
        self.ended = not self._hooks.on_epoch_end(report, self._trainer)
        self.model.stop_training = self.ended


class _Seeds:
    """The random numbers of the model's layers (dropout, noise), which every rank draws for itself.

    Args:
        model: whose layers.
        spec: has the seed of the training.
        rank: whose numbers.
    """

    def __init__(self, model: Any, spec: TrainSpec, rank: int) -> None:
        layers = [model, *model._flatten_layers(include_self=False)]  # noqa: SLF001  (no public way to walk)
        found = {id(each.state): each.state for layer in layers for each in layer._seed_generators}  # noqa: SLF001
        self.variables = list(found.values())
        self._spec = spec
        self._rank = rank

    def begin(self, hooks: TrainHooks, epoch: int) -> None:
        """Draw other numbers in every epoch, and the same in a run that goes on as in one that was not interrupted."""
        if epoch == hooks.first_epoch and hooks.rank_state:
            states = list(arrays_of_bytes(hooks.rank_state).values())
        else:
            numbers = np.random.SeedSequence(self._spec.seed_of(epoch, self._rank))
            # Not every backend has a state without a sign.
            states = [each.generate_state(2) >> 1 for each in numbers.spawn(len(self.variables))]
        for variable, state in zip(self.variables, states, strict=True):
            variable.assign(state.astype(_value(variable).dtype))

    def state(self) -> bytes:
        """Where the rank's numbers are, for ``StepReport``."""
        return arrays_to_bytes({str(index): _value(variable) for index, variable in enumerate(self.variables)})


def prepare_devices(world: World, *, use_gpu: bool = True) -> None:
    """Give the rank its own GPU where the backend sees some; TensorFlow lets it grow its memory as it needs it."""
    if keras.config.backend() == "torch":
        import torch  # noqa: PLC0415  (only the backend in use is imported)

        if use_gpu and torch.cuda.is_available():  # Keras computes on the one that torch has for the thread
            torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        return
    if keras.config.backend() != "tensorflow":
        return
    import tensorflow as tf  # noqa: PLC0415

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and not use_gpu:
        tf.config.set_visible_devices([], "GPU")
    elif gpus:
        own = gpus[world.local_rank % len(gpus)]
        tf.config.set_visible_devices(own, "GPU")
        tf.config.experimental.set_memory_growth(own, True)


def _synchronized(model: Any) -> list[Any]:
    """The layers of a model that normalize by the rows of all ranks."""
    if keras.config.backend() != "tensorflow":
        return []
    from sparkhvd.tensorflow import SyncBatchNormalization  # noqa: PLC0415  (only the backend in use is imported)

    layers = model._flatten_layers(include_self=False)  # noqa: SLF001  (no public way to walk)
    return [layer for layer in layers if isinstance(layer, SyncBatchNormalization)]


@contextmanager
def _averaged(model: Any) -> Iterator[None]:
    """Give the model the averages of its weights, where its optimizer keeps some (``use_ema``)."""
    optimizer, weights = model.optimizer, model.trainable_variables
    if not (optimizer.use_ema and optimizer.built):
        yield
        return
    trained = [_value(each) for each in weights]
    type(optimizer).finalize_variable_values(optimizer, weights)
    try:
        yield
    finally:
        for variable, value in zip(weights, trained, strict=True):
            variable.assign(value)


def _value(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable))
