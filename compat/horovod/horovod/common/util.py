"""The helpers of Horovod that programs use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

from sparkhvd.comm.interface import gloo_built, mpi_built, nccl_built

__all__ = ["check_extension", "gloo_built", "mpi_built", "nccl_built", "split_list"]

T = TypeVar("T")


def check_extension(*_: Any, **__: Any) -> None:
    """Return: sparkhvd's core serves every framework."""


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split a sequence into consecutive parts whose lengths differ by at most one."""
    shorter, longer = divmod(len(items), parts)
    ends = [number * shorter + min(number, longer) for number in range(parts + 1)]
    return [items[begin:end] for begin, end in pairwise(ends)]
