"""What a task and its worker process tell each other over their private socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkhvd.comm.connect.launch_context import LaunchContext


@dataclass(frozen=True)
class WorkerSpec:
    """Task to worker: which rank it is and what to run.

    Attributes:
        context: its place in the job.
        payload: the pickled function and its arguments.
        variables: what ``fn`` finds in its environment.
        import_path: what it finds as ``PYTHONPATH``, see ``task.import_path``; None is nothing.
    """

    context: LaunchContext
    payload: bytes = field(repr=False)
    variables: tuple[tuple[str, str], ...]
    import_path: str | None


@dataclass(frozen=True)
class Ready:
    """Worker to task: the modules are imported, ``fn`` is about to run."""


@dataclass(frozen=True)
class Joined:
    """Worker to task: ``init()`` has connected it to the other ranks."""


@dataclass(frozen=True)
class FnEnded:
    """Worker to task: ``fn`` has ended; ``Returned`` or ``Raised`` follows within ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class Returned:
    """Worker to task: ``fn`` returned this, pickled."""

    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Raised:
    """Worker to task: ``fn`` did not return.

    Attributes:
        cause: completes "Rank 1 on host X ...".
        traceback: Python's, or empty.
        secondary: whether the loss of another rank was the cause.
        phase: how far the rank was; None is within ``fn``, empty where ``cause`` says it.
    """

    cause: str
    traceback: str
    secondary: bool
    phase: str | None = None


@dataclass(frozen=True)
class Leave:
    """Task to worker: the outcome is noted, end within ``seconds``; the worker is killed then."""

    seconds: float
