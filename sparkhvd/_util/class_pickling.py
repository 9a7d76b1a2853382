"""Pickles of classes by value that leave the classes of the receiving process unchanged.

When cloudpickle loads a class that the process already has, it returns that class but sets all its attributes again.
Attributes that the process has changed are lost, and the methods become copies with their own globals, which no longer
follow the module. Here, a class keeps its attributes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import uuid
import weakref
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

_IDENTIFIED_TYPES = (type, ModuleType, BuiltinFunctionType, type(functools.lru_cache(len)))


class _Arrived(NamedTuple):
    """An attribute of a class as it last arrived in a pickle; a function is remembered by its code."""

    fingerprint: bytes
    code: CodeType | None


# The state below belongs to the process, as cloudpickle's own table of classes does.
_PROCESS = uuid.uuid4().hex
_own_classes: weakref.WeakSet[type] = weakref.WeakSet()  # classes of this process that it has pickled
_received_classes: weakref.WeakKeyDictionary[type, dict[str, _Arrived]] = weakref.WeakKeyDictionary()


def process_identity() -> str:
    """Return what identifies this process among all processes that pickle; a forked process has its own."""
    return f"{_PROCESS}-{os.getpid()}"


def set_class_state(
    setter: Callable[[type, Any], Any], kind: type, state: Any, *, fingerprints: Mapping[str, bytes] | None = None
) -> type:
    """Set the attributes that arrived with a class, unless this process defined the class.

    An attribute that the sending process has not changed since the previous pickle of the class keeps the value that
    this process has given it since then. Methods that neither process has replaced are set: their globals are those of
    the latest pickle.

    Args:
        setter: sets the state of the class.
        kind: the class.
        state: the attributes and the slots.
        fingerprints: differ if the sending process has changed an attribute, by name.
    """
    if kind not in _own_classes:
        attributes, slots = state
        previous = _received_classes.setdefault(kind, {})
        sent = {name: _Arrived((fingerprints or {}).get(name, b""), _code_of(attributes[name])) for name in attributes}
        changed = {name for name, arrived in sent.items() if not _is_kept(kind, name, previous.get(name), arrived)}
        previous.update({name: sent[name] for name in changed})
        setter(kind, ({name: attributes[name] for name in changed}, slots))
    return kind


def _is_kept(kind: type, name: str, previous: _Arrived | None, arrived: _Arrived) -> bool:
    """Return whether a class keeps its own value of an attribute."""
    if previous is None or not arrived.fingerprint or previous.fingerprint != arrived.fingerprint:
        return False
    return previous.code is None or previous.code is not _code_of(vars(kind).get(name))


def _code_of(attribute: object) -> CodeType | None:
    """Return the code of a method or property; None for other attributes."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    return getattr(getattr(attribute, "__func__", attribute), "__code__", None)


def set_new_class_state(setter: Callable[[type, Any], Any], kind: type, state: Any, **options: Any) -> type:
    """Set the attributes that arrived with a class, unless this process already had the class."""
    return kind if kind in _received_classes else set_class_state(setter, kind, state, **options)


class _FingerprintPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles functions, classes and modules by their identity, and functions with their code and what they hold."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; pickle calls this method."""
        if isinstance(value, FunctionType):
            content = (value.__code__, value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
            return id, (id(value), process_identity()), content
        if isinstance(value, _IDENTIFIED_TYPES) and value is not id:
            return id, (id(value), process_identity())
        return super().reducer_override(value)


class _HashWriter(io.RawIOBase):
    """A file that keeps only a hash of what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.sha256()

    def write(self, content: Any) -> int:
        """Add content to the hash."""
        self.hash.update(content)
        return memoryview(content).nbytes


def fingerprint(value: object) -> bytes:
    """Return bytes that differ if a value has changed."""
    writer = _HashWriter()
    _FingerprintPickler(writer).dump(value)
    return writer.hash.digest()


def _fingerprints(attributes: Mapping[str, object]) -> dict[str, bytes]:
    """Return the fingerprints of the attributes that have one: cloudpickle treats some attributes of a class apart."""
    fingerprints = {}
    for name, value in attributes.items():
        with contextlib.suppress(Exception):
            fingerprints[name] = fingerprint(value)
    return fingerprints


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles classes by value; the process that defines a class keeps its own on loading."""

    set_state = staticmethod(set_class_state)

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value; pickle calls this method."""
        reduced = super().reducer_override(value)
        if isinstance(value, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            if value not in _received_classes:
                _own_classes.add(value)
            setter = functools.partial(self.set_state, reduced[5], fingerprints=_fingerprints(reduced[2][0]))
            return (*reduced[:5], setter)
        return reduced


class PeerPickler(Pickler):
    """Pickles for a process that has its own copies of the same classes; it keeps them on loading."""

    set_state = staticmethod(set_new_class_state)


def dumps(value: object, kind: Callable[[io.BytesIO], Pickler] = Pickler) -> bytes:
    """Pickle a value with a ``Pickler``; ``cloudpickle.loads`` loads it."""
    buffer = io.BytesIO()
    kind(buffer).dump(value)
    return buffer.getvalue()
