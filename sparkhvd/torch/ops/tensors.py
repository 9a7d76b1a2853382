"""Access to the memory of torch tensors for the core."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkhvd.comm.collectives.buffers import Buffer
from sparkhvd.comm.collectives.raw import Gathered
from sparkhvd.errors import ConfigError
from sparkhvd.torch.ops.devices import stream_of

_NAME_OF = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.uint16: "uint16",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_STRIDED = torch.strided


@dataclass(frozen=True, slots=True)
class Staged:
    """A tensor, and the contiguous memory that represents it in a collective.

    Attributes:
        tensor: the tensor for the result.
        memory: the tensor's own memory if that is contiguous and on the right device, else a copy. NCCL needs the
            memory on the tensor's device; all others need it on the CPU, pinned for CUDA tensors.
    """

    tensor: torch.Tensor
    memory: torch.Tensor

    def write_back(self) -> torch.Tensor:
        """Copy the result from the memory to the tensor, unless they share their memory; return the tensor."""
        if self.memory.data_ptr() != self.tensor.data_ptr():
            with torch.no_grad():
                # Copies from pinned memory run in the order of the device's stream, all others at once.
                _once(self.tensor, self.tensor).copy_(_once(self.memory, self.tensor), non_blocking=True)
        return self.tensor


def _once(tensor: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor with one element for each location of another one, which may be an expanded view."""
    for dimension, stride in enumerate(expanded.stride()):
        if stride == 0 and expanded.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def stage(tensor: torch.Tensor, what: str, *, on_device: bool = False) -> Staged:
    """Return contiguous memory with the values of ``tensor``: on the tensor's device if ``on_device``, else on the CPU.

    Raises:
        ConfigError: the tensor is sparse or has no memory; ``what`` names it in the message.
    """
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{what} has layout {tensor.layout}; collectives take dense tensors; call to_dense() first.")
    if tensor.is_meta:
        raise ConfigError(f"{what} is on the meta device and has no values; materialize it first.")
    if tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous() and not _is_lazy(tensor):
        return Staged(tensor, tensor)
    if tensor.is_cuda and not on_device:
        return Staged(tensor, _pinned(tensor.detach()))
    values = tensor.detach().resolve_neg().resolve_conj().contiguous()
    return Staged(tensor, values if on_device else values.cpu())


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether the values differ from those in memory: PyTorch negates and conjugates views only when read."""
    return tensor.is_neg() or tensor.is_conj()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned memory, after waiting for the work queued on the current stream."""
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    memory.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return memory


def plain_dtype(tensor: torch.Tensor) -> str | None:
    """Return the dtype of a tensor if the core can read and write its own memory, else None."""
    if tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous() and not tensor.is_neg():
        return _NAME_OF.get(tensor.dtype)
    return None


def plain_buffer(tensor: torch.Tensor) -> Buffer | None:
    """Return the memory of a tensor if it has a ``plain_dtype``, else None."""
    dtype = plain_dtype(tensor)
    return None if dtype is None else Buffer(tensor.data_ptr(), tensor.shape, dtype, tensor)


def require_contiguous(tensor: torch.Tensor, what: str) -> None:
    """Raise ``ConfigError`` if an in-place collective could not write into the tensor's memory."""
    if not tensor.is_contiguous():
        raise ConfigError(
            f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; an in-place "
            "collective writes into its memory. Use the form without the underscore, or call contiguous() first."
        )


def buffer_of(memory: torch.Tensor, what: str) -> Buffer:
    """Return the address, shape, dtype and device of a contiguous tensor.

    Raises:
        ConfigError: collectives do not support the dtype; ``what`` names the tensor in the message.
    """
    name = _NAME_OF.get(memory.dtype)
    if name is None:
        raise ConfigError(f"{what} has dtype {memory.dtype}; collectives take {', '.join(_NAME_OF.values())}.")
    if memory.is_cuda:
        return Buffer(memory.data_ptr(), memory.shape, name, memory, (memory.get_device(), stream_of(memory.device)))
    return Buffer(memory.data_ptr(), memory.shape, name, memory)


def bytes_of(memory: torch.Tensor) -> Buffer:
    """Return the memory of a contiguous CPU tensor of any dtype as bytes, for collectives that do not compute."""
    return Buffer(memory.data_ptr(), (memory.numel() * memory.element_size(),), "uint8", memory)


def tensor_of(gathered: Gathered, like: torch.Tensor) -> torch.Tensor:
    """Return the rows gathered from all ranks as a tensor with the row shape, dtype and device of ``like``."""
    shape = (sum(gathered.first_dims), *like.shape[1:])
    if not gathered.content.nbytes:  # there are no bytes, or they are on the device
        result = torch.empty(shape, dtype=like.dtype, device=like.device)
        if result.is_cuda:
            gathered.move_to(result.data_ptr(), stream_of(result.device))
        return result
    return torch.frombuffer(gathered.content, dtype=torch.uint8).view(like.dtype).reshape(shape).to(like.device)


def has_dtype(memory: torch.Tensor) -> bool:
    """Return whether collectives support the tensor's dtype."""
    return memory.dtype in _NAME_OF
