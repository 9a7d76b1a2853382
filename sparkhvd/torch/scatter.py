"""Reducescatter on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkhvd.comm import session
from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.raw import rows_of
from sparkhvd.errors import ConfigError
from sparkhvd.torch.calls import Call, Outcome, Rows, Tensors, of_gradient
from sparkhvd.torch.movements import Allgather
from sparkhvd.torch.reductions import Part, Reduction
from sparkhvd.torch.tensors import buffer_of, called, stage


@dataclass(frozen=True)
class Reducescatter:
    """This rank's rows of the sum or mean of each of the tensors; ``grouped`` ones run together or not at all."""

    tensors: Tensors
    name: str | None
    reduction: Reduction
    grouped: bool = False

    def start(self, *, in_place: bool, waits: bool) -> Handle[Outcome]:
        """Submit it."""
        del in_place
        parts = [self._part(tensor) for tensor in self.tensors]
        pairs = [(part.source, part.target) for part in parts]
        communicator, options = session.current(), self.reduction.options(self.name, waits=waits)
        if self.grouped:
            handle = communicator.reducescatter_buffers(pairs, **options)
        else:
            handle = communicator.reducescatter_buffer(*pairs[0], **options)
        return handle.then(lambda _: Outcome(tuple(part.receive() for part in parts)))

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Those of a mean are the ranks' gradients joined; a sum's are the number of ranks times as large."""
        del rows
        asked = self.reduction
        asked.require_gradient("A reducescatter")
        ranks = session.current().channel(asked.process_set).size if asked.op is ReduceOp.SUM else 1
        scale = ranks * asked.prescale * asked.postscale
        scaled = gradients if scale == 1.0 else tuple(gradient * scale for gradient in gradients)
        return Call(Allgather(scaled, of_gradient(self.name), asked.process_set, self.grouped), tuple).run()

    def _part(self, tensor: torch.Tensor) -> Part:
        what, compression = called("Tensor", self.name), self.reduction.compression
        if not tensor.dim():
            raise ConfigError(f"{what} is a scalar; a reducescatter divides the first dimension, reshape it to (1,).")
        compressed, context = compression.compress(tensor.detach())
        memory = stage(compressed, what).memory
        channel = session.current().channel(self.reduction.process_set)
        own = rows_of(memory.shape[0], channel.size)[channel.engine.rank]
        result = torch.empty((own, *memory.shape[1:]), dtype=memory.dtype)
        return Part(
            buffer_of(memory, what),
            buffer_of(result, what),
            lambda: compression.decompress(result.to(tensor.device), context),
        )
