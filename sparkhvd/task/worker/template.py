"""Warm starts: a process that has imported the frameworks stays behind and forks the workers of later jobs.

This process is the template. The first worker forks it off after its own imports and before it runs any of the user's
code, so the template has nothing left to import. It serves all tasks of an executor, or the
driver. Both find a template by the name of its socket, which depends on its imports. A template ends with the executor
or the driver.
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
from pathlib import Path
from typing import NoReturn
from zipimport import zipimporter

from sparkhvd._util.processes.process_identity import process_start
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
# How long other workers wait for the imports of the worker that splits the template off.
_SPLIT_SECONDS = 60.0
_POLL_SECONDS = 0.02
_MAX_POLL_SECONDS = 2_000_000.0
_MAX_REQUEST_BYTES = 8192
_DESCRIPTORS = 4
# The limit per owner, because each template keeps the memory of its imports: one per framework with an estimator.
_MAX_TEMPLATES = 3
_SOCKETS = Path("/proc/net/unix")
_THREADS = Path("/proc/self/task")
_OPEN_DESCRIPTORS = Path("/proc/self/fd")
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
    """The inputs that determine a worker's state after its imports. Only workers with equal origins share a template.

    Attributes:
        owner: the id of the process with which the template ends. It is the process that starts the workers; in a task
            of Spark, it is the parent, which starts Spark's Python workers and lives as long as the executor.
        command: Python and the modules to import.
        environment: all variables except that of the scratch folder.
        folder: the path, device and inode of the current folder, because another folder may get the same path.
        installed: when packages were last installed or removed; see ``_install_times``.
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
        installed = _install_times(environment.get(IMPORT_PATH, ""))
        folder = Path().stat()  # works even after the folder was removed
        location = str(_CURRENT_FOLDER.readlink()), folder.st_dev, folder.st_ino
        return cls(owner, tuple(command), variables, location, installed, _inherited_state())

    @property
    def address(self) -> str:
        """Return the name of the template's socket. The name is abstract, so no file is left behind."""
        state = repr((self.command, sorted(self.environment), self.folder, self.installed, self.inherited))
        return _prefix(self.owner) + hashlib.sha256(state.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _install_times(import_path: str) -> tuple[int, ...]:
    """Return when the folders with installed packages last changed, in nanoseconds."""
    change_times = []
    for folder in map(Path, sorted({sysconfig.get_path("purelib"), *import_path.split(os.pathsep)})):
        with contextlib.suppress(OSError):  # it does not exist, or is a zip file
            if next(folder.glob("*.dist-info"), None) is not None:
                change_times.append(folder.stat().st_mtime_ns)
    return tuple(change_times)


def _inherited_state() -> tuple[str, ...]:
    """Return the state that a process inherits from this thread when the thread starts it."""
    state = [str(os.getpriority(os.PRIO_PROCESS, 0))]
    for name in _INHERITED_FILES:
        with contextlib.suppress(OSError):  # not every kernel has it
            state.append((_THREAD / name).read_text(errors="replace"))
    status = (_THREAD / "status").read_text(errors="replace").splitlines()
    return *state, *(line for line in status if line.partition(":")[0] in _INHERITED_STATUS)


def _prefix(owner: int) -> str:
    """Return the prefix of the socket names of an owner's templates; it contains the namespace of the process id."""
    return f"\0sparkhvd-warm-{os.geteuid()}-{Path('/proc/self/ns/pid').stat().st_ino}-{owner}-"


class ForkedProcess:
    """A worker that a template forked. The worker's parent reports its end."""

    def __init__(self, pid: int, parent: socket.socket, scratch: str | None) -> None:
        self.pid = pid
        self.scratch = scratch
        self._parent = parent

    def wait(self) -> Exited:
        returncode = _receive_number(self._parent)
        return Exited(-signal.SIGKILL if returncode is None else returncode)  # None if the parent was killed

    def release(self) -> None:
        with self._parent, contextlib.suppress(OSError):
            self._parent.settimeout(_FORK_SECONDS)
            self._parent.shutdown(socket.SHUT_WR)
            self._parent.recv(1)  # returns when the worker's parent has released the id


@dataclass(frozen=True)
class Offer:
    """The descriptors that a worker needs to split a template off; close them once the worker has been started.

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

        If another worker is about to split the template off, this method waits for it. The wait takes as long as this
        worker's own imports would, but uses no processor time and little memory. After a failure, the next workers of
        this origin do not wait.

        Args:
            origin: the origin of the worker.
            descriptors: the worker's private socket, stdout and stderr.

        Returns:
            The worker. If there is no template, the offer with which a new worker can split one off, or None if that is
            not possible. A worker that the template forks too late ends by itself: its private socket closes when the
            caller closes the descriptors. No other worker uses its scratch folder.
        """
        address, deadline = origin.address, Deadline.after(_SPLIT_SECONDS)
        is_first = True
        while (link := _connect(address)) is None:
            if (listener := _bind(address)) is not None:
                if is_first:
                    return _offer(origin, listener)
                listener.close()  # the other worker has ended or cannot split the template off
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
            parent_link, parent_end = socket.socketpair()
            parent_link.settimeout(_FORK_SECONDS)
            with link, parent_end, contextlib.suppress(OSError):
                socket.send_fds(link, [pickle.dumps(scratch)], [*descriptors, parent_end.fileno()])
            if (pid := _receive_number(parent_link)) is not None:
                parent_link.settimeout(None)
                return ForkedProcess(pid, parent_link, scratch)
            parent_link.close()
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
        offer = Offer(listener, descriptor_of(origin.owner))
    except OSError:
        listener.close()
        return None
    _end_oldest(origin.owner, _MAX_TEMPLATES - 1)
    return offer


def descriptor_of(process: int) -> int:
    """Return a descriptor of a process, which becomes readable when the process ends.

    A Python that was built on an old Linux, such as conda's, lacks ``pidfd_open``.

    Raises:
        OSError: the process has ended, or the kernel is older than Linux 5.3.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(process)
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_OPEN, process, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"process {process} cannot be watched")
    return descriptor


def _end_oldest(owner: int, kept: int) -> None:
    """End all templates of an owner except the newest ``kept`` ones."""
    with contextlib.ExitStack() as stack:
        links = [stack.enter_context(link) for name in _addresses(owner) if (link := _connect(name)) is not None]
        links.sort(key=_start_time, reverse=True)
        for link in links[kept:]:
            with contextlib.suppress(OSError):  # it has just ended
                link.sendall(_END)


def _addresses(owner: int) -> set[str]:
    """Return the names of the sockets of the templates of an owner."""
    prefix = _prefix(owner).replace("\0", "@")
    names = (line.split()[-1] for line in _SOCKETS.read_text(errors="replace").splitlines())
    return {name.replace("@", "\0", 1) for name in names if name.startswith(prefix)}


def _start_time(link: socket.socket) -> int:
    """Return when the process at the other end started, in the kernel's ticks."""
    return int(process_start(credentials(link)[0]) or 0)  # 0: it has just ended


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
        if _is_same_user(link):
            return link
    except OSError:
        pass
    link.close()
    return None


def _is_same_user(link: socket.socket) -> bool:
    """Return whether the other end belongs to this user; any user of this host may bind or connect to a name."""
    return credentials(link)[1] == os.geteuid()


def credentials(link: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end: the ones that connected or listened, or created the pair."""
    process, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(process), int(user)


def split_off_template(
    offer: Offer, idle_seconds: float, links: Sequence[int], known_threads: frozenset[int]
) -> int | None:
    """Fork the template, which serves until its owner ends or it is idle for too long.

    Call it in the main thread, because a fork copies only the calling thread. No template is forked if an import has
    started threads, which a fork would end, or the driver of the GPUs, as Keras on PyTorch does.

    Args:
        offer: the template's descriptors, which this function closes.
        idle_seconds: how long the template waits for the next request.
        links: the descriptors that connect this worker to its task, which the template closes.
        known_threads: threads from before the imports that a fork may end: the thread that reads ``links``, and the
            threads of NumPy's BLAS, which starts them again. Other Python threads, such as those that a
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
        ready_reader, ready_writer = os.pipe()
        if os.fork() != 0:
            os.close(ready_writer)
            # Wait until the template has left this worker's process group, so that it does not end with the group, and
            # until it listens, so that the next job finds it.
            _readable([ready_reader], _FORK_SECONDS)
            os.close(ready_reader)
            return None
        try:
            os.close(ready_reader)
            os.setsid()  # the template outlives the process group of this worker
            offer.listener.listen()
            os.close(ready_writer)
            worker_name = _COMMAND_NAME.read_bytes().rstrip(b"\n")
            _COMMAND_NAME.write_text(TEMPLATE_NAME)
            for link in links:
                os.close(link)
            null_device = os.open(os.devnull, os.O_RDWR)
            _redirect(null_device, null_device)
            return _serve(offer, idle_seconds, worker_name)
        except BaseException:  # noqa: BLE001 - an unsupervised process must not run a worker's code
            os._exit(1)


def _serve(offer: Offer, idle_seconds: float, worker_name: bytes) -> int:
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
            _COMMAND_NAME.write_bytes(worker_name)
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
    """Wait until descriptors can be read, and return them; empty after ``seconds``."""
    poll = select.poll()  # select.select does not support large descriptors
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(min(seconds, _MAX_POLL_SECONDS) * 1000)}


def _sources() -> dict[str, tuple[int, int]]:
    """Return the times of the last change and the sizes of the files of all imported modules, and of all zip files."""
    finders = list(sys.path_importer_cache.values())
    paths = {finder.archive for finder in finders if isinstance(finder, zipimporter)}
    for module in list(sys.modules.values()):
        # Use __dict__: some modules import others when an attribute that they lack is read.
        names = getattr(module, "__dict__", {})
        path = getattr(names.get("__loader__"), "archive", names.get("__file__"))  # a module may be in a zip file
        if isinstance(path, str):
            paths.add(path)
    states = {}
    for path in paths:
        with contextlib.suppress(OSError):  # a name without a file
            states[path] = _file_state(path)
    return states


def _file_state(path: str) -> tuple[int, int]:
    state = os.stat(path)  # noqa: PTH116 - thousands of path objects would double the time
    return state.st_mtime_ns, state.st_size


def _have_changed(sources: dict[str, tuple[int, int]]) -> bool:
    try:
        return any(_file_state(path) != state for path, state in sources.items())
    except OSError:  # a file has been removed
        return True


def _receive_request(listener: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next request and its descriptors; empty if the caller is lost or belongs to another user."""
    try:
        link, _ = listener.accept()
        with link:
            link.settimeout(_FORK_SECONDS)
            if _is_same_user(link):
                request, descriptors, _, _ = socket.recv_fds(link, _MAX_REQUEST_BYTES, _DESCRIPTORS)
                return request, descriptors
    except OSError:
        logger.debug("A caller of the warm process was lost.", exc_info=True)
    return b"", []


def _report_end(pid: int, report: socket.socket, worker_descriptors: Sequence[int]) -> NoReturn:
    """Send the id of the worker, then its ``returncode``; keep the id reserved until the other end closes."""
    for descriptor in worker_descriptors:
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
    _forget_contents_of_folders()
    # Generators that were seeded during the imports get a new seed. ``random`` does so itself; TensorFlow seeds later.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _forget_contents_of_folders() -> None:
    """Let imports find modules that were added after the fork of the template.

    ``importlib`` would also read the directories of zip files again, which takes longer than the fork: Spark's Python
    is in such a file. The template ends when one of them changes.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]  # the next one for this path uses the directory that was read before
    importlib.invalidate_caches()


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
    for link in _OPEN_DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # the descriptor that lists the folder
            if str(link.readlink()) in _GPU_DRIVERS:
                return True
    return False


def native_threads() -> frozenset[int]:
    """Return the ids of this process's threads, except threads that a library restarts after a fork."""
    threads = set()
    for folder in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            if (folder / "comm").read_text(errors="replace").strip() not in _RESTARTED_THREADS:
                threads.add(int(folder.name))
    return frozenset(threads)
