"""The functions of every framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod.common import process_sets
from sparkhvd.comm import interface as _ours
from sparkhvd.comm.interface import *  # noqa: F403  its __all__ lists the names

__all__ = ["sycl_built"]
__all__ += _ours.__all__

add_process_set = process_sets.add_process_set
if not TYPE_CHECKING:  # for a type checker, it is sparkhvd's class, which functions accept
    ProcessSet = process_sets.ProcessSet


def sycl_built() -> bool:
    """Return False: sparkhvd does not use SYCL."""
    return False
