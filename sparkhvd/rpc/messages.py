"""What driver and tasks tell each other, and its encoding: a JSON header followed by raw bytes."""

from __future__ import annotations

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import get_args

from sparkhvd.rpc.fields import MessageError, from_json_fields
from sparkhvd.rpc.registration import Introduction, TaskOffer, TaskRegistration, TaskServer


@dataclass(frozen=True)
class Started:
    """All tasks of the job run at the same time and their ranks are assigned."""

    num_proc: int


@dataclass(frozen=True)
class TaskStatus:
    """Task to driver: this connection lasts as long as this attempt of the task.

    Attributes:
        task_index: its index.
        rank: which it watches over; -1 before it has one.
        host: where it runs.
        attempt: by Spark's count.
        phase: how far the rank is, in the words of ``sparkhvd.task.failure_report``.
    """

    task_index: int
    rank: int
    host: str
    attempt: int = 0
    phase: str = ""


@dataclass(frozen=True)
class ExchangeIntroductions:
    """Task to driver: what it has to say to the others; asks for what they have to say."""

    introduction: Introduction


@dataclass(frozen=True)
class Introductions:
    """The answer to ``ExchangeIntroductions`` once all have come: the introductions by index."""

    introductions: tuple[Introduction, ...]


@dataclass(frozen=True)
class ExchangeUnavailable:
    """The answer to ``ExchangeIntroductions`` when not all tasks reach the driver: they have to meet elsewhere."""


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
    """Task to driver: it waits for its part of the job."""

    registration: TaskRegistration


@dataclass(frozen=True)
class ProbeServers:
    """Driver to task: which of these servers of another task can be reached?"""

    servers: tuple[TaskServer, ...]


@dataclass(frozen=True)
class Reachable:
    """The answer to ``ProbeServers``: the addresses where the server answered."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Assign:
    """Driver to task: all tasks of the job, from which follows who runs what."""

    offers: tuple[TaskOffer, ...]


@dataclass(frozen=True)
class AwaitTaskEnd:
    """Driver to task: answer ``Acknowledged`` when the task is over; a lost connection says that it was lost."""


@dataclass(frozen=True)
class TaskRunning:
    """The answer to ``AwaitTaskEnd`` every few seconds while the task is not over."""


@dataclass(frozen=True)
class FindTask:
    """Remote-shell agent to driver: which task executes commands for this host of ``mpirun``?"""

    host: str


@dataclass(frozen=True)
class TaskAddress:
    """The answer to ``FindTask``: where its server listens."""

    server: TaskServer


@dataclass(frozen=True)
class ExecuteOrted:
    """Remote-shell agent to task: run ``orted`` with these arguments."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Executed:
    """The answer to ``ExecuteOrted``, once it has ended."""

    returncode: int
    output: bytes


@dataclass(frozen=True)
class Rejected:
    """The answer to something that cannot be done."""

    reason: str


@dataclass(frozen=True)
class RankConnected:
    """What ``orted`` started to the task of its host: it is this rank, of so many in all and on its host."""

    rank: int
    size: int
    local_size: int


@dataclass(frozen=True)
class Preload:
    """The answer to ``RankConnected``: what the rank's worker imports first."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class WorkerForked:
    """Rank to task: its worker runs."""

    pid: int


@dataclass(frozen=True)
class WorkerEnded:
    """Rank to task: its worker has ended; negative codes are signals, perhaps of a launcher that ended it."""

    returncode: int
    by_launcher: bool


Message = (
    Started
    | TaskStatus
    | ExchangeIntroductions
    | Introductions
    | ExchangeUnavailable
    | Output
    | Flush
    | Acknowledged
    | Register
    | ProbeServers
    | Reachable
    | Assign
    | AwaitTaskEnd
    | TaskRunning
    | FindTask
    | TaskAddress
    | ExecuteOrted
    | Executed
    | Rejected
    | RankConnected
    | Preload
    | WorkerForked
    | WorkerEnded
)

_TYPES: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
_LENGTH = struct.Struct(">I")


def encode(message: Message) -> bytes:
    """The bytes of a message; at most one of its own fields may be ``bytes``, and none of what lies deeper."""
    header = {"type": type(message).__name__} | dataclasses.asdict(message)
    raw = _raw_field(type(message))
    content = header.pop(raw) if raw else b""
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text + content


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
        raise MessageError(f"The message header is not valid JSON: {error}.") from None
    if end > len(payload) or not isinstance(header, dict):
        raise MessageError("The message header is truncated or not a JSON object.")
    name = header.pop("type", None)
    if not isinstance(name, str) or name not in _TYPES:
        raise MessageError(f"Unknown message type {name!r:.100}; expected one of {', '.join(_TYPES)}.")
    kind = _TYPES[name]
    raw, content = _raw_field(kind), payload[end:]
    if content and not raw:
        raise MessageError(f"{name} carries {len(content)} unexpected bytes after its header.")
    return from_json_fields(kind, header | {raw: content} if raw else header)


def _raw_field(kind: type[Message]) -> str:
    """The name of the field whose bytes follow the header, empty where there is none."""
    return next((field.name for field in dataclasses.fields(kind) if field.type == "bytes"), "")
