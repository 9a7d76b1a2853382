"""The estimators' plug-in for Keras 3.

Keras chooses its backend once per process, when it is imported. Therefore this module imports Keras only inside
functions, after the backend is known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from sparkhvd._util.counts import counted
from sparkhvd._util.frameworks import estimator_hint
from sparkhvd.config import export
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.errors import ConfigError, ModelOutputError, ParamError, SparkHvdError
from sparkhvd.estimators.batch_dependence import BatchDependence
from sparkhvd.estimators.keras.inputs import Ports, own_outputs, plan_inputs, plan_outputs
from sparkhvd.estimators.keras.serialization import artifact
from sparkhvd.estimators.keras.serialization.canonical import AUTOMATIC_NUMBER, adapted_values
from sparkhvd.estimators.keras.serialization.omissions import Omissions, lora_weights
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.params.policies import check_monitored, monitored_metrics
from sparkhvd.estimators.plugin import ON_CPU, Inference, Predicted, TrainSpec, typed_params
from sparkhvd.estimators.runs.resume_check import ModelFacts
from sparkhvd.estimators.training.synthetic_rows import try_synthetic_rows
from sparkhvd.estimators.training.user_errors import describe_error, is_tensor_error, with_full_stop
from sparkhvd.world import World

if TYPE_CHECKING:
    import keras

    from sparkhvd.estimators.keras.serialization.package import Named, Package
    from sparkhvd.estimators.keras.trainer import KerasTrainer

# Both divide by the number of rows. "mean_with_sample_weight" divides by the sum of the weights.
_MEAN_REDUCTIONS = ("sum_over_batch_size", "mean")


@dataclass(frozen=True)
class KerasParams:
    """The parameters of ``KerasEstimator`` that the plug-in needs with their types."""

    model: keras.Model
    input_shapes: Sequence[Sequence[int]] | None
    label_shapes: Sequence[Sequence[int]] | None
    inputs: Mapping[str, NamedInput] | None
    custom_objects: Mapping[str, Named] | None
    schema: DataSchema


class KerasPlugin:
    """Trains ``keras.Model``s."""

    takes_texts = True

    def check(self, params: Mapping[str, object], schema: DataSchema, rows: Arrays | None) -> list[tuple[int, ...]]:
        """See ``FrameworkPlugin.check``; runs a copy of the model.

        Raises:
            ParamError: a parameter has the wrong type, or the objects cannot be sent to the ranks.
            ModelOutputError: the model cannot take such rows, or its output does not match the labels.
        """
        package = _unpack(self.pack({**params, "schema": schema}))
        if rows is not None:
            return _try_out(package, schema, rows, params)
        if any(column.shape is None for column in schema.columns):
            return []
        return try_synthetic_rows(schema, lambda synthetic_rows: _try_out(package, schema, synthetic_rows, params))

    def try_out(self, payload: bytes, schema: DataSchema, rows: Arrays) -> list[tuple[int, ...]]:
        """See ``FrameworkPlugin.try_out``.

        Raises:
            ModelOutputError: the model cannot take such rows, or its output does not match the labels.
        """
        return _try_out(_unpack(payload), schema, rows)

    def pack(self, params: Mapping[str, object]) -> bytes:
        """Serialize everything that the ranks need."""
        return _package(params).dumps()

    def facts(self, params: Mapping[str, object]) -> ModelFacts:
        """See ``FrameworkPlugin.facts``; removes the numbers of automatic names, which depend on the process."""
        model = _built_model(params["model"])
        names = [AUTOMATIC_NUMBER.sub("", variable.path) for variable in model.weights]
        numbered = [f"{index}: {name}" for index, name in enumerate(names)]
        shapes = [tuple(variable.shape) for variable in model.weights]
        dtypes = [str(variable.dtype) for variable in model.weights]
        name_by_id = {id(variable): name for variable, name in zip(model.weights, numbered, strict=True)}
        trained = tuple(name_by_id.get(id(variable), "") for variable in model.trainable_variables)
        optimizer = type(_optimizer(params, model)).__name__
        shape_by_name = dict(zip(numbered, shapes, strict=True))
        dtype_by_name = dict(zip(numbered, dtypes, strict=True))
        adapted = adapted_values(model)
        return ModelFacts("Keras", optimizer, shape_by_name, (trained,), dtypes=dtype_by_name, adapted=adapted)

    def monitors(self, params: Mapping[str, object]) -> Mapping[str, str]:
        """See ``FrameworkPlugin.monitors``; names ``checkpoint_callback`` if ``checkpoints`` was derived from it."""
        renamed = {} if params.get("checkpoint_callback") is None else {"checkpoints": "checkpoint_callback"}
        return {renamed.get(name, name): monitor for name, monitor in monitored_metrics(params).items()}

    def batch_dependence(self, params: Mapping[str, object]) -> BatchDependence:
        """See ``FrameworkPlugin.batch_dependence``; Keras' layers can train on single rows."""
        import keras  # noqa: PLC0415

        layers = _built_model(params["model"])._flatten_layers(include_self=False)  # noqa: SLF001  (no public way to list nested layers)
        normalizing = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]
        local = tuple(layer.name for layer in normalizing if type(layer).__name__ != "SyncBatchNormalization")
        losses = tuple(loss.name for loss in keras.tree.flatten(params["loss"]) if _relates_rows(loss))
        return BatchDependence(local, "sparkhvd.tensorflow.SyncBatchNormalization (TensorFlow backend)", losses=losses)

    def packages(self) -> tuple[str, ...]:
        """See ``FrameworkPlugin.packages``."""
        import keras  # noqa: PLC0415

        return ("keras", keras.config.backend())

    def trainer(self, payload: bytes, spec: TrainSpec, world: World) -> KerasTrainer:
        """Return the trainer of one rank."""
        from sparkhvd.estimators.keras.trainer import KerasTrainer  # noqa: PLC0415

        return KerasTrainer(_unpack(payload), spec, world)

    def export(self, params: Mapping[str, object], schema: DataSchema, folder: Path) -> None:
        """Write the model of ``params`` into ``folder``.

        Raises:
            ParamError: the model is not a Keras model or is not built, or the columns do not fit its inputs.
        """
        from sparkhvd.estimators.keras.serialization.package import custom_objects_of  # noqa: PLC0415

        model = _built_model(params["model"])
        inputs = _inputs(params, schema)
        outputs = _outputs(params, schema)
        objects = custom_objects_of(model, typed_params(KerasParams, params).custom_objects)
        artifact.save(folder, model, objects, inputs, outputs)

    def predictor(self, folder: Path, inference: Inference = ON_CPU) -> KerasPredictor:
        """Load the model that ``KerasTrainer.export`` wrote, on the GPU of ``inference`` if it has one."""
        use_backend(artifact.load_backend(folder))
        inputs, outputs = artifact.load_ports(folder)
        device_scope = _device_scope(inference.gpu)
        with device_scope():
            model = artifact.load_model(folder, compiled=False)
        settings = artifact.load_settings(folder)
        return KerasPredictor(model, inputs, outputs, device_scope, inference.function, settings.applied)

    def mapping(self, params: Mapping[str, object], schema: DataSchema) -> str:
        """Describe the mapping of columns to inputs and outputs, for the log."""
        inputs = _inputs(params, schema)
        outputs = _outputs(params, schema)
        return f"inputs: {inputs}; outputs: {outputs}"


@dataclass(frozen=True)
class KerasPredictor:
    """A trained model, ready for batches."""

    model: keras.Model
    inputs: Ports
    outputs: Ports
    device_scope: Callable[[], AbstractContextManager[object]] = nullcontext
    function: Callable[..., object] | None = None
    settings: Callable[[], AbstractContextManager[object]] = nullcontext

    def predict(self, columns: Arrays) -> list[Predicted]:
        """Return one array per output, or one per field of an output, with the rows in the first dimension."""
        with self.settings():
            return self._predict(columns)

    def _predict(self, columns: Arrays) -> list[Predicted]:
        rows = len(next(iter(columns.values())))
        inputs = self.inputs.arrays(columns, rows)
        with self.device_scope():
            if self.function is None:
                predicted = self.outputs.flat(self.model.predict_on_batch(inputs))
                return [_array(output) for output in self.outputs.by_label(predicted)]
            result = self.function(self.model, inputs)
            outputs = list(result) if isinstance(result, tuple | list) else [result]
            return [
                {name: _array(value) for name, value in out.items()} if isinstance(out, Mapping) else _array(out)
                for out in outputs
            ]


def _array(value: keras.KerasTensor) -> npt.NDArray[np.generic]:
    if isinstance(value, np.ndarray):
        return value
    import keras  # noqa: PLC0415

    return np.asarray(keras.ops.convert_to_numpy(value))


def _device_scope(gpu: int | None) -> Callable[[], AbstractContextManager[object]]:
    """Return a function that creates the device scope for a model.

    Without the scope, TensorFlow would reserve all memory of every visible GPU, and torch would place the models of all
    processes on the first GPU.
    """
    import keras  # noqa: PLC0415

    if keras.config.backend() == "torch":
        import torch  # noqa: PLC0415  (only the backend in use is imported)

        has_gpu = gpu is not None and gpu < torch.cuda.device_count()
        return partial(keras.device, f"gpu:{gpu}" if has_gpu else "cpu")
    if keras.config.backend() != "tensorflow":
        return nullcontext  # the backend chooses the device
    import tensorflow as tf  # noqa: PLC0415

    gpus = tf.config.list_physical_devices("GPU")
    with suppress(RuntimeError):  # an earlier model of this process has already initialized TensorFlow
        for device in gpus:
            tf.config.experimental.set_memory_growth(device, True)
    return partial(tf.device, "CPU:0" if gpu is None or gpu >= len(gpus) else f"GPU:{gpu}")


PLUGIN = KerasPlugin()


def use_backend(name: str) -> None:
    """Set the Keras backend of this process.

    Raises:
        ConfigError: Keras is already imported with another backend.
    """
    if "keras" not in sys.modules:
        export({"KERAS_BACKEND": name})
        return
    import keras  # noqa: PLC0415

    if keras.config.backend() != name:
        raise ConfigError(
            f"This process runs Keras on {keras.config.backend()!r}, but the model was trained on {name!r}. Set "
            f"KERAS_BACKEND={name} before keras is imported, on the executors too (spark.executorEnv.KERAS_BACKEND)."
        )


def _package(params: Mapping[str, Any]) -> Package:
    import keras  # noqa: PLC0415

    from sparkhvd.estimators.keras.losses.names import check_names  # noqa: PLC0415
    from sparkhvd.estimators.keras.serialization.package import (  # noqa: PLC0415
        Package,
        check_configs,
        custom_objects_of,
        model_to_bytes,
        to_configs,
    )
    from sparkhvd.keras.exchange import supported_backend  # noqa: PLC0415
    from sparkhvd.keras.optimizer import reject_multi_optimizer  # noqa: PLC0415

    supported_backend()  # raises an error before the ranks start
    model = _built_model(params["model"])
    check_names(params["optimizer"], params["loss"], params["metrics"])
    optimizer = _optimizer(params, model)
    reject_multi_optimizer(optimizer)
    _reject_foreign_losses(params["loss"])
    _reject_other_reductions(params["loss"], weighted=params.get("sample_weight_col") is not None)
    _check_callbacks(params["callbacks"] or ())
    _reject_loss_scaling(model, optimizer)
    _reject_stateful_layers(model)
    _check_rate_and_accumulation(params, optimizer)
    own = typed_params(KerasParams, params)
    schema = own.schema
    # If a transformation_fn turns text into numbers, the ranks plan the inputs after they have called it.
    is_deferred = params.get("transformation_fn") is not None and not all(column.is_number for column in schema.columns)
    unknown = Ports((), "single")
    used = [optimizer, params["loss"], params["metrics"]]
    objects = custom_objects_of(model, params["custom_objects"], used)
    check_configs(used, objects)
    return Package(
        model=model_to_bytes(model),
        objects=objects,
        optimizer=to_configs(optimizer),
        loss=to_configs(params["loss"]),
        loss_weights=_loss_weights(params["loss_weights"]),
        metrics=to_configs(params["metrics"]) or None,
        inputs=unknown if is_deferred else _inputs(params, schema),
        outputs=unknown if is_deferred else plan_outputs(model, schema.of("label"), own.label_shapes),
        callbacks=tuple(params["callbacks"] or ()),
        checkpoint_callback=params.get("checkpoint_callback"),
        input_shapes=own.input_shapes,
        named_inputs=own.inputs,
        label_shapes=own.label_shapes,
        compression=params.get("gradient_compression"),
        omissions=Omissions.of(model, optimizer),
        lora=tuple(keras.ops.convert_to_numpy(weight) for weight in chain(*lora_weights(model))),
    )


def _check_callbacks(callbacks: Sequence[object]) -> None:
    import keras  # noqa: PLC0415

    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ParamError(
                f"callbacks holds a {type(callback).__name__}; each callback of KerasEstimator must be a "
                "keras.callbacks.Callback."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ParamError(
                "callbacks holds a BackupAndRestore. Every rank would write its own backup and resume from it, and "
                "might skip epochs. Leave it out; with store and run_id, fit itself resumes."
            )


def _reject_loss_scaling(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    import keras  # noqa: PLC0415

    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or model.dtype_policy.name == "mixed_float16":
        raise ParamError(
            "KerasEstimator does not support loss scaling, which 'mixed_float16' requires. Build the model under "
            "'mixed_bfloat16', which needs no loss scaling."
        )


def _check_rate_and_accumulation(params: Mapping[str, Any], optimizer: keras.optimizers.Optimizer) -> None:
    """Check ``scale_lr`` and ``backward_passes_per_step``, which not every optimizer allows."""
    import keras  # noqa: PLC0415

    if params.get("scale_lr") and not isinstance(optimizer._learning_rate, keras.Variable):  # noqa: SLF001
        raise ParamError(
            "scale_lr=True needs a constant learning rate, but the optimizer has a learning rate schedule or function. "
            "Scale the rates there instead."
        )
    passes, accumulated = params.get("backward_passes_per_step", 1), optimizer.gradient_accumulation_steps
    if passes != 1 and accumulated:
        raise ParamError(
            f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps={accumulated} both "
            "accumulate gradients; set only one of them."
        )


def _loss_weights(weights: object) -> object:
    """Return the weights as ``model.compile`` takes them: a number, a list, or a dict by output."""
    return list(weights) if isinstance(weights, Sequence) else weights


def _optimizer(params: Mapping[str, Any], model: keras.Model) -> keras.optimizers.Optimizer:
    import keras  # noqa: PLC0415

    optimizer = params["optimizer"] or getattr(model, "optimizer", None)
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ParamError(
            "KerasEstimator needs optimizer: an instance such as keras.optimizers.Adam(), or its name."
            f"{estimator_hint(optimizer, ('keras',))}"
        )
    return optimizer


def _reject_foreign_losses(losses: object) -> None:
    import keras  # noqa: PLC0415

    backend = keras.config.backend()
    for loss in keras.tree.flatten(losses):
        if hint := estimator_hint(loss, ("keras", backend)):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise ParamError(f"The loss {name} does not compute with the tensors of Keras on {backend}.{hint}")


def _reject_stateful_layers(model: keras.Model) -> None:
    import keras  # noqa: PLC0415

    layers = model._flatten_layers(include_self=False)  # noqa: SLF001  (no public way to list nested layers)
    stateful = [layer.name for layer in layers if isinstance(layer, keras.layers.RNN) and layer.stateful]
    if stateful:
        raise ParamError(
            f"stateful=True is not supported ({', '.join(stateful)}): a row would continue from the state of any other "
            "row, because rows are shuffled and divided among the ranks. Set stateful=False, and put a whole sequence "
            "into each row."
        )


def _relates_rows(loss: object) -> bool:
    """Return whether a loss of Keras relates the rows of a batch to each other."""
    import keras  # noqa: PLC0415

    if isinstance(loss, keras.losses.Dice | keras.losses.Tversky):
        return getattr(loss, "axis", None) is None  # Tversky has no axis before Keras 3.6
    circle = getattr(keras.losses, "Circle", None)  # since Keras 3.7
    return circle is not None and isinstance(loss, circle)


def _reject_other_reductions(losses: object, *, weighted: bool) -> None:
    import keras  # noqa: PLC0415

    means = _MEAN_REDUCTIONS if weighted else (*_MEAN_REDUCTIONS, "mean_with_sample_weight")
    for loss in keras.tree.flatten(losses):
        if isinstance(loss, keras.losses.Loss) and loss.reduction not in means:
            raise ParamError(
                f"The loss {loss.name} has reduction={loss.reduction!r}; it must be 'sum_over_batch_size', because a "
                "rank's gradient is weighted by its share of the rows."
            )


def _built_model(model: object) -> keras.Model:
    import keras  # noqa: PLC0415

    if not isinstance(model, keras.Model):
        hint = estimator_hint(model, ("keras",))
        raise ParamError(f"model is a {type(model).__name__}; it must be a keras.Model.{hint}")
    if not model.built:
        raise ParamError(
            "The model is not built, so it has no weights to send to the ranks. Call it once on a few rows, or add a "
            "keras.Input."
        )
    return model


def _unpack(payload: bytes) -> Package:
    package: Package = cloudpickle.loads(payload)
    return package


def _inputs(params: Mapping[str, object], schema: DataSchema) -> Ports:
    own = typed_params(KerasParams, params)
    return plan_inputs(own.model, schema.of("feature"), own.input_shapes, own.inputs)


def _outputs(params: Mapping[str, object], schema: DataSchema) -> Ports:
    labels = schema.of("label")
    if not labels:
        return own_outputs(params["model"])
    return plan_outputs(params["model"], labels, typed_params(KerasParams, params).label_shapes)


def _try_out(
    package: Package, schema: DataSchema, sample: Arrays, params: Mapping[str, object] | None = None
) -> list[tuple[int, ...]]:
    from sparkhvd.estimators.keras.losses.divisors import CurrentBatch, divide_over_ranks  # noqa: PLC0415  (imports Keras)

    model = _rebuilt_model(package)
    package = package.with_ports_for(model, schema)
    features, predicted = _predict(package, model, sample)
    outputs = package.outputs.flat(predicted)
    rows = len(next(iter(sample.values())))
    if any(rows in output.shape[1:] for output in outputs):  # labels of another shape may fit this number of rows
        one_more = {name: np.append(values, values[:1], axis=0) for name, values in sample.items()}
        return _try_out(package, schema, one_more, params)
    targets = package.outputs.arrays(sample, rows)
    try:
        targets = _tensors(targets)  # user-defined losses and metrics receive tensors in training, too
        ones = package.outputs.arranged([np.ones(rows, np.float32)] * len(package.outputs.ports))
        weights = {"sample_weight": _tensors(ones)} if schema.of("weight") else {}
        accumulates = params is not None and params.get("backward_passes_per_step") not in {None, 1}
        divide_over_ranks(model, CurrentBatch(), accumulates=accumulates)  # as in training
        model.compute_loss(features, targets, predicted, **weights)
        metrics = model.compute_metrics(features, targets, predicted)
    except SparkHvdError:
        raise
    except Exception as error:
        compared = (
            f"the model's outputs {_dtypes_and_shapes(outputs)} with the labels "
            f"{_dtypes_and_shapes(package.outputs.flat(targets))} ({package.outputs})"
        )
        if not is_tensor_error(error):
            raise ModelOutputError(
                f"The loss or a metric raised {describe_error(error)} It was called to compare {compared}."
            ) from error
        raise ModelOutputError(
            f"The loss or a metric cannot compare {compared}: {type(error).__name__}: {with_full_stop(error)} "
            f"{_remedy(outputs, package.outputs.flat(targets))}"
        ) from error
    _check_scalar(metrics)
    if params is not None and not _has_own_steps(model):
        check_monitored(PLUGIN.monitors(params), metrics)
    return [tuple(output.shape[1:]) for output in package.outputs.by_label(outputs)]


def _predict(package: Package, model: keras.Model, sample: Arrays) -> tuple[Any, Any]:
    """Return the features and the outputs of a model for sample rows.

    Raises:
        ModelOutputError: the model rejects the rows, or an output has another number of rows.
    """
    rows = len(next(iter(sample.values())))
    try:
        features = package.inputs.arrays(sample, rows)
        predicted = model(features, training=False)
        outputs = package.outputs.flat(predicted)
    except ModelOutputError:
        raise
    except Exception as error:
        columns = {name: sample[name] for port in package.inputs.ports for name in port.columns}
        called = f"{_dtypes_and_shapes(columns.values())} for {counted(rows, 'row')}; inputs: {package.inputs}"
        if not is_tensor_error(error):
            raise ModelOutputError(f"The model raised {describe_error(error)} It was called with {called}.") from error
        raise ModelOutputError(
            f"The model cannot take the feature columns ({called}): {type(error).__name__}: {with_full_stop(error)} "
            "Set input_shapes if the columns need another shape."
        ) from error
    for port, output in zip(package.outputs.ports, outputs, strict=True):
        if len(output.shape) == 0 or output.shape[0] != rows:
            raise ModelOutputError(
                f"Output {port.name!r} has shape {list(output.shape)} for {counted(rows, 'row')}; its first dimension "
                "must be the number of rows."
            )
    return features, predicted


def _tensors(arrays: object) -> Any:
    import keras  # noqa: PLC0415

    return keras.tree.map_structure(keras.ops.convert_to_tensor, arrays)


def _remedy(outputs: Sequence[keras.KerasTensor], targets: Sequence[keras.KerasTensor]) -> str:
    """Return the advice for outputs that do not match their labels."""
    for output, target in zip(outputs, targets, strict=True):
        numbers = np.asarray(target)
        classes = output.shape[-1]
        if numbers.dtype.kind in "iu" and numbers.size == len(numbers) and classes > 1:
            if not 0 <= numbers.min() <= numbers.max() < classes:
                return (
                    f"{classes} outputs stand for the classes 0 to {classes - 1}; number the labels accordingly, or "
                    "add outputs."
                )
            return (
                "Labels that are class numbers need loss='sparse_categorical_crossentropy', and sparse metrics "
                "(SparseCategoricalAccuracy, or 'accuracy'); other losses and metrics take one number per class."
            )
    return "Change the model's last layer, label_cols or label_shapes so that they match."


def _rebuilt_model(package: Package) -> keras.Model:
    """Build the model as the ranks do.

    Raises:
        ParamError: Keras cannot rebuild one of the objects; the message says what to change.
    """
    try:
        return package.build()
    except TypeError as error:  # the type that Keras raises for any error in a from_config()
        raise ParamError(
            "The ranks rebuild the model, its optimizer, loss and metrics from get_config(), and one of them cannot be "
            f"rebuilt: {with_full_stop(error)} The constructor of your own class must accept everything that its "
            "get_config() returns, including the arguments of its base class (name, dtype)."
        ) from error


def _check_scalar(metrics: Mapping[str, keras.KerasTensor]) -> None:
    import keras  # noqa: PLC0415

    for name, value in metrics.items():
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if array.size != 1:
            raise ParamError(
                f"The metric {name!r} returns an array of shape {list(array.shape)}, but an epoch reports one "
                "number per metric. Average the values in the metric, as F1Score(average='macro') does, or use one "
                "metric per value."
            )


def _has_own_steps(model: keras.Model) -> bool:
    """Return whether the user wrote the training or test step, which may then report any metrics."""
    import keras  # noqa: PLC0415

    # The steps of the backend belong to a base class of keras.Model.
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in ("train_step", "test_step"))


def _dtypes_and_shapes(values: Iterable[keras.KerasTensor]) -> str:
    return ", ".join(f"{value.dtype}{list(value.shape)}" for value in values)
