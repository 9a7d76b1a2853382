"""What a Spark task finds out about its place before a job: the part of the preflight that runs on the cluster."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pickle
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

import sparkhvd
from sparkhvd._util.addresses import address_to_bind, is_loopback
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.messages import Message
from sparkhvd.rpc.protection import encryption_problem
from sparkhvd.rpc.server import Server
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.versions import FRAMEWORKS, installed_versions
from sparkhvd.task.result_rows import row
from sparkhvd.task.task_info import TaskInfo, current_task_info

EXAMINATION = "examination"
_PACKAGES = ("numpy", "pyarrow", *FRAMEWORKS)
_REACH_SECONDS = 3.0
_AT_ONCE = 16


@dataclass(frozen=True)
class Question:
    """What the driver wants to know.

    Attributes:
        secret: of the connections that tasks make to each other.
        probe: of a Store, pickled, so that an executor without the package of the Store can say so; None is no Store.
        nics: network interfaces that the ranks will use; empty leaves the choice open.
        encrypt: whether they will encrypt what they send.
    """

    secret: bytes = field(repr=False)
    probe: bytes | None = field(default=None, repr=False)
    nics: tuple[str, ...] = ()
    encrypt: bool = False


@dataclass(frozen=True)
class Examination:
    """What one task found.

    Attributes:
        task_index: its number.
        host: how the cluster calls its host.
        host_hash: equal for tasks that may share memory.
        versions: of Python, sparkhvd and the packages that are there.
        cpus: its cores.
        devices: the GPUs that Spark gave it.
        device_kind: what its rank would compute on; empty without a GPU.
        shared_memory: size of /dev/shm in bytes.
        orted: whether Open MPI's orted is on the PATH.
        unreachable: a sentence for every host that it cannot reach.
        store: what is wrong with the Store, empty when nothing is.
        store_answer: under which name it answered in the Store, empty when it was not asked.
        encryption: why it cannot encrypt, empty when it can or need not.
    """

    task_index: int
    host: str
    host_hash: str
    versions: Mapping[str, str]
    cpus: int
    devices: tuple[str, ...]
    device_kind: str
    shared_memory: int
    orted: bool
    unreachable: tuple[str, ...] = ()
    store: str = ""
    store_answer: str = ""
    encryption: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Examination:
        fields: dict[str, Any] = json.loads(content)
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("devices", "unreachable")}})


class _Silent:
    """Whoever reaches this server has proved the secret, which is all that is asked."""

    def handle(self, message: Message) -> Message | None:  # noqa: ARG002 - the protocol of a server
        return None


def versions() -> dict[str, str]:
    """The versions of Python, sparkhvd and of the packages that matter, where they are installed."""
    return {"python": platform.python_version(), "sparkhvd": sparkhvd.__version__, **installed_versions(_PACKAGES)}


def examine_task(question: Question, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Look around from inside a barrier task; yields one row of ``RESULT_SCHEMA``."""
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - the driver imports this module, too

    for _ in batches:  # Spark wants its input read
        continue
    context, place = BarrierTaskContext.get(), current_task_info()
    addresses, unknown = _addresses(question.nics, place)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="sparkhvd-preflight-store"))
        secret = _secret_of(place.index, question.secret)
        servers = [
            stack.enter_context(Server(secret, _Silent(), address, name="sparkhvd-preflight")) for address in addresses
        ]
        listening = [(address, server.port) for address, server in zip(addresses, servers, strict=True)]
        # A Store far away takes as long as hosts that do not answer.
        answered = pool.submit(_asked_store, question.probe, f"{place.index}-{place.attempt}")
        own = {"index": place.index, "host": place.host, "key": host_hash(), "addresses": listening}
        gathered = [json.loads(message) for message in context.allGather(json.dumps(own))]
        unreachable = (*unknown, *_unreachable(own, gathered, question.secret))
        trouble, name = answered.result()
        if len({one["key"] for one in gathered}) > 1:  # on one host nobody tries any; Spark takes up to a second
            context.barrier()  # nobody closes its server before all have tried it
    encryption = encryption_problem(place.host) if question.encrypt else ""
    found = _examination(place, unreachable, trouble, name, encryption)
    yield row(place.index, EXAMINATION, 0, found.to_json())


def _addresses(nics: Sequence[str], place: TaskInfo) -> tuple[list[str], tuple[str, ...]]:
    """Where the rank of a task will be reached, and what is wrong with ``nics`` here.

    The ranks meet at one address of task 0's host; otherwise each offers all that it has.
    """
    unknown: tuple[str, ...] = ()
    first = address_to_bind(place.host, place.hosts)
    try:
        more = [one.address for one in candidates(nics, place.host, place.hosts)]
    except LaunchError as error:
        more, unknown = [], (str(error).rstrip("."),)
    offered = more if nics and more else list(dict.fromkeys([first, *more]))
    return (offered[:1] if place.index == 0 or is_loopback(first) else offered), unknown


def _secret_of(index: int, secret: bytes) -> bytes:
    """What a task's servers take: where hosts have an address in common, as bridges of Docker, nobody finds his own."""
    return hmac.digest(secret, f"task {index}".encode(), hashlib.sha256)


def _examination(
    place: TaskInfo, unreachable: tuple[str, ...], trouble: str, name: str, encryption: str
) -> Examination:
    return Examination(
        task_index=place.index,
        host=place.host,
        host_hash=host_hash(),
        versions=versions(),
        cpus=place.cpus,
        devices=place.devices,
        device_kind=place.device_kind,
        shared_memory=_size_of_shared_memory(),
        orted=shutil.which("orted") is not None,
        unreachable=unreachable,
        store=trouble,
        store_answer=name,
        encryption=encryption,
    )


def _size_of_shared_memory() -> int:
    try:
        found = os.statvfs("/dev/shm")  # noqa: S108 - nothing is put there
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize


def _unreachable(own: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], secret: bytes) -> tuple[str, ...]:
    """What keeps this task from the other hosts; the first task of each host tries the first one of every other."""
    firsts: dict[str, Mapping[str, Any]] = {}
    for task in sorted(tasks, key=lambda one: int(one["index"])):
        firsts.setdefault(str(task["key"]), task)
    if firsts[str(own["key"])]["index"] != own["index"]:
        return ()

    def attempt(task: Mapping[str, Any]) -> str:
        try:
            addresses = [(address, port) for address, port in task["addresses"]]
            connect(
                addresses, _secret_of(task["index"], secret), Deadline.after(_REACH_SECONDS * len(addresses))
            ).close()
        except OSError as error:
            return f"{own['host']} cannot reach {task['host']}: {error}".rstrip(".")
        return ""

    others = [task for key, task in firsts.items() if key != own["key"]]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sparkhvd-preflight") as pool:
        return tuple(sentence for sentence in pool.map(attempt, others) if sentence)


def _asked_store(probe: bytes | None, name: str) -> tuple[str, str]:
    if probe is None:
        return "", ""
    try:
        return str(pickle.loads(probe).answer(name)), name
    except ImportError as error:
        return f"cannot use it: {error}", name
