"""The messages between driver and tasks, and their encoding: a JSON header followed by raw bytes.

A long header is compressed: the introductions of a thousand tasks, which the driver sends to each of them, shrink to a
thirtieth.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from dataclasses import dataclass
from typing import get_args

from sparkhvd._util.counts import counted
from sparkhvd.rpc.fields import MessageError, from_json_fields
from sparkhvd.rpc.registration import Introduction, TaskOffer, TaskRegistration, TaskServer


@dataclass(frozen=True)
class Started:
    """Task to driver: all tasks of the job run and their ranks are assigned."""

    num_proc: int


@dataclass(frozen=True)
class TaskStatus:
    """Task to driver: the task's identity and progress. The connection lasts as long as this attempt of the task.

    Attributes:
        task_index: its index.
        rank: the rank that it supervises; -1 before one is assigned.
        host: the host that it runs on.
        attempt: Spark's attempt id; in an elastic job without Spark, the number of the host's process.
        phase: the progress of the rank, one of the phases of ``sparkhvd.task.failure_report``.
    """

    task_index: int
    rank: int
    host: str
    attempt: int = 0
    phase: str = ""


@dataclass(frozen=True)
class ExchangeIntroductions:
    """Task to driver: its introduction, in exchange for the introductions of all tasks."""

    introduction: Introduction


@dataclass(frozen=True)
class Introductions:
    """The answer to ``ExchangeIntroductions`` once all tasks have sent theirs: the introductions by task index."""

    introductions: tuple[Introduction, ...]


@dataclass(frozen=True)
class ExchangeUnavailable:
    """The answer to ``ExchangeIntroductions`` if not all tasks reach the driver; they then exchange through Spark."""


@dataclass(frozen=True)
class Output:
    """Whole lines that a rank wrote; ``content`` lacks the last newline."""

    rank: int
    stream: str
    content: bytes


@dataclass(frozen=True)
class Flush:
    """Requests an ``Acknowledged`` once all earlier messages are handled."""


@dataclass(frozen=True)
class Acknowledged:
    """The answer to a request that was carried out, such as ``Flush``, ``Register`` or ``OfferSlot``."""


@dataclass(frozen=True)
class Register:
    """Task to driver: the task is ready for its assignment."""

    registration: TaskRegistration


@dataclass(frozen=True)
class ProbeServers:
    """Driver to task: try to reach these servers of another task."""

    servers: tuple[TaskServer, ...]


@dataclass(frozen=True)
class Reachable:
    """The answer to ``ProbeServers``: the addresses that answered."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Assign:
    """Driver to task: the offers of all tasks, from which each task computes the assignment."""

    offers: tuple[TaskOffer, ...]


@dataclass(frozen=True)
class AwaitTaskEnd:
    """Driver to task: answer ``Acknowledged`` when the task has ended. A broken connection means a lost task."""


@dataclass(frozen=True)
class TaskRunning:
    """The answer to ``AwaitTaskEnd``, every few seconds while the task runs."""


@dataclass(frozen=True)
class FindTask:
    """Remote-shell agent to driver: find the task that executes commands on this host of ``mpirun``."""

    host: str


@dataclass(frozen=True)
class TaskAddress:
    """The answer to ``FindTask``: the server of the task."""

    server: TaskServer


@dataclass(frozen=True)
class ExecuteOrted:
    """Remote-shell agent to task: run ``orted`` with these arguments."""

    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Executed:
    """The answer to ``ExecuteOrted``, once ``orted`` has ended."""

    returncode: int
    output: bytes


@dataclass(frozen=True)
class Rejected:
    """The answer to a request that cannot be fulfilled."""

    reason: str


@dataclass(frozen=True)
class RankConnected:
    """Rank to its host's task: its rank, the world size and the number of ranks on the host, as Open MPI set them."""

    rank: int
    size: int
    local_size: int


@dataclass(frozen=True)
class Preload:
    """The answer to ``RankConnected``: the modules that the rank's worker imports first."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class WorkerForked:
    """Rank to task: its worker process runs."""

    pid: int


@dataclass(frozen=True)
class WorkerEnded:
    """Rank to task: its worker process has ended; negative return codes are signals."""

    returncode: int
    ended_by_launcher: bool


@dataclass(frozen=True)
class OfferSlot:
    """Elastic task to driver: the task can run one worker; ``task_index`` is the number of its lease.

    The answer is ``Acknowledged``, ``Rejected`` while another attempt holds the lease, or ``EndLease``.
    """

    introduction: Introduction


@dataclass(frozen=True)
class NextCommand:
    """Elastic task to driver: asks for its next ``StartWorker``, ``SetRank``, ``StopWorker`` or ``EndLease``."""

    lease: int
    attempt: int


@dataclass(frozen=True)
class StartWorker:
    """Driver to elastic task: start this worker."""

    worker: int


@dataclass(frozen=True)
class SetRank:
    """Driver to elastic task: the rank of a worker in the new generation."""

    worker: int
    rank: int


@dataclass(frozen=True)
class StopWorker:
    """Driver to elastic task: end this worker."""

    worker: int


@dataclass(frozen=True)
class EndLease:
    """Driver to elastic task: end the workers and the task."""


@dataclass(frozen=True)
class WorkerReturned:
    """Elastic task to driver: a part of a worker's pickled result."""

    worker: int
    is_last: bool
    content: bytes


@dataclass(frozen=True)
class WorkerLost:
    """Elastic task to driver: a worker failed; ``content`` is its ``FailureReport``."""

    worker: int
    content: bytes


@dataclass(frozen=True)
class EpochsEnded:
    """Rank 0 of a fit to driver: the records of its epochs, as JSON, for ``epoch_callback``."""

    content: bytes


@dataclass(frozen=True)
class EpochsAnswered:
    """The answer to ``EpochsEnded``: whether the training ends."""

    ends: bool


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
    | OfferSlot
    | NextCommand
    | StartWorker
    | SetRank
    | StopWorker
    | EndLease
    | WorkerReturned
    | WorkerLost
    | EpochsEnded
    | EpochsAnswered
)

_TYPES: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}
_LENGTH = struct.Struct(">I")
_COMPRESSED_FROM_BYTES = 4096
_ZLIB_MARK = b"\x78"  # the first byte of data of zlib, and never of JSON
_MAX_HEADER_BYTES = 64 << 20  # once it is decompressed


def encode(message: Message) -> bytes:
    """Return the bytes of a message. At most one field may be ``bytes``, and it must be a top-level field."""
    header = {"type": type(message).__name__} | dataclasses.asdict(message)
    raw = _raw_field(type(message))
    content = header.pop(raw) if raw else b""
    text = json.dumps(header).encode()
    if len(text) >= _COMPRESSED_FROM_BYTES:
        text = zlib.compress(text, 1)
    return _LENGTH.pack(len(text)) + text + content


def decode(payload: bytes) -> Message:
    """Return the message in ``payload``.

    Raises:
        MessageError: the payload is not a message, or its fields have wrong names or types.
    """
    if len(payload) < _LENGTH.size:
        raise MessageError(f"A message of {counted(len(payload), 'byte')} is too short.")
    (length,) = _LENGTH.unpack_from(payload)
    end = _LENGTH.size + length
    try:
        header = json.loads(_decompressed(payload[_LENGTH.size : end]))
    except (ValueError, RecursionError, zlib.error) as error:
        raise MessageError(f"The message header is not valid JSON: {error}.") from None
    if end > len(payload) or not isinstance(header, dict):
        raise MessageError("The message header is truncated or not a JSON object.")
    name = header.pop("type", None)
    if not isinstance(name, str) or name not in _TYPES:
        raise MessageError(f"Unknown message type {name!r:.100}; expected one of {', '.join(_TYPES)}.")
    kind = _TYPES[name]
    raw, content = _raw_field(kind), payload[end:]
    if content and not raw:
        raise MessageError(f"{name} carries {counted(len(content), 'unexpected byte')} after its header.")
    return from_json_fields(kind, header | {raw: content} if raw else header)


def _decompressed(text: bytes) -> bytes:
    if not text.startswith(_ZLIB_MARK):
        return text
    return zlib.decompressobj().decompress(text, _MAX_HEADER_BYTES)


def _raw_field(kind: type[Message]) -> str:
    """Return the name of the field whose bytes follow the header; empty for messages without one."""
    return next((field.name for field in dataclasses.fields(kind) if field.type == "bytes"), "")
