"""Allgather, broadcast and alltoall on torch tensors, which move rows without computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import label_of
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.collectives.raw import Gathered
from sparkhvd.comm.handle import Handle
from sparkhvd.torch.ops.calls import Call, Finish, Rows, Tensors, every, for_gradient
from sparkhvd.torch.ops.devices import in_stream_order, uses_nccl
from sparkhvd.torch.ops.reductions import Allreduce
from sparkhvd.torch.ops.tensors import buffer_of, bytes_of, has_dtype, require_contiguous, stage, tensor_of

T = TypeVar("T")


@dataclass(frozen=True)
class Allgather:
    """An allgather of tensors; if ``grouped``, they run together or not at all."""

    tensors: Tensors
    options: SubmitOptions
    grouped: bool = False

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit the collective and return its handle."""
        del in_place
        what = label_of("Tensor", self.options.name)
        on_device = uses_nccl(self.tensors, self.options.process_set)
        sources = [buffer_of(stage(tensor, what, on_device=on_device).memory, what) for tensor in self.tensors]
        communicator, options = session.current(), self.options.waiting() if waits else self.options
        if self.grouped:
            group = communicator.gather_buffers(sources, options)
            result = group.then(lambda gathered: finish(*self._joined(gathered)))
        else:
            single = communicator.gather_buffer(sources[0], options)
            result = single.then(lambda gathered: finish(*self._joined([gathered])))
        return in_stream_order(result, self.tensors[0].device) if on_device else result

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Return this rank's rows of the mean of the ranks' gradients."""
        means = Call(Allreduce(gradients, Reduction(), for_gradient(self.options), grouped=self.grouped), every).run()
        rank = session.current().channel(self.options.process_set).engine.rank
        return tuple(mean.narrow(0, sum(counts[:rank]), counts[rank]) for mean, counts in zip(means, rows, strict=True))

    def _joined(self, gathered: Sequence[Gathered]) -> tuple[Tensors, Rows]:
        pairs = zip(gathered, self.tensors, strict=True)
        joined = tuple(tensor_of(output, like.detach()) for output, like in pairs)
        return joined, tuple(output.first_dims for output in gathered)


@dataclass(frozen=True)
class Broadcast:
    """A broadcast of the root's tensor.

    With ``any_memory`` the tensor may have any strides and dtype, and be on a different device on every rank; it is
    overwritten.
    """

    tensor: torch.Tensor
    root: int
    options: SubmitOptions
    any_memory: bool = False

    @property
    def tensors(self) -> Tensors:
        """Return the only input."""
        return (self.tensor,)

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit the collective and return its handle."""
        what = label_of("Tensor", self.options.name)
        if in_place and not self.any_memory:
            require_contiguous(self.tensor, what)
        on_device = not self.any_memory and uses_nccl(self.tensors, self.options.process_set)
        staged = stage(self.tensor, what, on_device=on_device)
        as_bytes = self.any_memory and not has_dtype(staged.memory)
        source = bytes_of(staged.memory) if as_bytes else buffer_of(staged.memory, what)
        result = staged.memory if in_place else torch.empty_like(staged.memory)
        target = source if in_place else buffer_of(result, what)
        handle = session.current().broadcast_buffer(
            source, target, self.root, self.options.waiting() if waits else self.options
        )
        device = self.tensor.device
        received = handle.then(lambda _: finish((staged.write_back() if in_place else result.to(device),), ()))
        return in_stream_order(received, device) if on_device else received

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Return the mean of the ranks' gradients on the root, and zero elsewhere."""
        del rows
        (reduced,) = Call(Allreduce(gradients, Reduction(), for_gradient(self.options)), every).run()
        if session.current().world.rank == self.root:
            return (reduced,)
        # The zeros depend on the mean, because the gradient of the mean is a collective in which all ranks take part.
        return (torch.where(torch.zeros((), dtype=torch.bool, device=reduced.device), reduced, 0.0),)


@dataclass(frozen=True)
class Alltoall:
    """An alltoall of a tensor; the outputs are the received rows, and the number of rows from each rank."""

    tensor: torch.Tensor
    splits: tuple[int, ...] | None
    options: SubmitOptions

    @property
    def tensors(self) -> Tensors:
        """Return the only input."""
        return (self.tensor,)

    def start(self, finish: Finish[T], *, in_place: bool, waits: bool) -> Handle[T]:
        """Submit the collective and return its handle."""
        del in_place
        what = label_of("Tensor", self.options.name)
        on_device = uses_nccl(self.tensors, self.options.process_set)
        source = buffer_of(stage(self.tensor, what, on_device=on_device).memory, what)
        handle = session.current().alltoall_buffer(
            source, self.splits, self.options.waiting() if waits else self.options
        )
        like = self.tensor.detach()

        def received(gathered: Gathered) -> T:
            rows = gathered.first_dims
            return finish((tensor_of(gathered, like), torch.tensor(rows)), (rows,))

        result = handle.then(received)
        return in_stream_order(result, like.device) if on_device else result

    def gradients(self, gradients: Tensors, rows: Rows) -> Tensors:
        """Send the gradients of the received rows back to their ranks."""
        back = Alltoall(gradients[0], rows[0], for_gradient(self.options))
        return Call(back, lambda outputs, _: outputs[:1]).run()
