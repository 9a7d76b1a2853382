"""The user's Keras objects as bytes that another process, with the same backend, makes them of again."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import numpy.typing as npt

import sparkhvd.keras as hvd
from sparkhvd.config import scratch_folder
from sparkhvd.data.schema import DataSchema
from sparkhvd.driver.pickling import by_value
from sparkhvd.errors import ParamError
from sparkhvd.estimators.keras.inputs import Ports, plan_inputs, plan_outputs
from sparkhvd.estimators.raised import with_stop

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
        own = [*self.objects.values(), *_leaves(self.loss), *_leaves(self.metrics), *self.callbacks]
        own += _leaves(self.checkpoint_callback)
        try:
            with by_value(own):
                return bytes(cloudpickle.dumps(self))
        except Exception as error:
            raise ParamError(
                f"The loss, metrics, callbacks or custom objects cannot be pickled to send them to the ranks: "
                f"{with_stop(error)}"
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
        return keras.saving.load_model(path, custom_objects=dict(objects), compile=False, safe_mode=False)


def custom_objects_of(model: Any, given: Mapping[str, Any] | None, used: Sequence[Any] = ()) -> dict[str, Any]:
    """The classes of a model, its layers and what else is used that Keras does not know, by name, and the user's own.

    Args:
        model: whose layers.
        given: what the user gave.
        used: losses, metrics and optimizers, also in lists and dicts.
    """
    found: dict[str, Any] = {}
    layers = model._flatten_layers(include_self=False)  # noqa: SLF001  (no public way to walk)
    others = [each for each in _leaves(list(used)) if isinstance(each, _CONFIGURED)]
    for kind in map(type, [model, *layers, *others]):
        if not kind.__module__.startswith(("keras.", "keras_hub.")):
            found[kind.__name__] = kind
            found[keras.saving.get_registered_name(kind)] = kind
    return {**found, **(given or {})}


def dumps_params(custom: Mapping[str, Any], params: Mapping[str, Any]) -> bytes:
    """An estimator's parameters as bytes for ``cloudpickle.loads``, which know the classes that Keras does not."""
    return bytes(cloudpickle.dumps(_Scoped(dict(custom), cloudpickle.dumps(params))))


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
