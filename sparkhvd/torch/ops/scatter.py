"""Reducescatter on torch tensors."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp, label_of
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions, require_compressor
from sparkhvd.comm.collectives.raw import MISSING_GRADIENTS, rows_of
from sparkhvd.comm.handle import Handle
from sparkhvd.errors import ConfigError
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops.calls import Call, Finish, Rows, Tensors, every, for_gradient
from sparkhvd.torch.ops.devices import in_stream_order, reduces_with_nccl, scale, scaled
from sparkhvd.torch.ops.movements import Allgather
from sparkhvd.torch.ops.reductions import Part, require_gradient, with_own_scales
from sparkhvd.torch.ops.tensors import buffer_of, stage

T = TypeVar("T")


class Reducescatter(NamedTuple):
    """A reducescatter of tensors; if ``grouped``, they run together or not at all."""

    tensors: Tensors
    reduction: Reduction
    options: SubmitOptions
    compression: Compressor = NoneCompressor
    grouped: bool = False

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit the collective and return its handle."""
        del in_place
        options = self.options.waiting() if waits else self.options
        on_device = self.tensors[0].is_cuda and reduces_with_nccl(
            self.tensors, self.reduction, options, self.compression
        )
        parts = [self._part(tensor, on_device=on_device) for tensor in self.tensors]
        communicator = session.current()
        if self.grouped:
            pairs = [(part.source, part.target) for part in parts]
            handle = communicator.reducescatter_buffers(pairs, self.reduction, options)
        else:
            handle = communicator.reducescatter_buffer(parts[0].source, parts[0].target, self.reduction, options)
        result = handle.then(lambda _: finish(tuple(part.receive() for part in parts), ()))
        return in_stream_order(result, self.tensors[0].device) if on_device else result

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Concatenate the ranks' gradients; those of a sum are larger by a factor of the number of ranks."""
        del rows
        reduction, options = self.reduction, self.options
        require_gradient(reduction, "A reducescatter")
        ranks = session.current().channel(options.process_set).size if reduction.op is ReduceOp.SUM else 1
        gathered = Call(Allgather(gradients, for_gradient(options), self.grouped), every).run()
        if any(len(gradient) != len(tensor) for gradient, tensor in zip(gathered, self.tensors, strict=True)):
            raise ConfigError(MISSING_GRADIENTS)
        return with_own_scales(gathered, reduction, ranks)

    def _part(self, tensor: torch.Tensor, *, on_device: bool) -> Part:
        what, compression = label_of("Tensor", self.options.name), self.compression
        if not tensor.dim():
            raise ConfigError(
                f"{what} is a scalar, but a reducescatter splits the first dimension; reshape it to (1,)."
            )
        require_compressor(compression)
        compressed, context = compression.compress(tensor.detach())
        memory = stage(compressed, what, on_device=on_device).memory
        if on_device:
            memory = scaled(memory, self.reduction.prescale)
        channel = session.current().channel(self.options.process_set)
        own = rows_of(memory.shape[0], channel.size)[channel.engine.rank]
        result = memory.new_empty((own, *memory.shape[1:]))

        def receive() -> torch.Tensor:
            if on_device:
                scale(result, self.reduction.postscale)
            return compression.decompress(result.to(tensor.device), context)

        return Part(buffer_of(memory, what), buffer_of(result, what), receive)
