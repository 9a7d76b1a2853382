"""The helpers of ``horovod.tensorflow`` that programs use."""

from __future__ import annotations

from collections.abc import Callable
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
