"""The part of the preflight that runs in Spark tasks: each task examines its host, the network and the Store."""

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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

import sparkhvd
from sparkhvd._util.addresses import address_to_bind, is_loopback
from sparkhvd.compat.spark import pyspark_version
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.interfaces import candidates
from sparkhvd.rpc.messages import Message
from sparkhvd.rpc.protection import encryption_problem
from sparkhvd.rpc.server import Server
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.host.versions import installed_versions, packages_of_frameworks
from sparkhvd.task.result_rows import row
from sparkhvd.task.task_info import TaskInfo, current_task_info

EXAMINATION = "examination"
_PACKAGES = ("numpy", "pyarrow")
_CONNECT_SECONDS = 3.0
_MAX_PARALLEL = 16
DRIVER = -1  # the driver's index, for ``secret_of``


@dataclass(frozen=True)
class ExaminationRequest:
    """The request of the driver for an examination.

    Attributes:
        secret: the secret of connections between tasks.
        probe: a pickled ``StoreProbe``, so that an executor without the Store's package can report that; None without
            a Store.
        nics: network interfaces that the ranks will use; empty for any.
        encrypt: whether the ranks will encrypt their traffic.
        driver: addresses of a server on the driver; empty if it has none.
    """

    secret: bytes = field(repr=False)
    probe: bytes | None = field(default=None, repr=False)
    nics: tuple[str, ...] = ()
    encrypt: bool = False
    driver: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Examination:
    """The findings of one task.

    Attributes:
        task_index: the index of the task.
        host: the name of the task's host in the cluster.
        host_hash: equal for tasks that may share memory.
        versions: the versions of Python, sparkhvd and the installed packages that matter.
        cpus: the number of the task's cores.
        devices: the GPUs that Spark assigned to the task.
        device_kind: the kind of GPU of the task's rank; empty without a GPU.
        shared_memory: the size of /dev/shm in bytes.
        orted: whether Open MPI's orted is on the PATH.
        unreachable: an error message for every host that the task cannot reach.
        store: the problem with the Store; empty if there is none.
        store_answer: the name of the task's answer in the Store; empty without a Store.
        encryption: why the task cannot encrypt; empty if it can or need not.
        driver_problem: why the task cannot connect to the driver; empty if it can or was not asked to.
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
    driver_problem: str = ""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Examination:
        fields: dict[str, Any] = json.loads(content)
        return cls(**{**fields, **{name: tuple(fields[name]) for name in ("devices", "unreachable")}})


class IgnoreMessages:
    """A handler that ignores messages: a completed handshake proves that the server is reachable."""

    def handle(self, message: Message) -> Message | None:  # noqa: ARG002 - the protocol of a server
        return None


def versions() -> dict[str, str]:
    """Return the versions of Python, sparkhvd, pyspark and the installed packages that matter."""
    main_versions = {
        "python": platform.python_version(),
        "sparkhvd": sparkhvd.__version__,
        "pyspark": pyspark_version(),
    }
    return {**main_versions, **installed_versions((*_PACKAGES, *packages_of_frameworks()))}


def examine_task(request: ExaminationRequest, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Examine the host of a barrier task, and yield one row of ``RESULT_SCHEMA``."""
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - the driver imports this module, too

    for _ in batches:  # Spark requires its input to be read
        continue
    context, task = BarrierTaskContext.get(), current_task_info()
    addresses, nics_problems = _addresses(request.nics, task)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="sparkhvd-preflight-store"))
        secret = secret_of(task.index, request.secret)
        servers = [
            stack.enter_context(Server(secret, IgnoreMessages(), address, name="sparkhvd-preflight"))
            for address in addresses
        ]
        listening = [(address, server.port) for address, server in zip(addresses, servers, strict=True)]
        # The Store is checked in parallel with the network, because both may be slow.
        store_answer = pool.submit(_check_store, request.probe, f"{task.index}-{task.attempt}")
        driver_problem = _driver_problem(request)
        own_report = {"index": task.index, "host": task.host, "key": host_hash(), "addresses": listening}
        reports = [json.loads(message) for message in context.allGather(json.dumps(own_report))]
        unreachable = (*nics_problems, *_unreachable(own_report, reports, request.secret))
        store_problem, answer_name = store_answer.result()
        has_several_hosts = len({report["key"] for report in reports}) > 1
        if has_several_hosts:  # skipped on a single host, where tasks try no servers: a barrier takes up to a second
            context.barrier()  # servers stay open until all tasks have tried them
    encryption = encryption_problem(task.host) if request.encrypt else ""
    examination = _examination(task, unreachable, store_problem, answer_name, encryption, driver_problem)
    yield row(task.index, EXAMINATION, 0, examination.to_json())


def examine_host(request: ExaminationRequest, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Examine the host of an ordinary task, which tries no other host, and yield one row of ``RESULT_SCHEMA``."""
    from pyspark import TaskContext  # noqa: PLC0415 - the driver imports this module, too

    for _ in batches:  # Spark requires its input to be read
        continue
    context, task = TaskContext.get(), current_task_info()
    number = 0 if context is None else context.partitionId()
    _, nics_problems = _addresses(request.nics, task)
    store_problem, answer_name = _check_store(request.probe, f"{number}-{task.attempt}")
    encryption = encryption_problem(task.host) if request.encrypt else ""
    driver_problem = _driver_problem(request)
    examination = _examination(task, nics_problems, store_problem, answer_name, encryption, driver_problem)
    yield row(number, EXAMINATION, 0, replace(examination, task_index=number).to_json())


def _addresses(nics: Sequence[str], task: TaskInfo) -> tuple[list[str], tuple[str, ...]]:
    """Return the addresses that the rank of a task would offer, and the problems with ``nics`` on this host.

    Task 0 offers only the address at which it serves the rendezvous. Other tasks offer all addresses, or only one if
    all tasks run on this machine.
    """
    nics_problems: tuple[str, ...] = ()
    preferred = address_to_bind(task.host, task.hosts)
    try:
        interface_addresses = [interface.address for interface in candidates(nics, task.host, task.hosts)]
    except LaunchError as error:
        interface_addresses, nics_problems = [], (str(error).rstrip("."),)
    if nics and interface_addresses:
        offered = interface_addresses
    else:
        offered = list(dict.fromkeys([preferred, *interface_addresses]))
    return (offered[:1] if task.index == 0 or is_loopback(preferred) else offered), nics_problems


def secret_of(index: int, secret: bytes) -> bytes:
    """Return the secret of one task's servers, or of the driver's with ``DRIVER``.

    Secrets differ because hosts may share an address, as on Docker's bridges. With equal secrets, a task could mistake
    its own server for another task's.
    """
    return hmac.digest(secret, f"task {index}".encode(), hashlib.sha256)


def _driver_problem(request: ExaminationRequest) -> str:
    """Return why this task cannot connect to the driver; empty if it can, or if the driver has no server."""
    if not request.driver:
        return ""
    try:
        connect(request.driver, secret_of(DRIVER, request.secret), Deadline.after(_CONNECT_SECONDS)).close()
    except OSError as error:
        return str(error).rstrip(".")
    return ""


def _examination(  # noqa: PLR0917
    task: TaskInfo,
    unreachable: tuple[str, ...],
    store_problem: str,
    answer_name: str,
    encryption: str,
    driver_problem: str,
) -> Examination:
    return Examination(
        task_index=task.index,
        host=task.host,
        host_hash=host_hash(),
        versions=versions(),
        cpus=task.cpus,
        devices=task.devices,
        device_kind=task.device_kind,
        shared_memory=_size_of_shared_memory(),
        orted=shutil.which("orted") is not None,
        unreachable=unreachable,
        store=store_problem,
        store_answer=answer_name,
        encryption=encryption,
        driver_problem=driver_problem,
    )


def _size_of_shared_memory() -> int:
    try:
        status = os.statvfs("/dev/shm")  # noqa: S108 - nothing is put there
    except OSError:
        return 0
    return status.f_blocks * status.f_frsize


def _unreachable(own_report: Mapping[str, Any], reports: Sequence[Mapping[str, Any]], secret: bytes) -> tuple[str, ...]:
    """Return an error for each host that this task cannot reach.

    The first task of each host tries the first task of every other host.
    """
    first_tasks: dict[str, Mapping[str, Any]] = {}
    for task in sorted(reports, key=lambda report: int(report["index"])):
        first_tasks.setdefault(str(task["key"]), task)
    if first_tasks[str(own_report["key"])]["index"] != own_report["index"]:
        return ()

    def attempt(task: Mapping[str, Any]) -> str:
        try:
            addresses = [(address, port) for address, port in task["addresses"]]
            connect(
                addresses, secret_of(task["index"], secret), Deadline.after(_CONNECT_SECONDS * len(addresses))
            ).close()
        except OSError as error:
            return f"{own_report['host']} cannot reach {task['host']}: {error}".rstrip(".")
        return ""

    others = [task for key, task in first_tasks.items() if key != own_report["key"]]
    with ThreadPoolExecutor(_MAX_PARALLEL, thread_name_prefix="sparkhvd-preflight") as pool:
        return tuple(problem for problem in pool.map(attempt, others) if problem)


def _check_store(probe: bytes | None, name: str) -> tuple[str, str]:
    if probe is None:
        return "", ""
    try:
        return str(pickle.loads(probe).answer(name)), name
    except ImportError as error:
        return f"cannot use it: {error}", name
