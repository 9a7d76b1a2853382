"""The state of a process and its neighbors: the stacks of its threads, and which processes are alive."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sparkhvd._util.processes.process_identity import process_start, state_and_start
from sparkhvd.errors import CollectiveError

_MAX_FRAMES = 15
_MAX_THREADS = 20
_STATE_TEXTS = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "Z": "has ended", "X": "has ended"}


@dataclass(frozen=True)
class ProcessIdentity:
    """How other processes of the host identify a rank's process.

    Attributes:
        host: name of the host.
        pid: the process id within ``namespace``.
        namespace: the namespace of process ids; the pid is valid only in it.
        started: start time in the kernel's ticks, because pids are reused.
    """

    host: str
    pid: int
    namespace: str
    started: str


@dataclass(frozen=True)
class PendingCollective:
    """A collective that a rank has submitted and that is not done.

    Attributes:
        title: such as ``allreduce 'grad/7'``.
        age: seconds since it was submitted.
        process_set: the number of its process set; 0 is all ranks.
    """

    title: str
    age: float
    process_set: int = 0

    def __str__(self) -> str:
        return self.title if self.process_set == 0 else f"{self.title} of process set {self.process_set}"


@dataclass(frozen=True)
class Condition:
    """A rank's answer to the question of the stall detector.

    Attributes:
        pending: the collectives that it waits for.
        operations: how many collectives it has completed.
        idle: seconds since that number last changed.
        progress: the text of ``note_progress()``; empty without one.
        stacks: what each thread is executing, by the thread's name, the main thread first; empty in the answer itself,
            because they are published separately.
        neighbours: the problems of processes of its host, by rank; healthy ones are left out.
    """

    pending: tuple[PendingCollective, ...] = ()
    operations: int = 0
    idle: float = 0.0
    progress: str = ""
    stacks: Mapping[str, str] = field(default_factory=dict)
    neighbours: Mapping[int, str] = field(default_factory=dict)

    @property
    def longest_wait(self) -> float:
        """Return the seconds that the rank has waited for a collective."""
        return max((collective.age for collective in self.pending), default=0.0)


def own_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    return ProcessIdentity(socket.gethostname(), os.getpid(), _namespace(), process_start(os.getpid()))


def process_problem(process: ProcessIdentity) -> str | None:
    """Return the problem of a process of this host: "has ended", "is stopped by a signal"; None for a healthy one.

    Also None for processes that are not visible from here.
    """
    if process.host != socket.gethostname() or process.namespace != _namespace():
        return None
    try:
        state, started = state_and_start(process.pid)
    except OSError:
        return "has ended"
    if started != process.started:
        return "has ended"
    return _STATE_TEXTS.get(state)


def stacks(without: threading.Thread | None = None) -> dict[str, str]:
    """Return the Python stack of every thread by name, the main thread first; works while other threads are busy."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, the only way to see other threads
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    stack_of: dict[str, str] = {}
    for thread in threads[:_MAX_THREADS]:
        frame = frames.get(thread.ident or 0)
        if frame is None or thread is without:
            continue
        summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_MAX_FRAMES)
        summary.reverse()
        stack_of[thread.name] = "".join(summary.format())
    return stack_of


def encode(value: ProcessIdentity | Condition) -> bytes:
    """Return the value as JSON for the rendezvous, so that no rank unpickles content that another rank published."""
    return json.dumps(asdict(value)).encode()


def decode_identity(content: bytes) -> ProcessIdentity:
    """Decode the identity that ``encode`` encoded.

    Raises:
        CollectiveError: the content is not an encoded identity.
    """
    try:
        return ProcessIdentity(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise CollectiveError(f"The identity that a rank published cannot be read: {error}") from error


def decode_condition(content: bytes) -> Condition:
    """Decode the condition that ``encode`` encoded.

    Raises:
        CollectiveError: the content is not an encoded condition.
    """
    try:
        fields = json.loads(content)
        fields["pending"] = tuple(PendingCollective(**collective) for collective in fields["pending"])
        fields["neighbours"] = {int(rank): str(what) for rank, what in fields["neighbours"].items()}
        return Condition(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CollectiveError(f"The condition that a rank published cannot be read: {error}") from error


def decode_stacks(content: bytes) -> dict[str, str]:
    """Decode the JSON of a rank's stacks.

    Raises:
        CollectiveError: the content is something else.
    """
    try:
        return {str(thread): str(stack) for thread, stack in json.loads(content).items()}
    except (ValueError, AttributeError) as error:
        raise CollectiveError(f"The stacks that a rank published cannot be read: {error}") from error


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
