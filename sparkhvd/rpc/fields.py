"""Dataclasses from JSON, with every field name and type checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from sparkhvd.errors import SparkHvdError

T = TypeVar("T")


class MessageError(SparkHvdError, ValueError):
    """An authenticated peer sent an invalid message."""


def from_json_fields(kind: type[T], fields: object, where: str = "") -> T:
    """Return the frozen dataclass ``kind`` whose ``dataclasses.asdict`` was sent as JSON.

    Fields may be ``int``, ``str``, ``bool``, ``bytes``, tuples of one of these, or dataclasses of such fields.

    Args:
        kind: the dataclass.
        fields: the received value.
        where: the name of the value in error messages; by default that of ``kind``.

    Raises:
        MessageError: the field names or types differ from the declaration of ``kind``.
    """
    where = where or kind.__name__
    expected = _fields(cast(Hashable, kind))
    if not isinstance(fields, dict) or set(fields) != set(expected):
        received = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise MessageError(f"{where} must have the fields {sorted(expected)}, got {received!s:.200}.")
    return kind(**{name: _value(expected[name], fields[name], f"{where}.{name}") for name in expected})


def _value(kind: Any, value: object, where: str) -> object:
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise MessageError(f"{where} must be of type list, got {type(value).__name__}.")
        return tuple(_value(get_args(kind)[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return from_json_fields(kind, value, where)
    if type(value) is not kind:  # isinstance would accept a bool as an int
        raise MessageError(f"{where} must be of type {kind.__name__}, got {type(value).__name__}.")
    return value


@cache
def _fields(kind: object) -> dict[str, Any]:
    return get_type_hints(kind)
