"""Collectives that take part in autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparkhvd.comm import session
from sparkhvd.comm.buffers import ReduceOp
from sparkhvd.errors import ConfigError
from sparkhvd.torch.operations import allreduce_async, broadcast_async, gather_async, reduction


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine the tensors of all ranks into a new tensor.

    The gradient of a sum or mean is the sum or mean of the ranks' gradients; the other reductions have none.

    Args:
        tensor: the same shape and dtype on all ranks.
        average: deprecated, use ``op``.
        name: what the ranks know the operation by; made by counting when None.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: multiplies the values before the reduction; equal on all ranks.
        postscale_factor: multiplies the result; equal on all ranks.
    """
    return _apply_allreduce(tensor, name, reduction(average, op), (prescale_factor, postscale_factor))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Join the tensors of all ranks along the first dimension, in rank order.

    The gradient is this rank's part of the mean of the ranks' gradients.

    Args:
        tensor: the same dtype and shape on all ranks but for the first dimension.
        name: what the ranks know the operation by; made by counting when None.
    """
    return _apply_allgather(tensor, name)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of ``root_rank``, as a new tensor on every rank.

    The gradient on the root is the mean of the ranks' gradients, elsewhere zero.

    Args:
        tensor: the same shape and dtype on all ranks.
        root_rank: the rank whose tensor counts.
        name: what the ranks know the operation by; made by counting when None.
    """
    return _apply_broadcast(tensor, root_rank, name)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: ReduceOp, scales: tuple[float, float]
    ) -> torch.Tensor:
        prescale, postscale = scales
        ctx.arguments = (name, op, scales)
        return allreduce_async(tensor, name=name, op=op, prescale_factor=prescale, postscale_factor=postscale).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name, op, (prescale, postscale) = ctx.arguments
        if op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
            raise ConfigError(f"An allreduce with op={op} has no gradient; use Average or Sum, or detach its input.")
        reduced = allreduce(
            gradient, name=_of_gradient(name), op=op, prescale_factor=prescale, postscale_factor=postscale
        )
        return reduced, None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        joined, rows = gather_async(tensor, name).wait()
        rank = session.current().world.rank
        ctx.arguments = (name, sum(rows[:rank]), rows[rank])
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name, start, rows = ctx.arguments
        return allreduce(gradient, name=_of_gradient(name)).narrow(0, start, rows), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.arguments = (root_rank, name)
        return broadcast_async(tensor, root_rank, name).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        root_rank, name = ctx.arguments
        reduced = allreduce(gradient, name=_of_gradient(name))
        mine = session.current().world.rank == root_rank
        return reduced if mine else torch.zeros_like(reduced), None, None


# torch leaves `Function.apply` without types.
_apply_allreduce: Callable[..., torch.Tensor] = _Allreduce.apply
_apply_allgather: Callable[..., torch.Tensor] = _Allgather.apply
_apply_broadcast: Callable[..., torch.Tensor] = _Broadcast.apply


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"
