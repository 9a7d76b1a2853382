"""One gradient on its way: submitted in the form that the settings ask for, received into the form that it had."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import ConfigError
from sparkhvd.torch.compression import CastCompressor, Compressor, NoneCompressor
from sparkhvd.torch.ops import sparse
from sparkhvd.torch.ops.devices import in_order, reduced_by_nccl, scale
from sparkhvd.torch.ops.tensors import buffer_of, plain_dtype, stage


@dataclass(frozen=True)
class ExchangeSettings:
    """How gradients are combined.

    Attributes:
        op: the reduction of unweighted steps.
        passes: backward passes that are summed on the rank before the exchange.
        predivide: divides gradients before the reduction and multiplies the result, against overflow in small floats.
        compression: the form of dense gradients on their way.
        sparse_as_dense: whether sparse gradients are made dense before they are sent.
        process_set: the ranks whose gradients are combined, all by default.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    passes: int = 1
    predivide: float = 1.0
    compression: Compressor = NoneCompressor
    sparse_as_dense: bool = False
    process_set: ProcessSet | None = None

    def dtype_on_the_way(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a gradient of ``dtype`` most likely travels."""
        return self.compression.on_the_way(dtype) if isinstance(self.compression, CastCompressor) else dtype


@dataclass(frozen=True, slots=True)
class Weight:
    """What a step does to this rank's gradients.

    Attributes:
        op: how the ranks' gradients are combined.
        share: multiplies this rank's.
    """

    op: ReduceOp
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A gradient on its way.

    Attributes:
        gradient: the ``grad`` of the parameter when it was submitted.
        handle: brings the combined gradient: ``gradient`` itself where that is dense.
        sparse: whether it travels as a sparse tensor.
    """

    gradient: torch.Tensor | None
    handle: Handle[torch.Tensor]
    sparse: bool


def send(parameter: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings) -> Transfer:
    """Submit the gradient of a parameter."""
    gradient = parameter.grad
    if gradient is None:
        raise AssertionError(f"{name!r} has no gradient to send")
    if gradient.layout is torch.sparse_coo:
        if not settings.sparse_as_dense:
            return _send_sparse(gradient, parameter, name, weight, settings)
        gradient = parameter.grad = gradient.to_dense()
    return _send_dense(gradient, name, weight, settings)


def send_nothing(
    parameter: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings, *, as_sparse: bool
) -> Transfer:
    """Submit that this rank has nothing to add to the gradient that others have of a parameter."""
    if as_sparse:
        return _send_sparse(None, parameter, name, weight, settings)
    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return _send_dense(parameter.grad, name, weight, settings)


def _send_dense(gradient: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings) -> Transfer:
    asked = Reduction(weight.op, weight.share / settings.predivide, settings.predivide)
    options = SubmitOptions(name, settings.process_set)
    dtype = plain_dtype(gradient) if settings.compression is NoneCompressor else None
    if dtype is not None:
        handle = session.current().reduce_in_place(
            gradient.data_ptr(), gradient.shape, dtype, gradient, *asked, *options
        )
        return Transfer(gradient, handle, sparse=False)
    what = f"The gradient {name!r}"
    compressed, context = settings.compression.compress(gradient)
    on_device = gradient.is_cuda and reduced_by_nccl((gradient,), asked, options, settings.compression)
    staged = stage(compressed, what, on_device=on_device)
    if on_device:
        scale(staged.memory, asked.prescale)
    sent = buffer_of(staged.memory, what)

    def receive(_: None) -> torch.Tensor:
        if on_device:
            scale(staged.memory, asked.postscale)
        reduced = staged.write_back()
        if reduced is not gradient:
            with torch.no_grad():
                gradient.copy_(settings.compression.decompress(reduced, context))
        return gradient

    handle = session.current().reduce_buffer(sent, sent, asked, options).then(receive)
    return Transfer(gradient, in_order(handle, gradient.device) if on_device else handle, sparse=False)


def _send_sparse(
    gradient: torch.Tensor | None, parameter: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings
) -> Transfer:
    if settings.op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        raise ConfigError(
            f"The gradient {name!r} is sparse, which op={settings.op} cannot combine; pass sparse_as_dense=True or use "
            "Average or Sum."
        )
    communicator = session.current()
    ranks = communicator.channel(settings.process_set).ranks
    total = sparse.SparseSum(parameter.detach(), weight.op, ranks, f"The gradient {name!r}")
    content = sparse.nothing() if gradient is None else total.packed(gradient * weight.share)
    handle = communicator.gather_buffer(buffer_of(content, name), SubmitOptions(name, settings.process_set)).then(
        total.summed
    )
    return Transfer(gradient, handle, sparse=True)
