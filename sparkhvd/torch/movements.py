"""Allgather, broadcast and alltoall on torch tensors: rows change places, nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparkhvd.comm import session
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.comm.raw import Gathered
from sparkhvd.torch.calls import Call, Outcome, Rows, Tensors, of_gradient
from sparkhvd.torch.reductions import Allreduce, Reduction
from sparkhvd.torch.tensors import buffer_of, bytes_of, called, has_dtype, require_contiguous, stage, tensor_of


@dataclass(frozen=True)
class Allgather:
    """Each of the tensors joined with those of the other ranks; ``grouped`` ones run together or not at all."""

    tensors: Tensors
    name: str | None
    process_set: ProcessSet | None = None
    grouped: bool = False

    def start(self, *, in_place: bool, waits: bool) -> Handle[Outcome]:
        """Submit it."""
        del in_place
        what = called("Tensor", self.name)
        sources = [buffer_of(stage(tensor, what).memory, what) for tensor in self.tensors]
        communicator = session.current()
        if self.grouped:
            return communicator.gather_buffers(
                sources, name=self.name, process_set=self.process_set, with_waiter=waits
            ).then(self._joined)
        handle = communicator.gather_buffer(sources[0], name=self.name, process_set=self.process_set, with_waiter=waits)
        return handle.then(lambda gathered: self._joined([gathered]))

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """This rank's rows of the mean of the ranks' gradients."""
        mean = Reduction(process_set=self.process_set)
        means = Call(Allreduce(gradients, of_gradient(self.name), mean, self.grouped), tuple).run()
        me = session.current().channel(self.process_set).engine.rank
        return tuple(each.narrow(0, sum(of[:me]), of[me]) for each, of in zip(means, rows, strict=True))

    def _joined(self, gathered: Sequence[Gathered]) -> Outcome:
        pairs = zip(gathered, self.tensors, strict=True)
        joined = tuple(tensor_of(each.content, like.detach(), sum(each.first_dims)) for each, like in pairs)
        return Outcome(joined, tuple(each.first_dims for each in gathered))


@dataclass(frozen=True)
class Broadcast:
    """The tensor of one rank on all of them.

    With ``any_memory`` it may have any strides and element type; it is then overwritten.
    """

    tensor: torch.Tensor
    root: int
    name: str | None
    process_set: ProcessSet | None = None
    any_memory: bool = False

    @property
    def tensors(self) -> Tensors:
        """The one input."""
        return (self.tensor,)

    def start(self, *, in_place: bool, waits: bool) -> Handle[Outcome]:
        """Submit it."""
        what = called("Tensor", self.name)
        if in_place and not self.any_memory:
            require_contiguous(self.tensor, what)
        staged = stage(self.tensor, what)
        as_bytes = self.any_memory and not has_dtype(staged.memory)
        source = bytes_of(staged.memory) if as_bytes else buffer_of(staged.memory, what)
        result = staged.memory if in_place else torch.empty_like(staged.memory)
        target = source if in_place else buffer_of(result, what)
        handle = session.current().broadcast_buffer(
            source, target, self.root, name=self.name, process_set=self.process_set, with_waiter=waits
        )
        device = self.tensor.device
        return handle.then(lambda _: Outcome((staged.write_back() if in_place else result.to(device),)))

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """On the root the mean of the ranks' gradients, elsewhere zero."""
        del rows
        mean = Reduction(process_set=self.process_set)
        (reduced,) = Call(Allreduce(gradients, of_gradient(self.name), mean), tuple).run()
        return (reduced if session.current().world.rank == self.root else torch.zeros_like(reduced),)


@dataclass(frozen=True)
class Alltoall:
    """A part of the tensor to every rank; the outputs are what came from all, and how many rows from each."""

    tensor: torch.Tensor
    splits: tuple[int, ...] | None
    name: str | None
    process_set: ProcessSet | None = None

    @property
    def tensors(self) -> Tensors:
        """The one input."""
        return (self.tensor,)

    def start(self, *, in_place: bool, waits: bool) -> Handle[Outcome]:
        """Submit it."""
        del in_place
        what = called("Tensor", self.name)
        source = buffer_of(stage(self.tensor, what).memory, what)
        handle = session.current().alltoall_buffer(
            source, self.splits, name=self.name, process_set=self.process_set, with_waiter=waits
        )
        like = self.tensor.detach()

        def received(gathered: Gathered) -> Outcome:
            rows = gathered.first_dims
            return Outcome((tensor_of(gathered.content, like, sum(rows)), torch.tensor(rows)), (rows,))

        return handle.then(received)

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Every rank's gradients of what came from this one, sent back."""
        back = Alltoall(gradients[0], rows[0], of_gradient(self.name), self.process_set)
        return Call(back, lambda outputs: outputs[:1]).run()
