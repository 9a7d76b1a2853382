"""Allgather, broadcast and alltoall on torch tensors: rows change places, nothing is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from sparkhvd.comm import session
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.options import Reduction, Way
from sparkhvd.comm.raw import Gathered
from sparkhvd.torch.calls import Call, Finish, Rows, Tensors, every, of_gradient
from sparkhvd.torch.reductions import Allreduce
from sparkhvd.torch.tensors import buffer_of, bytes_of, called, has_dtype, require_contiguous, stage, tensor_of

T = TypeVar("T")


@dataclass(frozen=True)
class Allgather:
    """Each of the tensors joined with those of the other ranks; ``grouped`` ones run together or not at all."""

    tensors: Tensors
    way: Way
    grouped: bool = False

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit it."""
        del in_place
        what = called("Tensor", self.way.name)
        sources = [buffer_of(stage(tensor, what).memory, what) for tensor in self.tensors]
        communicator, way = session.current(), self.way.waiting() if waits else self.way
        if self.grouped:
            together = communicator.gather_buffers(sources, way)
            return together.then(lambda gathered: finish(*self._joined(gathered)))
        alone = communicator.gather_buffer(sources[0], way)
        return alone.then(lambda gathered: finish(*self._joined([gathered])))

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """This rank's rows of the mean of the ranks' gradients."""
        means = Call(Allreduce(gradients, Reduction(), of_gradient(self.way), grouped=self.grouped), every).run()
        me = session.current().channel(self.way.process_set).engine.rank
        return tuple(each.narrow(0, sum(of[:me]), of[me]) for each, of in zip(means, rows, strict=True))

    def _joined(self, gathered: Sequence[Gathered]) -> tuple[Tensors, Rows]:
        pairs = zip(gathered, self.tensors, strict=True)
        joined = tuple(tensor_of(each.content, like.detach(), sum(each.first_dims)) for each, like in pairs)
        return joined, tuple(each.first_dims for each in gathered)


@dataclass(frozen=True)
class Broadcast:
    """The tensor of one rank on all of them.

    With ``any_memory`` it may have any strides and element type; it is then overwritten.
    """

    tensor: torch.Tensor
    root: int
    way: Way
    any_memory: bool = False

    @property
    def tensors(self) -> Tensors:
        """The one input."""
        return (self.tensor,)

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit it."""
        what = called("Tensor", self.way.name)
        if in_place and not self.any_memory:
            require_contiguous(self.tensor, what)
        staged = stage(self.tensor, what)
        as_bytes = self.any_memory and not has_dtype(staged.memory)
        source = bytes_of(staged.memory) if as_bytes else buffer_of(staged.memory, what)
        result = staged.memory if in_place else torch.empty_like(staged.memory)
        target = source if in_place else buffer_of(result, what)
        handle = session.current().broadcast_buffer(
            source, target, self.root, self.way.waiting() if waits else self.way
        )
        device = self.tensor.device
        return handle.then(lambda _: finish((staged.write_back() if in_place else result.to(device),), ()))

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """On the root the mean of the ranks' gradients, elsewhere zero."""
        del rows
        (reduced,) = Call(Allreduce(gradients, Reduction(), of_gradient(self.way)), every).run()
        return (reduced if session.current().world.rank == self.root else torch.zeros_like(reduced),)


@dataclass(frozen=True)
class Alltoall:
    """A part of the tensor to every rank; the outputs are what came from all, and how many rows from each."""

    tensor: torch.Tensor
    splits: tuple[int, ...] | None
    way: Way

    @property
    def tensors(self) -> Tensors:
        """The one input."""
        return (self.tensor,)

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit it."""
        del in_place
        what = called("Tensor", self.way.name)
        source = buffer_of(stage(self.tensor, what).memory, what)
        handle = session.current().alltoall_buffer(source, self.splits, self.way.waiting() if waits else self.way)
        like = self.tensor.detach()

        def received(gathered: Gathered) -> T:
            rows = gathered.first_dims
            return finish((tensor_of(gathered.content, like, sum(rows)), torch.tensor(rows)), (rows,))

        return handle.then(received)

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Every rank's gradients of what came from this one, sent back."""
        back = Alltoall(gradients[0], rows[0], of_gradient(self.way))
        return Call(back, lambda outputs, _: outputs[:1]).run()
