"""TensorFlow's tensors in the memory of a GPU, which NCCL reduces where they are.

TensorFlow keeps its CUDA streams to itself. So the host waits for its work before NCCL begins, and for NCCL afterwards.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Buffer, ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.process_sets import ProcessSet

# TensorFlow has the integers of a GPU in the memory of the host, as they tell shapes.
_TAKEN = frozenset({"float16", "bfloat16", "float32", "float64"})
_CUDA = 2  # kDLCUDA
_NO_STREAM = 0


class _DLTensor(ctypes.Structure):
    """The beginning of what a capsule of DLPack holds (github.com/dmlc/dlpack, dlpack.h)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def by_nccl(tensors: Sequence[tf.Tensor], op: ReduceOp, process_set: ProcessSet | None) -> bool:
    """Whether NCCL reduces these eager tensors. Ranks whose tensors are on the same kinds of devices decide alike."""
    if op is ReduceOp.ADASUM or not all(":GPU:" in each.device for each in tensors):
        return False
    channel = session.current().channel(process_set)
    if not channel.on_devices:
        channel.suggestion.make()
        return False
    return all(each.dtype.name in _TAKEN for each in tensors) and (len({each.device for each in tensors}) == 1)


def allreduce(  # noqa: PLR0917
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    names: Sequence[str | None],
    process_set: ProcessSet | None,
) -> list[tf.Tensor]:
    """The reduced tensors, as new ones where the given ones are; for tensors of which ``by_nccl`` is true."""
    communicator = session.current()
    # In new memory also where that is 1: TensorFlow's tensors do not change, but what nobody else knows may.
    reduced = [each * prescale for each in tensors]
    tf.test.experimental.sync_devices()
    handles = []
    for tensor, name in zip(reduced, names, strict=True):
        memory = memory_of(tensor)
        handle = communicator.reduce_buffer(memory, memory, Reduction(op), SubmitOptions(name, process_set))
        handles.append(handle.carried_out())
    for handle in handles:
        handle.wait()
    return reduced if postscale == 1.0 else [each * postscale for each in reduced]


def memory_of(tensor: tf.Tensor) -> Buffer:
    """Where the values of an eager tensor are, which have been computed."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    found = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    device = (found.device_id, _NO_STREAM) if found.device_type == _CUDA else None
    address = (found.data or 0) + found.byte_offset
    return Buffer(address, tuple(tensor.shape), tensor.dtype.name, (tensor, capsule), device)
