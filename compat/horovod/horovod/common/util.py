"""The helpers of Horovod that programs use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

from horovod._signatures import with_parameters
from horovod.common.exceptions import HorovodVersionMismatchError
from sparkhvd.comm import interface

__all__ = [
    "EXTENSIONS",
    "HorovodVersionMismatchError",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

T = TypeVar("T")

EXTENSIONS = ("tensorflow", "torch")

ccl_built = with_parameters("verbose", interface.ccl_built)
cuda_built = with_parameters("verbose", interface.cuda_built)
ddl_built = with_parameters("verbose", interface.ddl_built)
gloo_built = with_parameters("verbose", interface.gloo_built)
mpi_built = with_parameters("verbose", interface.mpi_built)
nccl_built = with_parameters("verbose", interface.nccl_built)
rocm_built = with_parameters("verbose", interface.rocm_built)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001
    """Return whether a framework is installed, such as ``torch``."""
    return ext_base_name in EXTENSIONS and find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001
    """Return whether ``torch`` or ``tensorflow`` finds a GPU."""
    if ext_base_name == "torch":
        import torch  # noqa: PLC0415  heavy

        return torch.cuda.is_available()
    import tensorflow as tf  # noqa: PLC0415  heavy

    return bool(tf.config.list_physical_devices("GPU"))


def check_installed_version(*_: Any, **__: Any) -> None:
    """Do nothing: sparkhvd is not compiled for a version of a framework."""


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return a function that chooses the operation from the arguments ``op`` and ``average`` of a collective."""

    def choose(op: Any, average: bool | None) -> Any:
        if op is None:
            return reduce_ops.Sum if average is not None and not average else reduce_ops.Average
        if average is not None:
            raise ValueError(f"op={op} and average={average} are both set. Pass op only.")
        return op

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank.bit_count() == 1


def is_iterable(x: object) -> bool:
    """Return whether an object can be iterated over."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


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
