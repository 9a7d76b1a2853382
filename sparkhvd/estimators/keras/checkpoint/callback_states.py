"""The states of Keras' own callbacks in checkpoints. Keras does not save them, and resets them when training begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count, takewhile

import keras
import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[np.generic]]

_CALLBACK_TYPES = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)
_NUMBER_ATTRIBUTES = (
    "wait",
    "best",
    "best_epoch",
    "stopped_epoch",
    "cooldown_counter",
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
)


def callback_states(callbacks: Sequence[keras.callbacks.Callback]) -> Arrays:
    """Return the current states of the callbacks, by the names that ``restore_callbacks`` expects.

    If a callback acts only on rank 0, its states differ between the ranks. A run resumes with the states of rank 0.
    """
    arrays: Arrays = {}
    for prefix, callback in _stateful(callbacks):
        numbers = {name: getattr(callback, name, None) for name in _NUMBER_ATTRIBUTES}
        arrays |= {f"{prefix}.{name}": np.asarray(value) for name, value in numbers.items() if value is not None}
        for index, weight in enumerate(getattr(callback, "best_weights", None) or ()):
            arrays[f"{prefix}.weight.{index}"] = np.asarray(weight)
        if _compares_within_epoch(callback) and callback.monitor_op is not None:
            arrays[f"{prefix}.monitor_op"] = np.array(callback.monitor_op.__name__)
    return arrays


def restore_callbacks(
    callbacks: Sequence[keras.callbacks.Callback], arrays: Mapping[str, npt.NDArray[np.generic]]
) -> None:
    """Restore the result of ``callback_states``; callbacks of other types or at other positions start anew."""
    for prefix, callback in _stateful(callbacks):
        for name in _NUMBER_ATTRIBUTES:
            if (value := arrays.get(f"{prefix}.{name}")) is not None:
                setattr(callback, name, value.item())
        names = (f"{prefix}.weight.{index}" for index in count())
        if weights := [arrays[name] for name in takewhile(arrays.__contains__, names)]:
            callback.best_weights = weights
        if _compares_within_epoch(callback) and callback.monitor_op is None and f"{prefix}.monitor_op" in arrays:
            callback.monitor_op = getattr(keras.ops, str(arrays[f"{prefix}.monitor_op"]))


def append_to_files(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Keep the callbacks of a resumed run from overwriting the files of the interrupted run."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.append = True  # it writes the header only if the file is missing or empty


def changes_model_at_end(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback may change the model, or calls the user's code, when the training ends."""
    if isinstance(callback, keras.callbacks.LambdaCallback):
        return "on_train_end" in vars(callback)
    if type(callback).__module__.startswith("keras."):
        return bool(getattr(callback, "restore_best_weights", False))
    return type(callback).on_train_end is not keras.callbacks.Callback.on_train_end


def _stateful(callbacks: Sequence[keras.callbacks.Callback]) -> list[tuple[str, keras.callbacks.Callback]]:
    """Return the callbacks of the known types, each with a unique prefix for the names of its state."""
    return [
        (f"callback.{index}.{type(callback).__name__}", callback)
        for index, callback in enumerate(callbacks)
        if isinstance(callback, _CALLBACK_TYPES)
    ]


def _compares_within_epoch(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback needs ``monitor_op`` within an epoch; Keras sets it only at the end of an epoch."""
    return isinstance(callback, keras.callbacks.ModelCheckpoint)
