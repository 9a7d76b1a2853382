"""What driver and tasks tell each other, and its encoding: a JSON header followed by raw bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from sparkhvd.errors import SparkHvdError


class MessageError(SparkHvdError, ValueError):
    """An authenticated peer sent something that is not one of the messages."""


@dataclass(frozen=True)
class Started:
    """All tasks of the job run at the same time and their ranks are assigned."""

    num_proc: int


@dataclass(frozen=True)
class Attending:
    """Task to driver: this connection lasts as long as the task; ``rank`` is -1 before the ranks are assigned."""

    task_index: int
    rank: int
    host: str


@dataclass(frozen=True)
class Output:
    """Whole lines that a rank wrote; ``content`` is what it wrote, without the last newline."""

    rank: int
    stream: str
    content: bytes


@dataclass(frozen=True)
class Flush:
    """Asks for an ``Acknowledged`` once everything sent before has been dealt with."""


@dataclass(frozen=True)
class Acknowledged:
    """The answer to ``Flush``."""


@dataclass(frozen=True)
class Register:
    """Task to driver: it waits for its part of the job. ``registration`` is JSON."""

    registration: bytes


@dataclass(frozen=True)
class Probe:
    """Driver to task: which of these servers (JSON) of another task can be reached?"""

    servers: bytes


@dataclass(frozen=True)
class Reachable:
    """The answer to ``Probe``: the names (JSON) of the network interfaces where the server answered."""

    interfaces: bytes


@dataclass(frozen=True)
class Assign:
    """Driver to task: who runs what (JSON)."""

    plan: bytes


@dataclass(frozen=True)
class Attend:
    """Driver to task: answer when the task is over; a lost connection says that it was lost."""


@dataclass(frozen=True)
class FindTask:
    """Remote-shell agent to driver: which task executes commands for this host of ``mpirun``?"""

    host: str


@dataclass(frozen=True)
class TaskAddress:
    """The answer to ``FindTask``: where its server listens (JSON)."""

    servers: bytes


@dataclass(frozen=True)
class ExecuteOrted:
    """Remote-shell agent to task: run ``orted`` with these arguments (JSON)."""

    arguments: bytes


@dataclass(frozen=True)
class Executed:
    """The answer to ``ExecuteOrted``, once it has ended."""

    returncode: int
    output: bytes


@dataclass(frozen=True)
class Refused:
    """The answer to something that cannot be done."""

    reason: str


_KINDS = (
    *(Started, Attending, Output, Flush, Acknowledged),
    *(Register, Probe, Reachable, Assign, Attend, FindTask, TaskAddress, ExecuteOrted, Executed, Refused),
)
Message = (
    Started
    | Attending
    | Output
    | Flush
    | Acknowledged
    | Register
    | Probe
    | Reachable
    | Assign
    | Attend
    | FindTask
    | TaskAddress
    | ExecuteOrted
    | Executed
    | Refused
)

_TYPES: dict[str, type[Message]] = {kind.__name__: kind for kind in _KINDS}
_FIELD_TYPES = {"int": int, "str": str, "bytes": bytes}
_LENGTH = struct.Struct(">I")


def encode(message: Message) -> bytes:
    """The bytes of a message; at most one of its fields may be ``bytes``."""
    header: dict[str, object] = {"type": type(message).__name__}
    raw = b""
    for field in dataclasses.fields(message):
        value = getattr(message, field.name)
        if isinstance(value, bytes):
            raw = value
        else:
            header[field.name] = value
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text + raw


def decode(payload: bytes) -> Message:
    """The message in ``payload``.

    Raises:
        MessageError: it is not a message, or its fields have wrong names or types.
    """
    if len(payload) < _LENGTH.size:
        raise MessageError(f"A message of {len(payload)} bytes is too short.")
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    try:
        header = json.loads(payload[_LENGTH.size : end])
    except (ValueError, RecursionError) as error:
        raise MessageError(f"The header of a message cannot be read: {error}.") from None
    if end > len(payload) or not isinstance(header, dict):
        raise MessageError("The header of a message is cut off or not an object.")
    name = header.pop("type", None)
    if not isinstance(name, str) or name not in _TYPES:
        raise MessageError(f"There is no message of type {name!r}; known are {', '.join(_TYPES)}.")
    return _build(_TYPES[name], header, payload[end:])


def _build(kind: type[Message], header: dict[str, object], raw: bytes) -> Message:
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    values = header | {name: raw for name, type_name in fields.items() if type_name == "bytes"}
    if set(values) != set(fields):
        raise MessageError(f"{kind.__name__} has the fields {sorted(fields)}, not {sorted(values)}.")
    for name, value in values.items():
        if type(value) is not _FIELD_TYPES[fields[name]]:
            raise MessageError(f"{kind.__name__}.{name} is {type(value).__name__}, not {fields[name]}.")
    return cast(Callable[..., Message], kind)(**values)
