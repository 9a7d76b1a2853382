"""Warm starts: a process that has imported the frameworks stays behind and forks the workers of later jobs.

The first worker splits the template off after its own imports and before it runs any of the user's code. So the
template needs no imports of its own. It serves all tasks of an executor, or all workers of a driver: they find it by
the name of its socket, which depends on its imports. It ends with the executor or the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import struct
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from sparkhvd.config import SCRATCH, export
from sparkhvd.deadline import Deadline
from sparkhvd.task.worker.exit import Exited, wait_for_child
from sparkhvd.task.worker.import_path import IMPORT_PATH
from sparkhvd.task.worker.scratch import make_scratch, remove_scratch

logger = logging.getLogger(__name__)

TEMPLATE_NAME = "sparkhvd-warm"  # in the output of ps and top
_COMMAND_NAME = Path("/proc/self/comm")
_NUMBER = struct.Struct("!q")
_CREDENTIALS = struct.Struct("3i")  # the process, user and group at the other end of a socket
_END = b"end"
_FORK_SECONDS = 5.0
# How long workers wait at most for the imports of the worker that splits the template off.
_SPLIT_SECONDS = 60.0
_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 2_000_000.0
_LONGEST_REQUEST = 8192
_DESCRIPTORS = 4
# Each template keeps the memory of its imports. There are as many as there are frameworks with an estimator.
_MOST_TEMPLATES = 3
_SOCKETS = Path("/proc/net/unix")
_THREADS = Path("/proc/self/task")
_DESCRIPTORS_OPEN = Path("/proc/self/fd")
# A process that has opened one of these files has started CUDA or ROCm, which a process forked from it cannot use.
_GPU_DRIVERS = frozenset({"/dev/nvidia-uvm", "/dev/kfd"})
_CURRENT_FOLDER = Path("/proc/self/cwd")
_THREAD = Path("/proc/thread-self")
_INHERITED_FILES = ("limits", "cgroup", "oom_score_adj")
_INHERITED_STATUS = frozenset(
    {"Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "NoNewPrivs", "Cpus_allowed", "Mems_allowed"}
)
_PIDFD_OPEN = 434  # the number of the system call on every platform but Alpha
# Threads of Arrow's allocator, which starts them again after a fork.
_RESTARTED_THREADS = frozenset({"jemalloc_bg_thd"})


@dataclass(frozen=True)
class Origin:
    """The inputs that determine a worker's state after its imports. Only workers of equal origins share a template.

    Attributes:
        owner: the id of the process with which the template ends. It is the process that starts the workers; in a task
            of Spark, it is the parent, which starts Spark's Python workers and lives as long as the executor.
        command: Python and the modules to import.
        environment: all variables except that of the scratch folder.
        folder: the current folder, with its device and inode: another folder may have taken its name.
        installed: when a package was last installed or removed, see ``_installed``.
        inherited: other state that a process inherits from the thread that starts it, such as limits and the umask.
    """

    owner: int
    command: tuple[str, ...]
    environment: frozenset[tuple[str, str]]
    folder: tuple[str, int, int]
    installed: tuple[int, ...]
    inherited: tuple[str, ...]

    @classmethod
    def of(cls, command: Sequence[str], environment: Mapping[str, str]) -> Origin:
        pyspark = sys.modules.get("pyspark")
        in_task = pyspark is not None and pyspark.TaskContext.get() is not None
        variables = frozenset((name, value) for name, value in environment.items() if name != SCRATCH)
        owner = os.getppid() if in_task else os.getpid()
        installed = _installed(environment.get(IMPORT_PATH, ""))
        folder = Path().stat()  # works even after the folder was removed
        location = str(_CURRENT_FOLDER.readlink()), folder.st_dev, folder.st_ino
        return cls(owner, tuple(command), variables, location, installed, _inherited())

    @property
    def address(self) -> str:
        """Return the name of the template's socket. The name is abstract, so no file is left behind."""
        state = repr((self.command, sorted(self.environment), self.folder, self.installed, self.inherited))
        return _prefix(self.owner) + hashlib.sha256(state.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _installed(import_path: str) -> tuple[int, ...]:
    """Return when the folders with installed packages last changed, in nanoseconds."""
    change_times = []
    for folder in map(Path, sorted({sysconfig.get_path("purelib"), *import_path.split(os.pathsep)})):
        with contextlib.suppress(OSError):  # it does not exist, or is a zip file
            if next(folder.glob("*.dist-info"), None) is not None:
                change_times.append(folder.stat().st_mtime_ns)
    return tuple(change_times)


def _inherited() -> tuple[str, ...]:
    """Return the state that a process inherits from this thread when the thread starts it."""
    state = [str(os.getpriority(os.PRIO_PROCESS, 0))]
    for name in _INHERITED_FILES:
        with contextlib.suppress(OSError):  # not every kernel has it
            state.append((_THREAD / name).read_text())
    status = (_THREAD / "status").read_text().splitlines()
    return *state, *(line for line in status if line.partition(":")[0] in _INHERITED_STATUS)


def _prefix(owner: int) -> str:
    """Return the prefix of an owner's template names, with the namespace of its process id."""
    return f"\0sparkhvd-warm-{os.geteuid()}-{Path('/proc/self/ns/pid').stat().st_ino}-{owner}-"


class ForkedProcess:
    """The end of a worker that a template forked; the worker's parent reports it."""

    def __init__(self, pid: int, parent: socket.socket, scratch: str | None) -> None:
        self.pid = pid
        self.scratch = scratch
        self._parent = parent

    def wait(self) -> Exited:
        returncode = _receive_number(self._parent)
        return Exited(-signal.SIGKILL if returncode is None else returncode)  # None: the parent was killed

    def release(self) -> None:
        with self._parent, contextlib.suppress(OSError):
            self._parent.settimeout(_FORK_SECONDS)
            self._parent.shutdown(socket.SHUT_WR)
            self._parent.recv(1)  # returns when the worker's parent has released the id


@dataclass(frozen=True)
class Offer:
    """The descriptors with which a worker splits a template off; close them once the worker has been started.

    Attributes:
        listener: the bound socket of the template, which listens once it is ready.
        owner: a descriptor of the template's owner; it becomes readable when the owner ends.
    """

    listener: socket.socket
    owner: int

    @property
    def descriptors(self) -> tuple[int, int]:
        return self.listener.fileno(), self.owner

    def close(self) -> None:
        self.listener.close()
        os.close(self.owner)


class Templates:
    """The templates that this process can fork workers from."""

    def __init__(self) -> None:
        self._failed: set[int] = set()  # hashes of origins whose template did not become ready

    def fork(self, origin: Origin, descriptors: Sequence[int]) -> ForkedProcess | Offer | None:
        """Fork a worker from the template of its origin.

        If another worker is about to split the template off, wait for it. The wait is as long as this worker's own
        imports would be, but uses no processor time and little memory. After a failure, the origin's next workers do
        not wait.

        Args:
            origin: the origin of the worker.
            descriptors: the worker's private socket, stdout and stderr.

        Returns:
            The worker. If there is no template, an offer for a new worker to split it off; None if that is not
            possible. A worker that is forked too late ends, because its private socket is closed once the caller has
            closed the descriptors. No other worker has its scratch folder.
        """
        address, deadline = origin.address, Deadline.after(_SPLIT_SECONDS)
        is_first = True
        while (link := _connect(address)) is None:
            if (listener := _bind(address)) is not None:
                if is_first:
                    return _offer(origin, listener)
                listener.close()  # the other worker has ended, or cannot split the template off
                self._failed.add(hash(origin))
            if deadline.expired():  # another process has taken the name and does not answer
                self._failed.add(hash(origin))
            if hash(origin) in self._failed:
                return None
            is_first = False
            time.sleep(_POLL_SECONDS)
        self._failed.discard(hash(origin))
        scratch = make_scratch()  # after the wait, because this process may be killed during the wait
        try:
            own, other = socket.socketpair()
            own.settimeout(_FORK_SECONDS)
            with link, other, contextlib.suppress(OSError):
                socket.send_fds(link, [pickle.dumps(scratch)], [*descriptors, other.fileno()])
            if (pid := _receive_number(own)) is not None:
                own.settimeout(None)
                return ForkedProcess(pid, own, scratch)
            own.close()
        except BaseException:
            remove_scratch(scratch)
            raise
        remove_scratch(scratch)
        return None

    def close(self) -> None:
        """End the templates that this process owns; the workers that they forked continue."""
        _end_oldest(os.getpid(), 0)


def _offer(origin: Origin, listener: socket.socket) -> Offer | None:
    try:
        offer = Offer(listener, _descriptor_of(origin.owner))
    except OSError:  # the owner has just ended, or the kernel is older than Linux 5.3
        listener.close()
        return None
    _end_oldest(origin.owner, _MOST_TEMPLATES - 1)
    return offer


def _descriptor_of(process: int) -> int:
    """Return a descriptor of a process; a Python built on an old Linux, such as conda's, lacks ``pidfd_open``."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(process)
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, process, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"process {process} cannot be watched")
    return descriptor


def _end_oldest(owner: int, spared: int) -> None:
    """End the templates of an owner, except for the ``spared`` newest."""
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(link) for name in _addresses(owner) if (link := _connect(name)) is not None]
        links.sort(key=_start_time, reverse=True)
        for link in links[spared:]:
            with contextlib.suppress(OSError):  # it has just ended
                link.sendall(_END)


def _addresses(owner: int) -> set[str]:
    """Return the names of the sockets of the templates of an owner."""
    prefix = _prefix(owner).replace("\0", "@")
    names = (line.split()[-1] for line in _SOCKETS.read_text(errors="replace").splitlines())
    return {name.replace("@", "\0", 1) for name in names if name.startswith(prefix)}


def _start_time(link: socket.socket) -> int:
    """Return when the process at the other end started, in the kernel's ticks."""
    with contextlib.suppress(OSError):  # it has just ended
        return int(Path(f"/proc/{_credentials(link)[0]}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def _bind(address: str) -> socket.socket | None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        return None
    return listener


def _connect(address: str) -> socket.socket | None:
    """Return a connection to a template that listens."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.settimeout(_FORK_SECONDS)
        link.connect(address)
        if _is_own(link):
            return link
    except OSError:
        pass
    link.close()
    return None


def _is_own(link: socket.socket) -> bool:
    """Return whether the other end belongs to this user: anyone on this host may bind or connect to a name."""
    return _credentials(link)[1] == os.geteuid()


def _credentials(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    process, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(process), int(user)


def split_off_template(
    offer: Offer, idle_seconds: float, control: Connection, known_threads: frozenset[int]
) -> int | None:
    """Fork the template, which serves until its owner ends or it is idle for too long.

    Call it in the main thread, because a fork copies only the calling thread. No template is forked if an import has
    started threads that its library needs, or has started the driver of the GPUs, as Keras on PyTorch does.

    Args:
        offer: the template's descriptors, which this function closes.
        idle_seconds: how long the template waits for the next request.
        control: this worker's private socket, which the template closes.
        known_threads: threads from before the imports that a fork may lose: the thread that reads ``control``, and the
            threads of NumPy's BLAS, which starts them again. Other threads of Python, such as those that a
            ``sitecustomize`` starts, are not among them.

    Returns:
        None in this process; in every worker that the template forks, the descriptor of its private socket.
    """
    with contextlib.closing(offer):
        if native_threads() - known_threads:
            logger.debug("No warm start: an import has started threads, which a fork would end.")
            return None
        if _has_started_gpu_driver():
            logger.debug("No warm start: an import has started the driver of the GPUs, which a fork would break.")
            return None
        waiting, leaving = os.pipe()
        if os.fork() != 0:
            os.close(leaving)
            # The end of this worker's process group must not end the template, and a job that follows must find it.
            _readable([waiting], _FORK_SECONDS)
            os.close(waiting)
            return None
        try:
            os.close(waiting)
            os.setsid()  # the template outlives the process group of this worker
            offer.listener.listen()
            os.close(leaving)
            own_name = _COMMAND_NAME.read_text().rstrip("\n")
            _COMMAND_NAME.write_text(TEMPLATE_NAME)
            control.close()
            null_device = os.open(os.devnull, os.O_RDWR)
            _redirect(null_device, null_device)
            return _serve(offer, idle_seconds, own_name)
        except BaseException:  # noqa: BLE001 - an unsupervised process must not run a worker's code
            os._exit(1)


def _serve(offer: Offer, idle_seconds: float, name: str) -> int:
    """Fork a worker for every request; return only in a worker."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the parents of the workers
    sources = _sources()
    while True:
        ready = _readable(offer.descriptors, idle_seconds)
        if offer.listener.fileno() not in ready or offer.owner in ready:
            os._exit(0)
        request, descriptors = _receive_request(offer.listener)
        if request == _END or _have_changed(sources):
            os._exit(0)
        # A separate process waits for the worker, so that the template may end first.
        if len(descriptors) == _DESCRIPTORS and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _COMMAND_NAME.write_text(name)
            control, stdout, stderr, report = descriptors
            if (pid := os.fork()) != 0:
                offer.close()
                _report_end(pid, socket.socket(fileno=report), (control, stdout, stderr))
            os.close(report)
            _become_worker(stdout, stderr, pickle.loads(request))
            return control
        for descriptor in descriptors:
            os.close(descriptor)


def _readable(descriptors: Sequence[int], seconds: float) -> set[int]:
    """Wait until one of the descriptors can be read; their numbers may be too large for ``select``."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(min(seconds, _LONGEST_POLL_SECONDS) * 1000)}


def _sources() -> dict[str, tuple[int, int]]:
    """Return when the files of all imported modules were last changed, and their sizes."""
    states = {}
    for module in list(sys.modules.values()):
        # Use __dict__: some modules import others when an attribute that they lack is read.
        names = getattr(module, "__dict__", {})
        path = getattr(names.get("__loader__"), "archive", names.get("__file__"))  # a module may be in a zip file
        with contextlib.suppress(OSError):  # a name without a file
            if isinstance(path, str):
                states[path] = _file_state(path)
    return states


def _file_state(path: str) -> tuple[int, int]:
    state = os.stat(path)  # noqa: PTH116 - a path object for each of thousands takes as long as this
    return state.st_mtime_ns, state.st_size


def _have_changed(sources: dict[str, tuple[int, int]]) -> bool:
    try:
        return any(_file_state(path) != state for path, state in sources.items())
    except OSError:  # a file has been removed
        return True


def _receive_request(listener: socket.socket) -> tuple[bytes, list[int]]:
    """Return the request of the next caller and its descriptors; nothing for a caller of another user."""
    try:
        link, _ = listener.accept()
        with link:
            link.settimeout(_FORK_SECONDS)
            if _is_own(link):
                request, descriptors, _, _ = socket.recv_fds(link, _LONGEST_REQUEST, _DESCRIPTORS)
                return request, descriptors
    except OSError:
        logger.debug("A caller of the warm process was lost.", exc_info=True)
    return b"", []


def _report_end(pid: int, report: socket.socket, of_worker: Sequence[int]) -> NoReturn:
    """Send the id of the worker, then its ``returncode``; keep the id reserved until the link closes."""
    for descriptor in of_worker:
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the process that started the worker is gone
        report.sendall(_NUMBER.pack(pid))
        report.sendall(_NUMBER.pack(wait_for_child(pid)))
        report.recv(1)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    os._exit(0)


def _become_worker(stdout: int, stderr: int, scratch: str | None) -> None:
    """Give this process the state of a newly started one."""
    os.setsid()
    _redirect(stdout, stderr)
    export({SCRATCH: scratch})
    importlib.invalidate_caches()
    # Generators that were seeded during the imports get a new seed. ``random`` does so itself; TensorFlow seeds later.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _redirect(stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in {stdout, stderr}:
        os.close(descriptor)


def _receive_number(link: socket.socket) -> int | None:
    try:
        received = link.recv(_NUMBER.size, socket.MSG_WAITALL)
    except OSError:
        return None
    return int(_NUMBER.unpack(received)[0]) if len(received) == _NUMBER.size else None


def _has_started_gpu_driver() -> bool:
    for link in _DESCRIPTORS_OPEN.iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder
            if str(link.readlink()) in _GPU_DRIVERS:
                return True
    return False


def native_threads() -> frozenset[int]:
    """Return the ids of this process's threads, except those that a library starts again after a fork."""
    threads = set()
    for folder in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if (folder / "comm").read_text().strip() not in _RESTARTED_THREADS:
                threads.add(int(folder.name))
    return frozenset(threads)
