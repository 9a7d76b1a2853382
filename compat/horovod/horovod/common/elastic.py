"""The states of elastic jobs, and the function that ``elastic.run`` of each framework uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.state import ObjectState, State
from sparkhvd.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run_fn"]


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:  # noqa: ARG001
    """Decorate a training function like ``hvd.elastic.run``; the ranks reconnect without ``reset``."""
    return run(func)
