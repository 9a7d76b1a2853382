"""Dataclasses that have come as JSON, with every name and type checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from sparkhvd.errors import SparkHvdError

T = TypeVar("T")


class MessageError(SparkHvdError, ValueError):
    """An authenticated peer sent something that is not one of the messages."""


def from_json_fields(kind: type[T], fields: object, where: str = "") -> T:
    """The frozen dataclass ``kind`` whose ``dataclasses.asdict`` went through JSON.

    Its fields are ``int``, ``str``, ``bool``, ``bytes``, tuples of one of these, and such dataclasses themselves.

    Args:
        kind: the dataclass.
        fields: what came.
        where: how a message about it calls it; its name otherwise.

    Raises:
        MessageError: names or types are wrong.
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
    if type(value) is not kind:  # a bool is no int here
        raise MessageError(f"{where} must be of type {kind.__name__}, got {type(value).__name__}.")
    return value


@cache
def _fields(kind: object) -> dict[str, Any]:
    return get_type_hints(kind)
