"""Reducescatter on torch tensors."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.collectives.raw import rows_of
from sparkhvd.comm.handle import Handle
from sparkhvd.errors import ConfigError
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.ops.calls import Call, Finish, Rows, Tensors, every, of_gradient
from sparkhvd.torch.ops.devices import in_order, reduced_by_nccl, scale, scaled
from sparkhvd.torch.ops.movements import Allgather
from sparkhvd.torch.ops.reductions import Part, require_gradient
from sparkhvd.torch.ops.tensors import buffer_of, called, stage

T = TypeVar("T")


class Reducescatter(NamedTuple):
    """This rank's rows of the sum or mean of each of the tensors; ``grouped`` ones run together or not at all."""

    tensors: Tensors
    reduction: Reduction
    options: SubmitOptions
    compression: Compressor = NoneCompressor
    grouped: bool = False

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit it."""
        del in_place
        options = self.options.waiting() if waits else self.options
        on_device = self.tensors[0].is_cuda and reduced_by_nccl(self.tensors, self.reduction, options, self.compression)
        parts = [self._part(tensor, on_device=on_device) for tensor in self.tensors]
        communicator = session.current()
        if self.grouped:
            pairs = [(part.source, part.target) for part in parts]
            handle = communicator.reducescatter_buffers(pairs, self.reduction, options)
        else:
            handle = communicator.reducescatter_buffer(parts[0].source, parts[0].target, self.reduction, options)
        result = handle.then(lambda _: finish(tuple(part.receive() for part in parts), ()))
        return in_order(result, self.tensors[0].device) if on_device else result

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Those of a mean are the ranks' gradients joined; a sum's are the number of ranks times as large."""
        del rows
        asked, options = self.reduction, self.options
        require_gradient(asked, "A reducescatter")
        ranks = session.current().channel(options.process_set).size if asked.op is ReduceOp.SUM else 1
        scale = ranks * asked.prescale * asked.postscale
        scaled = gradients if scale == 1.0 else tuple(gradient * scale for gradient in gradients)
        return Call(Allgather(scaled, of_gradient(options), self.grouped), every).run()

    def _part(self, tensor: torch.Tensor, *, on_device: bool) -> Part:
        what, compression = called("Tensor", self.options.name), self.compression
        if not tensor.dim():
            raise ConfigError(f"{what} is a scalar; a reducescatter divides the first dimension, reshape it to (1,).")
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
