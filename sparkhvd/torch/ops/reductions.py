"""Allreduce on torch tensors, and helpers for all reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import Buffer, ReduceOp, label_of
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions, require_compressor
from sparkhvd.comm.handle import Handle
from sparkhvd.errors import ConfigError
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops.calls import Call, Finish, Rows, Tensors, every, for_gradient
from sparkhvd.torch.ops.devices import in_stream_order, reduces_with_nccl, scale, scaled
from sparkhvd.torch.ops.tensors import buffer_of, plain_buffer, require_contiguous, stage

T = TypeVar("T")

_LINEAR = frozenset({ReduceOp.AVERAGE, ReduceOp.SUM})


def require_gradient(reduction: Reduction, what: str) -> None:
    """Raise ``ConfigError`` when the reduction is not linear."""
    if reduction.op not in _LINEAR:
        raise ConfigError(f"{what} with op={reduction.op} has no gradient; use Average or Sum, or detach its input.")


def with_own_scales(gradients: Tensors, reduction: Reduction, factor: float = 1.0) -> Tensors:
    """Return the gradients times ``factor`` and the scales of the reduction.

    A rank's values have its own prescale, which may differ from the others', so this follows the exchange.
    """
    factor *= reduction.prescale * reduction.postscale
    return gradients if factor == 1.0 else tuple(gradient * factor for gradient in gradients)


class Part(NamedTuple):
    """One tensor of a reduction: the buffer to send, the buffer for the result, and the function that unpacks it."""

    source: Buffer
    target: Buffer
    receive: Callable[[], torch.Tensor]


class Allreduce(NamedTuple):
    """An allreduce of tensors; if ``grouped``, they run together or not at all."""

    tensors: Tensors
    reduction: Reduction
    options: SubmitOptions
    compression: Compressor = NoneCompressor
    grouped: bool = False

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit the collective and return its handle."""
        options = self.options.waiting() if waits else self.options
        if in_place and self.grouped and self.compression is NoneCompressor:
            # The fast path of most groups: nothing to convert before, nothing to copy after.
            buffers = [plain_buffer(tensor) for tensor in self.tensors]
            if None not in buffers:
                pairs = [(own, own) for own in buffers if own is not None]
                return (
                    session.current()
                    .reduce_buffers(pairs, self.reduction, options)
                    .with_result(finish(self.tensors, ()))
                )
        on_device = self.tensors[0].is_cuda and reduces_with_nccl(
            self.tensors, self.reduction, options, self.compression
        )
        parts = [self._part(tensor, in_place=in_place, on_device=on_device) for tensor in self.tensors]
        if self.grouped:
            pairs = [(part.source, part.target) for part in parts]
            handle = session.current().reduce_buffers(pairs, self.reduction, options)
        else:
            handle = session.current().reduce_buffer(parts[0].source, parts[0].target, self.reduction, options)
        result = handle.then(lambda _: finish(tuple(part.receive() for part in parts), ()))
        return in_stream_order(result, self.tensors[0].device) if on_device else result

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Return the sums or means of the ranks' gradients, with this rank's scales."""
        del rows
        require_gradient(self.reduction, "An allreduce")
        unscaled = Reduction(self.reduction.op)
        combined = Call(
            self._replace(tensors=gradients, reduction=unscaled, options=for_gradient(self.options)), every
        ).run()
        return with_own_scales(combined, self.reduction)

    def _part(self, tensor: torch.Tensor, *, in_place: bool, on_device: bool) -> Part:
        what, compression = label_of("Tensor", self.options.name), self.compression
        if in_place:
            require_contiguous(tensor, what)
        require_compressor(compression)
        compressed, context = compression.compress(tensor.detach())
        memory = stage(compressed, what, on_device=on_device).memory
        if on_device:
            memory = scaled(memory, self.reduction.prescale)
        source = buffer_of(memory, what)
        # A copy may be overwritten; the user's own memory only in an in-place collective.
        shared = memory.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        result = torch.empty_like(memory) if shared and not in_place else memory

        def receive() -> torch.Tensor:
            if on_device:
                scale(result, self.reduction.postscale)
            received = compression.decompress(result.to(tensor.device), context)
            if not in_place:
                return received
            if received.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    tensor.copy_(received)
            return tensor

        return Part(source, buffer_of(result, what), receive)
