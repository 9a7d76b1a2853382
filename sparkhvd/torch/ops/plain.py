"""Allreduce within the memory of a tensor, the short way.

Programs submit thousands of small tensors one by one, and then describing each costs more than reducing it. These forms
go straight to the core with tensors that need nothing else, which are most; all others, wrong ones among them, take the
way of their description.
"""

from __future__ import annotations

from typing import Any

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops import collectives
from sparkhvd.torch.ops.tensors import plain_dtype


def start_allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    compression: Compressor = NoneCompressor,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    waits: bool = False,
) -> Handle[torch.Tensor]:
    """Start ``collectives.allreduce`` in place; ``waits`` says that the caller waits for it at once."""
    dtype = plain_dtype(tensor) if average is None and compression is NoneCompressor else None
    if dtype is not None:
        # By position: keywords would cost a tenth of the call.
        return session.current().reduce_in_place(
            tensor.data_ptr(),
            tensor.shape,
            dtype,
            tensor,
            op if type(op) is ReduceOp else collectives.chosen(None, op),
            prescale_factor,
            postscale_factor,
            name,
            process_set,
            waits,
        )
    return collectives.allreduce(
        tensor,
        average,
        name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    ).start(in_place=True, waits=waits)


def run_allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, **options: Any
) -> torch.Tensor:
    """Do ``collectives.allreduce`` in place."""
    return start_allreduce(tensor, average, name, waits=True, **options).wait()
