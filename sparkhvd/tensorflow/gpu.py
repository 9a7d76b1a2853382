"""Allreduce of TensorFlow tensors in GPU memory, with NCCL.

TensorFlow does not expose its CUDA streams. Therefore the host waits for TensorFlow's work before NCCL starts, and
waits for NCCL before TensorFlow continues.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import tensorflow as tf

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Buffer, ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.process_sets import ProcessSet

# Only floating-point dtypes: TensorFlow keeps int32 tensors in host memory even if their device is a GPU, because they
# often hold shapes.
_NCCL_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
_CUDA = 2  # kDLCUDA
_NO_STREAM = 0


class _DLTensor(ctypes.Structure):
    """The leading fields of ``DLManagedTensor`` in a DLPack capsule (github.com/dmlc/dlpack, dlpack.h)."""

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


def uses_nccl(tensors: Sequence[tf.Tensor], op: ReduceOp, process_set: ProcessSet | None) -> bool:
    """Return whether NCCL reduces these eager tensors.

    Ranks whose tensors are on the same kinds of devices reach the same decision.
    """
    if op is ReduceOp.ADASUM or not all(":GPU:" in tensor.device for tensor in tensors):
        return False
    channel = session.current().channel(process_set)
    if not channel.on_devices:
        channel.suggestion.make()
        return False
    return all(tensor.dtype.name in _NCCL_DTYPES for tensor in tensors) and len({t.device for t in tensors}) == 1


def allreduce(  # noqa: PLR0917
    tensors: Sequence[tf.Tensor],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    names: Sequence[str | None],
    process_set: ProcessSet | None,
) -> list[tf.Tensor]:
    """Return the reduced tensors as new tensors on the same GPU; call this only if ``uses_nccl`` returns True."""
    communicator = session.current()
    # Multiply even if prescale is 1: the product is in new memory, which NCCL may overwrite. The original tensors must
    # not change.
    reduced = [tensor * prescale for tensor in tensors]
    tf.test.experimental.sync_devices()
    handles = []
    for tensor, name in zip(reduced, names, strict=True):
        memory = memory_of(tensor)
        handle = communicator.reduce_buffer(memory, memory, Reduction(op), SubmitOptions(name, process_set))
        handles.append(handle.with_device_wait())
    for handle in handles:
        handle.wait()
    return reduced if postscale == 1.0 else [tensor * postscale for tensor in reduced]


def memory_of(tensor: tf.Tensor) -> Buffer:
    """Return the memory of an eager tensor whose values have been computed."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    header = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_DLTensor)).contents
    device = (header.device_id, _NO_STREAM) if header.device_type == _CUDA else None
    address = (header.data or 0) + header.byte_offset
    return Buffer(address, tuple(tensor.shape), tensor.dtype.name, (tensor, capsule), device)
