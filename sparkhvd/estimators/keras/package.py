"""The user's Keras objects as bytes that another process, with the same backend, makes them of again."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from sparkhvd.errors import ParamError, SparkHvdError
from sparkhvd.estimators.keras.inputs import Ports, plan_inputs, plan_outputs
from sparkhvd.estimators.training.user_errors import with_full_stop
from sparkhvd.keras.optimizer import ExchangingOptimizer

_CONFIGURED = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)


@dataclass(frozen=True)
class Configured:
    """A Keras object as its configuration and the values of its variables."""

    config: dict[str, Any]
    variables: tuple[npt.NDArray[np.generic], ...] = ()


@dataclass(frozen=True)
class Package:
    """What a rank trains, in Keras' own file format where there is one.

    Attributes:
        model: a ``.keras`` file.
        objects: classes and functions by the names that the file knows them by.
        optimizer: the optimizer, with its state.
        loss: what ``compile`` takes, with Keras' objects configured.
        loss_weights: what ``compile`` takes.
        metrics: what ``compile`` takes, with Keras' objects configured.
        callbacks: the user's callbacks.
        checkpoint_callback: the one that rank 0 alone runs, after those.
        inputs: how columns become inputs.
        outputs: how columns become targets.
        input_shapes: the user's, for columns that are known later.
        named_inputs: the user's ``inputs``, for the same.
        label_shapes: the same of labels.
        compression: what gradients travel as: a name, or what hvd.Compression has.
    """

    model: bytes
    objects: dict[str, Any]
    optimizer: Configured
    loss: Any
    loss_weights: Any
    metrics: Any
    inputs: Ports
    outputs: Ports
    callbacks: tuple[Any, ...] = ()
    checkpoint_callback: Any = None
    compression: Any = None
    input_shapes: Any = None
    named_inputs: Any = None
    label_shapes: Any = None

    def dumps(self) -> bytes:
        """The package as bytes.

        Raises:
            ParamError: something in it cannot be pickled.
        """
        try:
            return dumps(self)
        except SparkHvdError:
            raise
        except Exception as error:
            raise ParamError(
                f"The loss, metrics, callbacks or custom objects cannot be pickled to send them to the ranks: "
                f"{with_full_stop(error)}"
            ) from error

    def with_ports_for(self, model: Any, schema: DataSchema) -> Package:
        """The package for other columns than it was made for."""
        return replace(
            self,
            inputs=plan_inputs(model, schema.of("feature"), self.input_shapes, self.named_inputs),
            outputs=plan_outputs(model, schema.of("label"), self.label_shapes),
        )

    def gradient_compression(self) -> Any:
        """What ``DistributedOptimizer`` takes as ``compression``."""
        if not isinstance(self.compression, str):
            return self.compression
        return None if self.compression == "none" else getattr(hvd.Compression, self.compression)

    def build(self) -> Any:
        """The model with its optimizer, compiled."""
        register_names(self.objects)
        model = model_of(self.model, self.objects)
        with keras.saving.custom_object_scope(self.objects):
            optimizer = thawed(self.optimizer)
            loss, metrics = thawed(self.loss), thawed(self.metrics)
        if model.built and self.optimizer.variables:
            optimizer.build(model.trainable_variables)
            for variable, value in zip(optimizer.variables, self.optimizer.variables, strict=True):
                variable.assign(value)
        model.compile(
            optimizer=optimizer, loss=loss, loss_weights=self.loss_weights, metrics=metrics, jit_compile=False
        )
        return model


def refuse_own_optimizers(model: Any) -> None:
    """Refuse optimizers in a ``train_step`` of the user's that would take the steps of one rank alone.

    Raises:
        ParamError: the model has such optimizers, as those of two networks that train against each other.
    """
    if type(model).train_step is keras.Model.train_step:
        return
    # TensorFlow keeps everything a second time under names of its own.
    own = {name: value for name, value in vars(model).items() if not name.startswith("_self_")}
    others = {name: [x for x in _leaves(value) if x is not model.optimizer] for name, value in own.items()}
    alone = [name for name, values in others.items() if any(map(_steps_alone, values))]
    if alone:
        raise ParamError(
            f"The model has optimizers of its own ({', '.join(alone)}), which would train every rank's weights with "
            "that rank's gradients alone. Wrap each of them where the model makes it: "
            "sparkhvd.keras.DistributedOptimizer(keras.optimizers.Adam())."
        )


def _steps_alone(value: Any) -> bool:
    return isinstance(value, keras.optimizers.Optimizer) and not isinstance(value, ExchangingOptimizer)


def bytes_of(model: Any) -> bytes:
    """A model as the content of a ``.keras`` file, without what it was compiled with."""
    with tempfile.TemporaryDirectory(prefix="sparkhvd-keras-", dir=scratch_folder()) as folder:
        path = Path(folder, "model.keras")
        keras.saving.save_model(model, path)
        return path.read_bytes()


def model_of(content: bytes, objects: Mapping[str, Any]) -> Any:
    """The model of ``bytes_of``, not compiled. Runs the code in its Lambda layers: open only what you trust."""
    with tempfile.TemporaryDirectory(prefix="sparkhvd-keras-", dir=scratch_folder()) as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(content)
        return load(path, objects, compiled=False)


def load(path: Path, objects: Mapping[str, Any], *, compiled: bool) -> Any:
    """Return the model in a ``.keras`` file, made of ``objects`` even where this process knows others by their names.

    Runs the code in its Lambda layers: open only what you trust.
    """
    with keras.saving.custom_object_scope(dict(objects)):  # goes before what the process has registered
        return keras.saving.load_model(path, compile=compiled, safe_mode=False)


def custom_objects_of(model: Any, given: Mapping[str, Any] | None, used: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the classes and functions that a saved model refers to by name and Keras does not know.

    Args:
        model: the model, whose layers are searched.
        given: the user's ``custom_objects``, which Keras looks up by name as well.
        used: losses, metrics and optimizers, also in lists and dicts.

    Raises:
        ParamError: one name stands for two objects.
    """
    found = dict(given or {})
    layers = [model, *model._flatten_layers(include_self=False)]  # noqa: SLF001  (no public way to walk)
    measures = _leaves(list(used))
    classes: list[Any] = [*map(type, layers), *(type(each) for each in measures if isinstance(each, _CONFIGURED))]
    functions = [each for each in measures if isinstance(each, FunctionType)]
    in_layers = [value for layer in layers for value in vars(layer).values() if isinstance(value, FunctionType)]
    # Most functions of a layer are not in its configuration; those that are have to be given.
    functions += [each for each in in_layers if keras.saving.get_registered_name(each) in found]
    for each in (*classes, *functions):
        _add(found, each)
    return found


def _add(found: dict[str, Any], each: Any) -> None:
    if each.__module__.startswith(("keras.", "keras_hub.")) or each.__name__ == "<lambda>":
        return
    name = keras.saving.get_registered_name(each)
    known = found.setdefault(name, each)
    if known is not each:
        kind, remedy = ("classes", "one of the classes") if isinstance(each, type) else ("functions", "one of them")
        raise ParamError(
            f"The name {name!r} stands for two different {kind}, {_where(known)} and {_where(each)}. A saved Keras "
            f"model refers to them by name, so one would take the place of the other. Rename {remedy}, or register "
            "both under different packages with @keras.saving.register_keras_serializable(package=...)."
        )


def _where(each: Any) -> str:
    return f"{getattr(each, '__module__', '?')}.{getattr(each, '__qualname__', repr(each))}"


def register_names(objects: Mapping[str, Any]) -> None:
    """Register classes and functions that arrived in a pickle under the names that they had where they were pickled.

    A class that is pickled by value loses its registration, and a model that is saved again would refer to it by its
    bare name. A name that this process has registered already stays as it is.
    """
    for registered, each in objects.items():
        package, separator, name = registered.partition(">")
        if not separator or keras.saving.get_registered_object(registered) is not None:
            continue
        if keras.saving.get_registered_name(each) == each.__name__:
            keras.saving.register_keras_serializable(package, name)(each)


def dumps_params(custom: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """An estimator's parameters as bytes for ``cloudpickle.loads``, which know the classes that Keras does not."""
    return dumps(_Scoped(dict(custom), dumps(params)))


@dataclass(frozen=True)
class _Scoped:
    """What is unpickled once its classes are there: a model is its file, in which classes are names."""

    custom: dict[str, Any]
    content: bytes

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (self.custom, self.content)


def _unpickled(custom: dict[str, Any], content: bytes) -> Any:
    with keras.saving.custom_object_scope(custom):
        return cloudpickle.loads(content)


def frozen(value: Any) -> Any:
    """``value`` with the Keras objects in it configured: in lists, tuples and dicts too."""
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    if not isinstance(value, _CONFIGURED):
        return value
    variables: tuple[npt.NDArray[np.generic], ...] = ()
    if isinstance(value, keras.optimizers.Optimizer) and value.built:
        variables = tuple(keras.ops.convert_to_numpy(variable) for variable in value.variables)
    return Configured(keras.saving.serialize_keras_object(value), variables)


def thawed(value: Any) -> Any:
    """The inverse of ``frozen``, without the values of variables."""
    if isinstance(value, dict):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thawed(item) for item in value]
    if isinstance(value, Configured):
        return keras.saving.deserialize_keras_object(value.config, safe_mode=False)
    return value


def arrays_to_bytes(arrays: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Arrays by name as one file that opens without running code."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stubs know allow_pickle only
    return buffer.getvalue()


def arrays_of_bytes(content: bytes) -> dict[str, npt.NDArray[np.generic]]:
    """The inverse of ``arrays_to_bytes``."""
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return dict(found)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if value is None or isinstance(value, str | Configured) else [value]
