"""The messages between a task and its worker process over their private socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkhvd.comm.connect.commit_folder import CommitFolder
from sparkhvd.comm.connect.launch_context import LaunchContext


@dataclass(frozen=True)
class WorkerSpec:
    """Task to worker: the worker's rank and the function to run.

    Attributes:
        context: the launch context of the rank.
        payload: the pickled function and its arguments.
        variables: environment variables for ``fn``.
        import_path: the ``PYTHONPATH`` of ``fn``, see ``task.worker.import_path``; None removes it.
        commits: where an elastic job publishes commits.
    """

    context: LaunchContext
    payload: bytes = field(repr=False)
    variables: tuple[tuple[str, str], ...]
    import_path: str | None
    commits: CommitFolder | None = None


@dataclass(frozen=True)
class Ready:
    """Worker to task: modules are imported and ``fn`` starts."""


@dataclass(frozen=True)
class Joined:
    """Worker to task: ``init()`` has connected the rank to the others."""


@dataclass(frozen=True)
class FnEnded:
    """Worker to task: ``fn`` has ended; ``Returned`` or ``Raised`` follows within ``seconds``."""

    seconds: float


@dataclass(frozen=True)
class Returned:
    """Worker to task: the pickled result of ``fn``."""

    content: bytes = field(repr=False)


@dataclass(frozen=True)
class Raised:
    """Worker to task: the rank failed.

    Attributes:
        cause: completes "Rank 1 on host X ...".
        traceback: the Python traceback, or empty.
        secondary: whether the loss of another rank was the cause.
        phase: the phase of the rank; None means the phase that the task knows, empty means that ``cause`` contains it.
        error: see ``FailureReport``.
        is_final: see ``FailureReport``.
    """

    cause: str
    traceback: str
    secondary: bool
    phase: str | None = None
    error: str = ""
    is_final: bool = False


@dataclass(frozen=True)
class Leave:
    """Task to worker: the outcome is published; end within ``seconds`` or be killed."""

    seconds: float
