"""One rank's training of a Keras model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import keras
import numpy as np
import numpy.typing as npt

from sparkhvd.comm import session
from sparkhvd.data.read.batches import BatchSource
from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.callback_list import TrainingCallbackList
from sparkhvd.estimators.keras.checkpoint.arrays import arrays_from_bytes, arrays_to_bytes, value_of
from sparkhvd.estimators.keras.checkpoint.callback_states import (
    append_to_files,
    callback_states,
    changes_model_at_end,
    restore_callbacks,
)
from sparkhvd.estimators.keras.checkpoint.module_buffers import ModuleBuffers
from sparkhvd.estimators.keras.checkpoint.randomness import RandomStates
from sparkhvd.estimators.keras.dataset import BatchDataset, as_input_of_fit
from sparkhvd.estimators.keras.epoch_callbacks import (
    EpochBeginCallback,
    EpochEndCallback,
    EqualizeStatisticsCallback,
)
from sparkhvd.estimators.keras.graph_flags import GraphFlags
from sparkhvd.estimators.keras.kept_state import SumFunction, can_keep_state, sum_function, version_of
from sparkhvd.estimators.keras.losses.divisors import CurrentBatch, divide_over_ranks
from sparkhvd.estimators.keras.losses.metrics import create_metrics_before_training
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.keras.serialization.omissions import Omissions
from sparkhvd.estimators.keras.serialization.package import (
    Package,
    additional_optimizers,
    reject_own_optimizers,
)
from sparkhvd.estimators.keras.serialization.saving import CheckpointFilesCallback
from sparkhvd.estimators.keras.statistics import LayerStatistics
from sparkhvd.estimators.plugin import TrainHooks, TrainSpec
from sparkhvd.estimators.training.commits import until_change
from sparkhvd.keras.optimizer import DistributedOptimizer, ExchangingOptimizer
from sparkhvd.keras.variables import broadcast_variables, refresh_constants
from sparkhvd.world import World

P = ParamSpec("P")
R = TypeVar("R")

_NUMPY_SEEDS = 2**32
_VARIABLE_NUMBER = re.compile(r"_\d+(?=_|$)")  # in the name of an optimizer's variable


def _on_own_device(
    method: Callable[Concatenate[KerasTrainer, P], R],
) -> Callable[Concatenate[KerasTrainer, P], R]:
    """Run a method in the scope of the trainer's device, where the variables that it creates must be."""

    @wraps(method)
    def run(trainer: KerasTrainer, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with trainer._device():  # noqa: SLF001  (a method of the same class)
            return method(trainer, *args, **kwargs)

    return run


class KerasTrainer:
    """Trains on this rank's part of every global batch with ``model.fit``.

    The gradient of a step is the mean over the rows of all ranks. BatchNormalization uses this rank's rows only (use
    SyncBatchNormalization for all rows), and dropout draws different numbers on every rank.
    """

    def __init__(self, package: Package, spec: TrainSpec, world: World) -> None:
        prepare_devices(world, use_gpu=spec.use_gpu)
        keras.utils.set_random_seed(spec.seed % _NUMPY_SEEDS)
        self._package = package
        self._spec = spec
        with self._device():
            self._model = package.build()
        if world.size > 1:
            reject_own_optimizers(self._model)
        self._package = package.with_ports_for(self._model, spec.schema)
        self._lr_scale = spec.lr_scale(world.size)
        self._scale_lr(self._lr_scale)
        self._checkpoint = b""  # the state from which the run resumes; empty if it does not
        self._ended = False  # whether _end has averaged the weights and called the callbacks
        self._graph_flags = GraphFlags(self._model)
        self._buffers = ModuleBuffers(self._model)

    def state(self) -> bytes:
        """Return the values of the model's variables and buffers, and the states of optimizers and callbacks."""
        return arrays_to_bytes(self._arrays())

    def _keep_state(self, seeds: Sequence[keras.Variable], sums: SumFunction) -> Callable[[], bytes | None]:
        """Return a function that returns the current state until a step changes the weights, then None.

        The function returns single numbers of the optimizers as they are now, such as the learning rate: a callback or
        TensorFlow's graph may change them before the gradients are exchanged.
        """
        optimizers = {"optimizer": self._model.optimizer, **self._additional_optimizers()}
        variables = {
            f"{name}.{i}": v for name, optimizer in optimizers.items() for i, v in enumerate(optimizer.variables)
        }
        numbers = {name: value_of(v) for name, v in variables.items() if math.prod(v.shape) == 1}
        others = [variable for name, variable in variables.items() if name not in numbers]
        seed_ids = set(map(id, seeds))
        weights = [variable for variable in self._model.variables if id(variable) not in seed_ids]
        version = partial(version_of, self._model, [*weights, *others], sums)

        def state() -> bytes:
            arrays = self._arrays()
            return arrays_to_bytes(arrays | {name: value for name, value in numbers.items() if name in arrays})

        return until_change(version, state)

    def _arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        arrays = {f"model.{i}": value_of(v) for i, v in enumerate(self._model.variables)}
        arrays |= {f"optimizer.{i}": value_of(v) for i, v in enumerate(self._model.optimizer.variables)}
        arrays |= {f"buffer.{name}": values for name, values in self._buffers.values().items()}
        index_by_id = {id(variable): index for index, variable in enumerate(self._model.variables)}
        for name, optimizer in self._additional_optimizers().items():
            trained = [index_by_id.get(id(v), -1) for v in optimizer._trainable_variables] if optimizer.built else []  # noqa: SLF001
            if trained and min(trained) >= 0:
                arrays[f"trained by {name}"] = np.array(trained)
                arrays |= {f"{name}.{i}": value_of(v) for i, v in enumerate(optimizer.variables)}
        swapped = np.array([callback._ema_weights_in_model for callback in self._swap_callbacks()])  # noqa: SLF001
        arrays |= callback_states(self._package.callbacks)
        names = np.array(_variable_names(self._model.optimizer))
        arrays |= _flag_arrays("trained", Omissions.of_training(self._model))
        if self._graph_flags.traced is not None:
            arrays |= _flag_arrays("traced", self._graph_flags.traced)
        return {
            **arrays,
            "lr_scale": np.array(self._lr_scale),
            "swapped": swapped,
            "ended": np.array(self._ended),
            "optimizer names": names,
        }

    @_on_own_device
    def restore(self, state: bytes) -> None:
        """Resume from ``state``; the saved learning rate is converted to the scale of this run.

        Raises:
            ParamError: the saved optimizer has other variables, because it was created with other settings.
        """
        self._checkpoint = state
        append_to_files(self._package.callbacks)
        arrays = arrays_from_bytes(state)
        optimizer = self._model.optimizer
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        _check_variables(optimizer, arrays.get("optimizer names", np.array([])).tolist())
        for prefix, variables in (("model", self._model.variables), ("optimizer", optimizer.variables)):
            for index, variable in enumerate(variables):
                variable.assign(arrays[f"{prefix}.{index}"])
        refresh_constants(self._model)
        for name, other in self._additional_optimizers().items():
            if f"trained by {name}" not in arrays:
                continue
            if not other.built:
                other.build([self._model.variables[index] for index in arrays[f"trained by {name}"]])
            for index, variable in enumerate(other.variables):
                variable.assign(arrays[f"{name}.{index}"])
        buffers = {name: values for name, values in arrays.items() if name.startswith("buffer.")}
        self._buffers.restore({name.removeprefix("buffer."): values for name, values in buffers.items()})
        if (flags := _flags(arrays, "trained")) is not None:
            flags.restore(self._model)
        self._graph_flags.resumed = _flags(arrays, "traced")
        self._ended = bool(arrays.get("ended", False))  # checkpoints of older versions lack it
        for callback, swapped in zip(self._swap_callbacks(), arrays.get("swapped", ()), strict=False):
            callback._ema_weights_in_model = bool(swapped)  # noqa: SLF001
        self._scale_lr(self._lr_scale / float(arrays["lr_scale"]))

    def _restore_checkpoint(self) -> None:
        """Restore the model and the callbacks, after hooks that the interrupted run has already called."""
        if self._checkpoint:
            self.restore(self._checkpoint)
            restore_callbacks(self._package.callbacks, arrays_from_bytes(self._checkpoint))
        self._graph_flags.begin()

    def _additional_optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """Return the optimizers of the model's own training step, by names that are equal on all ranks."""
        by_attribute = additional_optimizers(self._model).items()
        return {f"{name}.{index}": optimizer for name, values in by_attribute for index, optimizer in enumerate(values)}

    def _swap_callbacks(self) -> list[keras.callbacks.SwapEMAWeights]:
        """Return the callbacks that swap the weights and their moving averages, and record whether they are swapped."""
        return [
            callback for callback in self._package.callbacks if isinstance(callback, keras.callbacks.SwapEMAWeights)
        ]

    def _device(self) -> AbstractContextManager[None]:
        """Return a CPU scope if the backend would use a GPU by default although ``use_gpu`` is false."""
        if self._spec.use_gpu or keras.config.backend() != "torch":
            return nullcontext()
        on_cpu: AbstractContextManager[None] = keras.device("cpu")
        return on_cpu

    @_on_own_device
    def fit(self, train: BatchSource, val: BatchSource | None, hooks: TrainHooks) -> None:
        """Train from ``hooks.first_epoch`` to the last epoch, or until a hook or a callback stops it; collective."""
        optimizer = self._distributed_optimizer()
        ports, sample = (self._package.inputs, self._package.outputs), self._spec.sample
        data = BatchDataset(train, *ports, self._spec.backward_passes_per_step, sample)
        validation = None if val is None else BatchDataset(val, *ports, sample=sample)
        current = CurrentBatch()
        sync_layers = _sync_layers(self._model)
        self._weight_by_rows(optimizer, sync_layers, current)
        divide_over_ranks(self._model, current, accumulates=self._spec.backward_passes_per_step > 1)
        seeds = RandomStates(self._model, self._spec, session.current().world.rank, hooks)
        sums = getattr(optimizer, "_accumulated_gradients", ())  # exists if gradient_accumulation_steps is set
        checkpoint_callback = self._package.checkpoint_callback
        statistics = LayerStatistics(self._model, seeds.variables, self._buffers, sums)
        begin = EpochBeginCallback(data, validation, sync_layers, seeds, statistics, current, self._graph_flags, hooks)
        can_keep = self._spec.elastic and can_keep_state(self._model, statistics, self._package.callbacks)
        keep = partial(self._keep_state, seeds.variables, sum_function()) if can_keep else None
        after_callbacks = bool(self._package.callbacks) or checkpoint_callback is not None
        end = EpochEndCallback(begin, data, hooks, self, keep, after_callbacks=after_callbacks)
        saving = self._file_saving_callback(hooks)
        own = () if saving is None else saving.callbacks
        if checkpoint_callback is not None and checkpoint_callback.save_freq != "epoch":
            own = (EqualizeStatisticsCallback(begin), *own)
        callbacks = TrainingCallbackList(
            [begin, *self._package.callbacks, *own, end], self._model, self._restore_checkpoint, _last_logs(hooks)
        )
        callbacks.begin_fit(self._spec.epochs, len(data))
        self._leave_averages_to_end(optimizer)
        try:
            self._train(hooks, begin, end, callbacks)
            self._end(callbacks)
        finally:
            current.end()  # the functions of TensorFlow's graphs, which stay in memory, refer to it
            if saving is not None:
                saving.close()
            data.close()
            if validation is not None:
                validation.close()
        hooks.on_train_end(self)

    def _train(
        self, hooks: TrainHooks, begin: EpochBeginCallback, end: EpochEndCallback, callbacks: TrainingCallbackList
    ) -> None:
        """Train the rest of an interrupted epoch, if there is one, and then all further epochs."""
        data, first, batches_left = begin.data, hooks.first_epoch, hooks.first_epoch_batches
        if first < self._spec.epochs and (hooks.first_step or batches_left is not None):
            # Keras reads the number of batches per epoch once per fit(), and this epoch has fewer.
            data.begin_within(hooks.first_step, batches_left)
            before = hooks.first_step if batches_left is None else max(data.steps() - batches_left, 0)
            self._train_epochs(first, first + 1, begin, callbacks, before)
            data.begin_within(0, None)
            first = self._spec.epochs if end.ended else first + 1
        if first < self._spec.epochs:
            self._train_epochs(first, self._spec.epochs, begin, callbacks)

    def _train_epochs(
        self,
        first: int,
        last: int,
        begin: EpochBeginCallback,
        callbacks: TrainingCallbackList,
        batches_before: int | None = None,
    ) -> None:
        """Train the epochs from ``first`` to ``last``, exclusive; see ``TrainingCallbackList.begin_fit``."""
        begin.batches_before = batches_before or 0
        callbacks.begin_fit(self._spec.epochs, len(begin.data), batches_before)
        data = as_input_of_fit(begin.data)
        if keras.config.backend() == "tensorflow":
            create_metrics_before_training(self._model, data.element_spec)
        with _unwrapped_collective_errors():
            self._model.fit(
                data,
                validation_data=None if begin.validation is None else as_input_of_fit(begin.validation),
                initial_epoch=first,
                epochs=last,
                callbacks=callbacks,
                shuffle=False,
                verbose=0,
            )

    def _distributed_optimizer(self) -> keras.optimizers.Optimizer:
        """Return the model's optimizer, distributed and built, after all ranks have the same variables; collective."""
        optimizer = DistributedOptimizer(
            self._model.optimizer, sparse_as_dense=True, compression=self._package.gradient_compression()
        )
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        broadcast_variables([*self._model.variables, *optimizer.variables])
        return optimizer

    def _leave_averages_to_end(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Keep Keras from replacing weights with their averages after every ``fit``; ``_end`` replaces them instead."""
        object.__setattr__(optimizer, "finalize_variable_values", lambda _variables: None)
        for callback in self._swap_callbacks():  # it would replace the weights with their averages after the last epoch
            callback._finalize_ema_values = lambda: None  # noqa: SLF001

    def _weight_by_rows(
        self, optimizer: keras.optimizers.Optimizer, sync_layers: Sequence[keras.Layer], current: CurrentBatch
    ) -> None:
        """Weight gradients, and the rows of synchronized layers, by the rows that the ranks have in the batch."""
        passes = self._spec.backward_passes_per_step
        optimizer.weight_by(current.share, current.position if passes > 1 else None)
        for name, other in self._additional_optimizers().items():
            if isinstance(other, ExchangingOptimizer):
                other.exchange_as(name)
                other.weight_by(current.share_of_batch)
        for layer in sync_layers:
            layer.count_rows_if(current.has_rows)

    def _file_saving_callback(self, hooks: TrainHooks) -> CheckpointFilesCallback | None:
        """Return the callback that keeps the files of the user's checkpoint callback, on rank 0."""
        callback = self._package.checkpoint_callback
        if callback is None or session.current().world.rank != 0:
            return None
        return CheckpointFilesCallback(callback, hooks, self._spec.checkpoints, self._lr_scale)

    def export(self, folder: Path) -> None:
        """Write the model as after a complete ``model.fit``, with the user's unscaled learning rate."""
        package = self._package
        if not self._ended:
            self._average_weights()
        self._scale_lr(1.0 / self._lr_scale)
        try:
            artifact.save(folder, self._model, package.objects, package.inputs, package.outputs)
        finally:
            self._scale_lr(self._lr_scale)

    def _end(self, callbacks: TrainingCallbackList) -> None:
        """End the training in Keras' order: average the weights, then let callbacks restore the best ones."""
        if not callbacks.has_begun:  # no epoch is left
            if self._ended or not self._changes_at_end():
                return
            callbacks.on_train_begin()  # the run was interrupted after its last epoch
        self._average_weights()
        callbacks.end()
        self._ended = self._changes_at_end()

    def _changes_at_end(self) -> bool:
        """Return whether the model may change between the last epoch and the end of the training."""
        return self._model.optimizer.use_ema or any(map(changes_model_at_end, self._package.callbacks))

    def _average_weights(self) -> None:
        """Replace the weights with their moving averages, if the optimizer keeps them (``use_ema``)."""
        optimizer = self._model.optimizer
        if not (optimizer.use_ema and optimizer.built):
            return
        swapped = any(callback._ema_weights_in_model for callback in self._swap_callbacks())  # noqa: SLF001
        averages = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)  # noqa: SLF001
        for variable, average in averages:
            if average is not None:  # if they are swapped, the model already has the averages
                source, target = (variable, average) if swapped else (average, variable)
                target.assign(source)

    def _scale_lr(self, factor: float) -> None:
        if factor == 1.0:
            return
        optimizer = self._model.optimizer
        optimizer.learning_rate = float(value_of(optimizer.learning_rate)) * factor


def _last_logs(hooks: TrainHooks) -> dict[str, float]:
    """Return the logs of the last epoch before a resumed run, in the form that Keras' callbacks receive."""
    if not hooks.history:
        return {}
    last = hooks.history[-1]
    return {**last.train, **{f"val_{name}": value for name, value in last.validation.items()}}


def _flag_arrays(prefix: str, flags: Omissions) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the arrays of a checkpoint that record which layers and weights are trained."""
    return {
        f"{prefix} layers": np.array(flags.trained_layers, np.bool_),
        f"{prefix} weights": np.array(flags.trained, np.bool_),
    }


def _flags(arrays: Mapping[str, npt.NDArray[np.generic]], prefix: str) -> Omissions | None:
    """Return the flags in the arrays of a checkpoint; None if it has none."""
    if f"{prefix} layers" not in arrays:
        return None
    return Omissions(tuple(map(bool, arrays[f"{prefix} layers"])), tuple(map(bool, arrays[f"{prefix} weights"])))


def _variable_names(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """Return the names of an optimizer's variables without numbers, which depend on the process in automatic names."""
    return [_VARIABLE_NUMBER.sub("", variable.name) for variable in optimizer.variables]


def _check_variables(optimizer: keras.optimizers.Optimizer, saved: Sequence[str]) -> None:
    """Refuse a saved optimizer state with other variables, whose values would go to the wrong variables.

    Args:
        optimizer: the optimizer of this run.
        saved: ``_variable_names`` of the optimizer in the checkpoint; empty in checkpoints of older versions.

    Raises:
        ParamError: the variables differ; the message names one of them.
    """
    current = _variable_names(optimizer)
    if not saved or list(saved) == current:
        return
    lost, new = list(Counter(saved) - Counter(current)), list(Counter(current) - Counter(saved))
    if lost:
        difference = f"the optimizer in the checkpoint has a variable {lost[0]!r}, which this fit's optimizer lacks"
    elif new:
        difference = f"the optimizer in the checkpoint lacks the variable {new[0]!r} of this fit's optimizer"
    else:
        difference = "the optimizer in the checkpoint has its variables in another order than this fit's optimizer"
    raise ParamError(
        f"The run cannot resume from its checkpoint: {difference}. Create the optimizer with the arguments that the "
        "run began with (use_ema, amsgrad, momentum and the like), or choose another run_id to start a new run."
    )


def _unwrapped_collective_errors() -> AbstractContextManager[None]:
    """Return a context that raises errors of collectives unchanged, even from inside a graph of TensorFlow."""
    if keras.config.backend() != "tensorflow":
        return nullcontext()
    from sparkhvd.tensorflow.tensors import own_failures  # noqa: PLC0415  (only the backend in use is imported)

    return own_failures()


def prepare_devices(world: World, *, use_gpu: bool = True) -> None:
    """Assign the rank its own GPU if the backend has GPUs; TensorFlow then allocates memory on demand."""
    if keras.config.backend() == "torch":
        import torch  # noqa: PLC0415  (only the backend in use is imported)

        if use_gpu and torch.cuda.is_available():  # Keras uses torch's current device of the thread
            torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
        return
    if keras.config.backend() != "tensorflow":
        return
    import tensorflow as tf  # noqa: PLC0415

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and not use_gpu:
        tf.config.set_visible_devices([], "GPU")
    elif gpus:
        gpu = gpus[world.local_rank % len(gpus)]
        tf.config.set_visible_devices(gpu, "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)


def _sync_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a model that normalize over the rows of all ranks."""
    if keras.config.backend() != "tensorflow":
        return []
    from sparkhvd.tensorflow import SyncBatchNormalization  # noqa: PLC0415  (only the backend in use is imported)

    layers = model._flatten_layers(include_self=False)  # noqa: SLF001  (no public way to list nested layers)
    return [layer for layer in layers if isinstance(layer, SyncBatchNormalization)]
