"""A fast path for in-place allreduces.

Programs submit thousands of small tensors one by one, where describing a tensor costs more than reducing it. These
forms pass most tensors, which need no conversion, directly to the core. All other tensors, including invalid ones, go
through their description.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops import collectives
from sparkhvd.torch.ops.tensors import plain_dtype


def start_allreduce(  # noqa: PLR0917  the order of the arguments is Horovod's
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    compression: Compressor = NoneCompressor,
    *,
    waits: bool = False,
) -> Handle[torch.Tensor]:
    """Start ``collectives.allreduce`` in place; set ``waits`` if the caller waits for the result immediately."""
    dtype = plain_dtype(tensor) if average is None and compression is NoneCompressor else None
    if dtype is not None:
        increment_version(tensor)
        # Arguments by position: keywords would cost a tenth of the call's time.
        return session.current().reduce_in_place(
            tensor.data_ptr(),
            tensor.shape,
            dtype,
            tensor,
            op if type(op) is ReduceOp else collectives.reduction_op(None, op),
            prescale_factor,
            postscale_factor,
            name,
            process_set,
            waits,
        )
    return collectives.allreduce(
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, compression
    ).start(in_place=True, waits=waits)


def run_allreduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run ``collectives.allreduce`` in place."""
    return start_allreduce(tensor, *args, waits=True, **kwargs).wait()
