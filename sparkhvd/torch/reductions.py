"""Allreduce on torch tensors, and what it has in common with other reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sparkhvd.comm import session
from sparkhvd.comm.buffers import Buffer, ReduceOp
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.torch.calls import Call, Outcome, Rows, Tensors, of_gradient
from sparkhvd.torch.compression import Compressor, NoneCompressor
from sparkhvd.torch.tensors import buffer_of, called, is_plain, require_contiguous, stage

_LINEAR = frozenset({ReduceOp.AVERAGE, ReduceOp.SUM})


@dataclass(frozen=True)
class Reduction:
    """What is asked of a reduction.

    Attributes:
        op: how the ranks' values are combined.
        prescale: multiplies them before.
        postscale: multiplies the result.
        compression: the form of the tensors on their way.
        process_set: the ranks that take part.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    compression: Compressor = NoneCompressor
    process_set: ProcessSet | None = None

    def options(self, name: str | None, *, waits: bool) -> dict[str, Any]:
        """What the communicator is told beside the tensors."""
        return {
            "op": self.op,
            "name": name,
            "prescale": self.prescale,
            "postscale": self.postscale,
            "process_set": self.process_set,
            "with_waiter": waits,
        }

    def require_gradient(self, what: str) -> None:
        """Raise ``ConfigError`` when the reduction is not linear."""
        if self.op not in _LINEAR:
            raise ConfigError(f"{what} with op={self.op} has no gradient; use Average or Sum, or detach its input.")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a reduction on its way: what is sent, where the result comes, and how it is taken from there."""

    source: Buffer
    target: Buffer
    receive: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Allreduce:
    """The sum, mean and so on of each of the tensors; ``grouped`` ones run together or not at all."""

    tensors: Tensors
    name: str | None
    reduction: Reduction
    grouped: bool = False

    def start(self, *, in_place: bool, waits: bool) -> Handle[Outcome]:
        """Submit it."""
        parts = [self._part(tensor, in_place=in_place) for tensor in self.tensors]
        pairs = [(part.source, part.target) for part in parts]
        communicator, options = session.current(), self.reduction.options(self.name, waits=waits)
        if self.grouped:
            handle = communicator.reduce_buffers(pairs, **options)
        else:
            handle = communicator.reduce_buffer(*pairs[0], **options)
        return handle.then(lambda _: Outcome(tuple(part.receive() for part in parts)))

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Those of a sum or mean are the sums or means of the ranks' gradients."""
        del rows
        self.reduction.require_gradient("An allreduce")
        return Call(dataclasses.replace(self, tensors=gradients, name=of_gradient(self.name)), tuple).run()

    def _part(self, tensor: torch.Tensor, *, in_place: bool) -> Part:
        what, compression = called("Tensor", self.name), self.reduction.compression
        if in_place:
            require_contiguous(tensor, what)
            if compression is NoneCompressor and is_plain(tensor):
                own = buffer_of(
                    tensor, what
                )  # the short way of most tensors: nothing to convert, nothing to bring back
                return Part(own, own, lambda: tensor)
        compressed, context = compression.compress(tensor.detach())
        memory = stage(compressed, what).memory
        source = buffer_of(memory, what)
        # A copy may be overwritten, the user's own memory only where that is asked for.
        shared = memory.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        result = torch.empty_like(memory) if shared and not in_place else memory

        def receive() -> torch.Tensor:
            received = compression.decompress(result.to(tensor.device), context)
            if not in_place:
                return received
            if received.data_ptr() != tensor.data_ptr():
                with torch.no_grad():
                    tensor.copy_(received)
            return tensor

        return Part(source, buffer_of(result, what), receive)
