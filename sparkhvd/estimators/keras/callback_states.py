"""The states of Keras' own callbacks in checkpoints; Keras does not save them and resets them when training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, takewhile

import keras
import numpy as np
import numpy.typing as npt

CALLBACK = "callback."  # begins the names of the states
Arrays = dict[str, npt.NDArray[np.generic]]

_CALLBACK_TYPES = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
_NUMBER_ATTRIBUTES = ("wait", "best", "best_epoch", "stopped_epoch", "cooldown_counter")


def callback_states(callbacks: Sequence[keras.callbacks.Callback]) -> Arrays:
    """Return the states of the callbacks so far, by names that ``restore_callbacks`` knows."""
    arrays: Arrays = {}
    for prefix, callback in _stateful(callbacks):
        numbers = {name: getattr(callback, name, None) for name in _NUMBER_ATTRIBUTES}
        arrays |= {f"{prefix}.{name}": np.asarray(value) for name, value in numbers.items() if value is not None}
        for index, weight in enumerate(getattr(callback, "best_weights", None) or ()):
            arrays[f"{prefix}.weight.{index}"] = np.asarray(weight)
    return arrays


def restore_callbacks(
    callbacks: Sequence[keras.callbacks.Callback], arrays: Mapping[str, npt.NDArray[np.generic]]
) -> None:
    """Set the states of callbacks from ``callback_states``; callbacks of other types or positions start anew."""
    for prefix, callback in _stateful(callbacks):
        for name in _NUMBER_ATTRIBUTES:
            if (value := arrays.get(f"{prefix}.{name}")) is not None:
                setattr(callback, name, value.item())
        names = (f"{prefix}.weight.{index}" for index in count())
        if weights := [arrays[name] for name in takewhile(arrays.__contains__, names)]:
            callback.best_weights = weights


def changes_model_at_end(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback may change the model when the training ends."""
    if type(callback).__module__.startswith("keras."):
        return bool(getattr(callback, "restore_best_weights", False))
    return type(callback).on_train_end is not keras.callbacks.Callback.on_train_end


def _stateful(callbacks: Sequence[keras.callbacks.Callback]) -> list[tuple[str, keras.callbacks.Callback]]:
    """Return the callbacks with a known state, each with a name of its own."""
    return [
        (f"{CALLBACK}{index}.{type(callback).__name__}", callback)
        for index, callback in enumerate(callbacks)
        if isinstance(callback, _CALLBACK_TYPES)
    ]
