"""Pickles of classes by value that leave the classes of the receiving process unchanged.

When cloudpickle loads a class that the process already has, it returns that class but sets all its attributes again.
Attributes that the process has changed are lost, and the methods become copies with their own globals, which no longer
follow the module. Here, a class keeps its attributes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle

# The state below belongs to the process, as cloudpickle's own table of classes does.
_own_classes: weakref.WeakSet[type] = weakref.WeakSet()  # classes of this process that it has pickled
# The fingerprints of the attributes of the classes that arrived in a pickle, as they last arrived, by name.
_received_classes: weakref.WeakKeyDictionary[type, dict[str, bytes]] = weakref.WeakKeyDictionary()


def set_class_state(setter: Callable[[type, Any], Any], kind: type, state: Any) -> type:
    """Set the attributes that arrived with a class, unless this process defined the class.

    Attributes with plain data that is the same as in the previous pickle of the class keep the value that this process
    has given them since then.
    """
    if kind not in _own_classes:
        attributes, slots = state
        previous = _received_classes.setdefault(kind, {})
        current = {name: fingerprint for name, value in attributes.items() if (fingerprint := _fingerprint(value))}
        known = {name for name, fingerprint in current.items() if previous.get(name) == fingerprint}
        previous.update(current)
        setter(kind, ({name: value for name, value in attributes.items() if name not in known}, slots))
    return kind


def set_new_class_state(setter: Callable[[type, Any], Any], kind: type, state: Any) -> type:
    """Set the attributes that arrived with a class, unless this process already had the class."""
    return kind if kind in _received_classes else set_class_state(setter, kind, state)


class _DataPickler(pickle.Pickler):
    """Pickles plain data only."""

    def reducer_override(self, value: object) -> Any:
        """Raise an error for any other value: a function or class of the same name may be another one."""
        raise pickle.PicklingError(f"A {type(value).__name__} is not plain data.")


def _fingerprint(value: object) -> bytes:
    """Return bytes that differ if plain data, such as a list of numbers, has changed; empty for other values."""
    buffer = io.BytesIO()
    try:
        _DataPickler(buffer).dump(value)
    except (pickle.PicklingError, RecursionError):
        return b""
    return hashlib.sha256(buffer.getvalue()).digest()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles classes by value; the process that defines a class keeps its own on loading."""

    set_state = staticmethod(set_class_state)

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; pickle calls this method."""
        reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            if value not in _received_classes:
                _own_classes.add(value)
            return (*reduced[:5], functools.partial(self.set_state, reduced[5]))
        return reduced


class PeerPickler(Pickler):
    """Pickles for a process that has its own copies of the same classes; it keeps them on loading."""

    set_state = staticmethod(set_new_class_state)


def dumps(value: object, kind: Callable[[io.BytesIO], Pickler] = Pickler) -> bytes:
    """Pickle a value with a ``Pickler``; ``cloudpickle.loads`` loads it."""
    buffer = io.BytesIO()
    kind(buffer).dump(value)
    return buffer.getvalue()
