"""Broadcasts and gathers of variables and objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sparkhvd.tensorflow as _hvd
from horovod._signatures import with_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]

allgather_object = with_parameters("obj session name process_set", _hvd.allgather_object)
broadcast_object = with_parameters("obj root_rank session name process_set", _hvd.broadcast_object)
broadcast_variables = with_parameters("variables root_rank process_set inplace", _hvd.broadcast_variables)


def broadcast_object_fn(
    root_rank: int = 0,
    session: object = None,  # noqa: ARG001  of TensorFlow 1
    name: str | None = None,
    process_set: Any = None,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object."""
    return lambda obj: _hvd.broadcast_object(obj, root_rank, name, process_set)
