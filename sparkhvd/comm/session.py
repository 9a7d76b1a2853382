"""The communicator of this process: ``init()``, ``shutdown()``, ``current()``, and this process's place in its job.

This holds the one mutable variable of the package, because ``hvd.init()`` and ``hvd.rank()`` are functions by contract.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from threading import Lock

from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.launch_context import LaunchContext
from sparkhvd.config import from_environment, notice_without_effect
from sparkhvd.errors import ConfigError, NotInitializedError


@dataclass
class _Session:
    lock: Lock = field(default_factory=Lock)  # guards all writes below; readers of `communicator` take no lock
    context: LaunchContext | None = None  # None: no launcher has said anything
    communicator: Communicator | None = None
    inits: int = 0  # every rank counts alike, so it names the scope in which the ranks meet


_session = _Session()


def offer(context: LaunchContext) -> None:
    """Tell the next ``init()`` how to find the other ranks; called by launchers before any user code.

    Raises:
        ConfigError: the process is already initialized.
    """
    with _session.lock:
        if _session.communicator is not None:
            raise ConfigError("A launch context came after init(); call shutdown() before offering another one.")
        _session.context = context
        _session.inits = 0


def init() -> None:
    """Connect this process to the other ranks of its job; without a launcher it is a job of one rank.

    Collective: every rank must call it. Calling it again without ``shutdown()`` does nothing; after ``shutdown()`` the
    ranks connect anew.

    Raises:
        DeadlineExceededError: not all ranks came within the configured ``start_timeout``.
        AuthenticationError: a peer doesn't know the job's secret.
    """
    with _session.lock:
        if _session.communicator is not None:
            return
        _session.inits += 1
        context = _session.context or _of_no_launcher()
        if context.config.log_level is not None:
            logging.getLogger("sparkhvd").setLevel(context.config.log_level)
        _session.communicator = Communicator(context, scope=f"init-{_session.inits}")


def _of_no_launcher() -> LaunchContext:
    notice_without_effect()
    return LaunchContext(config=from_environment())


def shutdown() -> None:
    """Leave the job; does nothing when not initialized."""
    with _session.lock:
        communicator, _session.communicator = _session.communicator, None
        if communicator is not None:
            communicator.close()


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not."""
    return _session.communicator is not None


def current() -> Communicator:
    """The communicator that ``init()`` opened.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    communicator = _session.communicator
    if communicator is None:
        if _session.inits:
            raise NotInitializedError("sparkhvd has been shut down; call hvd.init() to connect the ranks again.")
        raise NotInitializedError("sparkhvd has not been initialized; call hvd.init() first.")
    return communicator


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return current().world.rank


def size() -> int:
    """The number of ranks."""
    return current().world.size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0."""
    return current().world.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return current().world.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a rank with this local rank."""
    return current().world.cross_rank


def cross_size() -> int:
    """The number of hosts that have a rank with this local rank."""
    return current().world.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return current().homogeneous
