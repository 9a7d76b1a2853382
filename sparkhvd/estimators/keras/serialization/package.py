"""Serialization of the user's Keras objects for another process with the same backend."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
import keras
import numpy as np
import numpy.typing as npt

import sparkhvd.keras as hvd
from sparkhvd.config import scratch_folder
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.inputs import Ports, plan_inputs, plan_outputs
from sparkhvd.estimators.keras.serialization.omissions import (
    Omissions,
    function_arguments,
    initialize_lora,
    is_written_by_user,
    leaves,
    lora_weights,
    vocabularies_in_configs,
)
from sparkhvd.estimators.keras.settings import KerasSettings
from sparkhvd.estimators.params.named_inputs import NamedInput
from sparkhvd.estimators.training.user_errors import pickling
from sparkhvd.keras.optimizer import ExchangingOptimizer

_CONFIGURABLE = (
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)


Named = type | FunctionType  # a class or a function that a file refers to by its name


@dataclass(frozen=True)
class Configured:
    """The configuration of a Keras object, the values of its variables, and settings that the configuration omits.

    Attributes:
        config: the configuration as Keras serializes it.
        variables: the values of an optimizer's variables.
        dtype: the dtype of a loss.
        arguments: the arguments of a loss's or a metric's function.
    """

    config: dict[str, object]
    variables: tuple[npt.NDArray[np.generic], ...] = ()
    dtype: str | None = None
    arguments: dict[str, object] | None = None


@dataclass(frozen=True)
class Package:
    """The model and the settings that a rank trains with; the model is in Keras' own file format.

    Attributes:
        model: the content of a ``.keras`` file.
        objects: classes and functions, by the names that the file uses.
        optimizer: the optimizer, with its state.
        loss: the ``loss`` of ``compile``, with Keras objects as ``Configured``.
        loss_weights: the ``loss_weights`` of ``compile``.
        metrics: the ``metrics`` of ``compile``, with Keras objects as ``Configured``.
        callbacks: the user's callbacks.
        checkpoint_callback: the callback that only rank 0 runs, after ``callbacks``.
        inputs: maps columns to inputs.
        outputs: maps columns to targets.
        input_shapes: the user's ``input_shapes``, for columns that are known later.
        named_inputs: the user's ``inputs``, for columns that are known later.
        label_shapes: the user's ``label_shapes``, for columns that are known later.
        compression: compresses gradients for transfer: a name, or a member of ``hvd.Compression``.
        omissions: the properties that the files of the model and the optimizer omit.
        settings: the settings of the driver's Keras.
        lora: the values of ``lora_weights``, which the file of the model has merged.
    """

    model: bytes
    objects: dict[str, Named]
    optimizer: Configured
    loss: object
    loss_weights: object
    metrics: object
    inputs: Ports
    outputs: Ports
    callbacks: tuple[keras.callbacks.Callback, ...] = ()
    checkpoint_callback: keras.callbacks.ModelCheckpoint | None = None
    compression: object = None
    input_shapes: Sequence[Sequence[int]] | None = None
    named_inputs: Mapping[str, NamedInput] | None = None
    label_shapes: Sequence[Sequence[int]] | None = None
    omissions: Omissions = field(default_factory=Omissions)
    settings: KerasSettings = field(default_factory=KerasSettings.current)
    lora: tuple[npt.NDArray[np.generic], ...] = ()

    def dumps(self) -> bytes:
        """Serialize the package.

        Raises:
            ParamError: the package holds an object that cannot be pickled.
        """
        with pickling("The loss, metrics, callbacks or custom objects"):
            return dumps(self)

    def with_ports_for(self, model: keras.Model, schema: DataSchema) -> Package:
        """Return the package with inputs and outputs for the columns of ``schema``."""
        return replace(
            self,
            inputs=plan_inputs(model, schema.of("feature"), self.input_shapes, self.named_inputs),
            outputs=plan_outputs(model, schema.of("label"), self.label_shapes),
        )

    def gradient_compression(self) -> object:
        """Return the ``compression`` argument of ``DistributedOptimizer``."""
        if not isinstance(self.compression, str):
            return self.compression
        return None if self.compression == "none" else getattr(hvd.Compression, self.compression)

    def build(self) -> keras.Model:
        """Return the model with its optimizer, compiled; applies the settings to this process."""
        self.settings.apply()
        register_names(self.objects)
        model = model_from_bytes(self.model, self.objects)
        self.omissions.restore(model)
        if self.lora:
            for weight, value in zip(chain(*lora_weights(model)), self.lora, strict=True):
                weight.assign(value)
            initialize_lora(model)  # the user may have loaded the model from a file
        with keras.saving.custom_object_scope(self.objects):
            optimizer = from_configs(self.optimizer)
            loss, metrics = from_configs(self.loss), from_configs(self.metrics)
        self.omissions.restore_decay(optimizer, model)
        if model.built and self.optimizer.variables:
            optimizer.build(model.trainable_variables)
            for variable, value in zip(optimizer.variables, self.optimizer.variables, strict=True):
                variable.assign(value)
        model.compile(
            optimizer=optimizer, loss=loss, loss_weights=self.loss_weights, metrics=metrics, jit_compile=False
        )
        return model


def reject_own_optimizers(model: keras.Model) -> None:
    """Reject optimizers of a user-defined ``train_step`` that would apply the gradients of one rank only.

    Raises:
        ParamError: the model has such optimizers, for example of two networks that train against each other.
    """
    if type(model).train_step is keras.Model.train_step:
        return
    by_attribute = additional_optimizers(model)
    unwrapped = [
        name
        for name, optimizers in by_attribute.items()
        if not all(isinstance(optimizer, ExchangingOptimizer) for optimizer in optimizers)
    ]
    if unwrapped:
        raise ParamError(
            f"The model has optimizers of its own ({', '.join(unwrapped)}), which would train every rank's weights "
            "with that rank's gradients alone. Wrap each of them where the model creates it: "
            "sparkhvd.keras.DistributedOptimizer(keras.optimizers.Adam())."
        )


def additional_optimizers(model: keras.Model) -> dict[str, list[keras.optimizers.Optimizer]]:
    """Return the optimizers in a model's attributes, by attribute, except the optimizer of ``compile``."""
    # TensorFlow stores every attribute a second time, under a name with this prefix.
    attributes = {name: value for name, value in vars(model).items() if not name.startswith("_self_")}
    by_attribute = {
        name: [x for x in leaves(value) if isinstance(x, keras.optimizers.Optimizer) and x is not model.optimizer]
        for name, value in attributes.items()
    }
    return {name: optimizers for name, optimizers in by_attribute.items() if optimizers}


def model_to_bytes(model: keras.Model) -> bytes:
    """Return a model as the content of a ``.keras`` file, without its compile settings."""
    with tempfile.TemporaryDirectory(prefix="sparkhvd-keras-", dir=scratch_folder()) as folder:
        path = Path(folder, "model.keras")
        with vocabularies_in_configs(model):
            keras.saving.save_model(model, path)
        return path.read_bytes()


def model_from_bytes(content: bytes, objects: Mapping[str, Named]) -> keras.Model:
    """Load a model of ``model_to_bytes`` uncompiled. This runs code from Lambda layers: load trusted content only."""
    with tempfile.TemporaryDirectory(prefix="sparkhvd-keras-", dir=scratch_folder()) as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(content)
        return load(path, objects, compiled=False)


def load(
    path: Path, objects: Mapping[str, Named], omissions: Omissions | None = None, *, compiled: bool
) -> keras.Model:
    """Load the model of a ``.keras`` file; ``objects`` take precedence over objects registered in this process.

    This runs code from Lambda layers: load trusted files only.
    """
    with keras.saving.custom_object_scope(dict(objects)), warnings.catch_warnings():
        # Keras skips the state of an optimizer that does not train the frozen variables; the state is loaded below.
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer", UserWarning)
        model = keras.saving.load_model(path, compile=compiled, safe_mode=False)
        if omissions is not None:
            _restore_omissions(model, path, omissions, compiled=compiled)
        initialize_lora(model)
        return model


def _restore_omissions(model: keras.Model, path: Path, omissions: Omissions, *, compiled: bool) -> None:
    trained = len(model.trainable_variables)
    omissions.restore(model)
    optimizer = getattr(model, "optimizer", None) if compiled else None
    if compiled:
        omissions.restore_functions(model)
    if optimizer is None:
        return
    if len(model.trainable_variables) != trained:
        optimizer = model.optimizer = type(optimizer).from_config(optimizer.get_config())
        optimizer.build(model.trainable_variables)
        model.load_weights(path)
    omissions.restore_decay(optimizer, model)


def custom_objects_of(
    model: keras.Model, custom_objects: Mapping[str, Named] | None, used: Sequence[object] = ()
) -> dict[str, Named]:
    """Return the classes and functions that a saved model refers to by name and that Keras does not know.

    Args:
        model: the model, whose layers are searched.
        custom_objects: the user's ``custom_objects``, which Keras looks up by name, too.
        used: losses, metrics and optimizers, possibly in lists and dicts.

    Raises:
        ParamError: two different objects have the same name.
    """
    objects = dict(custom_objects or {})
    layers = [model, *model._flatten_layers(include_self=False)]  # noqa: SLF001  (no public way to list nested layers)
    used_objects = _with_schedules(used)
    classes: list[Named] = [*map(type, layers), *(type(obj) for obj in used_objects if isinstance(obj, _CONFIGURABLE))]
    functions = [obj for obj in used_objects if isinstance(obj, FunctionType)]
    in_layers = [value for layer in layers for value in vars(layer).values() if isinstance(value, FunctionType)]
    # Most functions of a layer are not part of its configuration; the user must pass those that are.
    functions += [function for function in in_layers if keras.saving.get_registered_name(function) in objects]
    for obj in (*classes, *functions):
        _add(objects, obj)
    return objects


def _add(objects: dict[str, Named], obj: Named) -> None:
    if obj.__module__.startswith(("keras.", "keras_hub.")) or obj.__name__ == "<lambda>":
        return
    name = keras.saving.get_registered_name(obj)
    known = objects.setdefault(name, obj)
    if known is not obj:
        kind, remedy = ("classes", "one of the classes") if isinstance(obj, type) else ("functions", "one of them")
        raise ParamError(
            f"The name {name!r} stands for two different {kind}, {_full_name(known)} and {_full_name(obj)}. A saved "
            f"Keras model refers to them by name, so one would replace the other. Rename {remedy}, or register both "
            "under different packages with @keras.saving.register_keras_serializable(package=...)."
        )


def check_configs(used: Sequence[object], objects: Mapping[str, Named]) -> None:
    """Check that losses, metrics, optimizers and schedules keep all arguments of their constructors when rebuilt.

    Raises:
        ParamError: a user-written class has a ``get_config`` that omits one, so the ranks would train with its default;
            or Keras cannot rebuild one of its own objects.
    """
    for obj in _with_schedules(used):
        if not isinstance(obj, _CONFIGURABLE):
            continue
        if _holds_tensor(keras.saving.serialize_keras_object(obj)):
            raise ParamError(
                f"{_full_name(type(obj))} cannot be rebuilt on the ranks: its get_config() contains a tensor, which "
                "Keras does not convert back (for AUC, label_weights). Leave the argument out, or define a subclass "
                "whose get_config() returns a list."
            )
        if not is_written_by_user(obj):
            continue
        config = obj.get_config()
        omitted = [name for name in inspect.signature(type(obj)).parameters if name in vars(obj) and name not in config]
        if not omitted:
            continue
        try:
            with keras.saving.custom_object_scope(dict(objects)):
                rebuilt = type(obj).from_config(config)
        except Exception:  # noqa: BLE001, S112  (building the model reports it)
            continue
        for name in omitted:
            if not _are_equal(vars(obj)[name], vars(rebuilt).get(name)):
                raise ParamError(
                    f"{_full_name(type(obj))} has {name}={vars(obj)[name]!r}, but its get_config() does not return "
                    f"{name!r}, so the ranks would rebuild it with {name}={vars(rebuilt).get(name)!r}. Define "
                    f"get_config() to return {{**super().get_config(), {name!r}: self.{name}}}."
                )


def _holds_tensor(config: object) -> bool:
    if isinstance(config, Mapping):
        return config.get("class_name") == "__tensor__" or any(map(_holds_tensor, config.values()))
    return isinstance(config, list | tuple) and any(map(_holds_tensor, config))


def _are_equal(first: object, second: object) -> bool:
    try:
        return np.array_equal(np.asarray(first), np.asarray(second))
    except Exception:  # noqa: BLE001  (such values cannot be compared)
        return False


def _with_schedules(used: Sequence[object]) -> list[Any]:
    """Return the objects in nested lists and dicts, and the learning rate schedules and functions of optimizers."""
    nested_objects = leaves(list(used))
    rates = [getattr(obj, "_learning_rate", None) for obj in nested_objects]
    return [*nested_objects, *(rate for rate in rates if isinstance(rate, (*_CONFIGURABLE, FunctionType)))]


def _full_name(obj: object) -> str:
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', repr(obj))}"


def register_names(objects: Mapping[str, Named]) -> None:
    """Register unpickled classes and functions under the names that they had in the process that pickled them.

    A class that is pickled by value loses its registration, so a model that is saved again would refer to it by its
    bare name. Names that are already registered in this process are left unchanged.
    """
    for registered, obj in objects.items():
        package, separator, name = registered.partition(">")
        if not separator or keras.saving.get_registered_object(registered) is not None:
            continue
        if keras.saving.get_registered_name(obj) == obj.__name__:
            keras.saving.register_keras_serializable(package, name)(obj)


def dumps_params(custom: Mapping[str, Named], params: Mapping[str, object]) -> bytes:
    """Pickle an estimator's parameters with the ``custom`` classes, so that ``cloudpickle.loads`` finds the classes."""
    return dumps(_PickledWithObjects(dict(custom), dumps(params)))


@dataclass(frozen=True)
class _PickledWithObjects:
    """A pickle whose classes are loaded first, because the file of a model refers to classes by name."""

    custom: dict[str, Named]
    content: bytes

    def __reduce__(self) -> tuple[Callable[..., object], tuple[dict[str, Named], bytes]]:
        return _unpickled, (self.custom, self.content)


def _unpickled(custom: dict[str, Named], content: bytes) -> object:
    with keras.saving.custom_object_scope(custom):
        return cloudpickle.loads(content)


def to_configs(value: object) -> Any:
    """Replace the Keras objects in ``value`` with ``Configured``, also within lists, tuples and dicts."""
    if isinstance(value, dict):
        return {key: to_configs(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_configs(item) for item in value]
    if not isinstance(value, _CONFIGURABLE):
        return value
    variables: tuple[npt.NDArray[np.generic], ...] = ()
    if isinstance(value, keras.optimizers.Optimizer) and value.built:
        variables = tuple(keras.ops.convert_to_numpy(variable) for variable in value.variables)
    dtype = value.dtype if isinstance(value, keras.losses.Loss) else None  # its configuration omits the dtype
    return Configured(keras.saving.serialize_keras_object(value), variables, dtype, function_arguments(value))


def from_configs(value: object) -> Any:
    """Invert ``to_configs``, without restoring the values of variables."""
    if isinstance(value, dict):
        return {key: from_configs(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_configs(item) for item in value]
    if isinstance(value, Configured):
        rebuilt = keras.saving.deserialize_keras_object(value.config, safe_mode=False)
        if value.dtype is not None:
            rebuilt._dtype_policy = keras.dtype_policies.get(value.dtype)  # noqa: SLF001
            rebuilt._dtype = value.dtype  # noqa: SLF001
        if value.arguments is not None:
            rebuilt._fn_kwargs = value.arguments  # noqa: SLF001
        return rebuilt
    return value
