"""The helpers of Horovod that programs use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from horovod._signatures import with_parameters
from sparkhvd.comm import interface

__all__ = [
    "ccl_built",
    "check_extension",
    "cuda_built",
    "ddl_built",
    "env",
    "gloo_built",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "rocm_built",
    "split_list",
]

T = TypeVar("T")

ccl_built = with_parameters("verbose", interface.ccl_built)
cuda_built = with_parameters("verbose", interface.cuda_built)
ddl_built = with_parameters("verbose", interface.ddl_built)
gloo_built = with_parameters("verbose", interface.gloo_built)
mpi_built = with_parameters("verbose", interface.mpi_built)
nccl_built = with_parameters("verbose", interface.nccl_built)
rocm_built = with_parameters("verbose", interface.rocm_built)


def check_extension(*_: Any, **__: Any) -> None:
    """Do nothing: sparkhvd's core serves every framework."""


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split a sequence into consecutive parts whose lengths differ by at most one."""
    shorter, longer = divmod(len(items), parts)
    ends = [number * shorter + min(number, longer) for number in range(parts + 1)]
    return [items[begin:end] for begin, end in pairwise(ends)]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables, and restore them afterwards; None leaves a variable unchanged."""
    environment = os.environ  # noqa: TID251  the function is about the environment
    new = {name: value for name, value in variables.items() if value is not None}
    old = {name: environment.get(name) for name in new}
    environment.update(new)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is ``target`` or a later one.

    Raises:
        ValueError: an argument is not a string, or ``target`` does not have three parts.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(  # noqa: TRY004  Horovod's error
            f"Versions must be strings, got {ver!r} and {target!r}."
        )
    if target.count(".") != 2:
        raise ValueError(f"The version {target!r} must have the form major.minor.patch.")
    from packaging import version  # noqa: PLC0415  a requirement of Keras, but not of sparkhvd

    return version.parse(ver) >= version.parse(target)
