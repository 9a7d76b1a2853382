"""Losses, metrics and optimizers that are given by a name of Keras'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import keras

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.errors import ParamError

# What compile makes of the output's shape, in any case, and the modules do not know.
_LOSSES_OF_COMPILE = frozenset({"crossentropy", "ce"})
_METRICS_OF_COMPILE = frozenset({"accuracy", "acc"})
_FUNCTIONS = frozenset({"get", "serialize", "deserialize", "legacy", "schedules"})


def check_names(optimizer: Any, loss: Any, metrics: Any) -> None:
    """Refuse names that Keras does not know; it would look them up in the training only.

    Raises:
        ParamError: there is no such loss, metric or optimizer; the message has the nearest names.
    """
    for name in _names(optimizer):
        _check("optimizer", name, keras.optimizers, [known.lower() for known in _known(keras.optimizers)])
    for name in _names(loss):
        if name.lower() not in _LOSSES_OF_COMPILE:
            _check("loss", name, keras.losses, [*sorted(_LOSSES_OF_COMPILE), *_known(keras.losses)])
    for name in _names(metrics):
        if name.lower() not in _METRICS_OF_COMPILE:
            _check("metrics", name, keras.metrics, [*sorted(_METRICS_OF_COMPILE), *_known(keras.metrics)])


def _check(param: str, name: str, module: ModuleType, known: list[str]) -> None:
    try:
        module.get(name)
    except ValueError as error:
        hint = did_you_mean(name, known, most=3) or f"Give a name of {module.__name__}, an object, or a function."
        raise ParamError(f"{param}: Keras does not know {name!r}. {hint}") from error


def _known(module: ModuleType) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_") and name not in _FUNCTIONS]


def _names(value: Any) -> Iterator[str]:
    """The strings in a value, also in lists and in the values of dicts, but not in configurations of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and "class_name" not in value:
        yield from _names(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _names(item)
