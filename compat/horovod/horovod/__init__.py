"""Horovod's package on top of sparkhvd: programs that ``import horovod`` run unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod.runner import run as run

__version__ = "0.28.1"  # the version whose interface this is; programs compare it


def __getattr__(name: str) -> Any:
    if name != "run":
        raise AttributeError(f"module 'horovod' has no attribute {name!r}")
    from horovod.runner import run  # noqa: PLC0415  heavy

    return run
