"""Checks for the names of Keras losses, metrics and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

import keras

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.errors import ParamError

# compile() resolves these names (in any letter case) by the output's shape; the modules do not know them.
_COMPILE_LOSSES = frozenset({"crossentropy", "ce"})
_COMPILE_METRICS = frozenset({"accuracy", "acc"})
_FUNCTIONS = frozenset({"get", "serialize", "deserialize", "legacy", "schedules"})


def check_names(optimizer: keras.optimizers.Optimizer, loss: object, metrics: object) -> None:
    """Reject names that Keras does not know; Keras itself would reject them only in the training.

    Raises:
        ParamError: a loss, metric or optimizer is unknown; the message suggests similar names.
    """
    for name in _names(optimizer):
        _check("optimizer", name, keras.optimizers, [known.lower() for known in _known(keras.optimizers)])
    for name in _names(loss):
        if name.lower() not in _COMPILE_LOSSES:
            _check("loss", name, keras.losses, [*sorted(_COMPILE_LOSSES), *_known(keras.losses)])
    for name in _names(metrics):
        if name.lower() not in _COMPILE_METRICS:
            _check("metrics", name, keras.metrics, [*sorted(_COMPILE_METRICS), *_known(keras.metrics)])


def _check(param: str, name: str, module: ModuleType, known: list[str]) -> None:
    try:
        module.get(name)
    except ValueError as error:
        hint = did_you_mean(name, known, most=3) or f"Pass a name from {module.__name__}, an object, or a function."
        raise ParamError(f"{param}: Keras does not know {name!r}. {hint}") from error


def _known(module: ModuleType) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_") and name not in _FUNCTIONS]


def _names(value: object) -> Iterator[str]:
    """Yield the strings in a value, including lists and the values of dicts, but not configurations of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and "class_name" not in value:
        yield from _names(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _names(item)
