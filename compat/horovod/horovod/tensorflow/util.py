"""The helpers of ``horovod.tensorflow`` that programs use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import tensorflow as tf

T = TypeVar("T")


def _executing_eagerly() -> bool:
    """Return whether TensorFlow runs operations at once, not in a graph."""
    return bool(tf.executing_eagerly())


def _cache(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that caches the results of ``function`` by arguments, separately for eager mode and graphs."""
    results: dict[tuple[Any, bool], T] = {}

    @wraps(function)
    def call(*args: Any) -> T:
        key = (args, _executing_eagerly())
        if key not in results:
            results[key] = function(*args)
        return results[key]

    return call


def vars_to_refs(variables: Sequence[Any]) -> tuple[Any, ...]:
    """Return hashable references to variables."""
    return tuple(variable.ref() for variable in variables)


def refs_to_vars(references: Sequence[Any]) -> list[Any]:
    """Return the variables of references."""
    return [reference.deref() for reference in references]
