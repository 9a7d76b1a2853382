"""The transfer of one gradient: compressed by the settings when it is submitted, and restored when it is received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import UnsupportedError
from sparkhvd.torch.compression import CastCompressor, Compressor, NoneCompressor
from sparkhvd.torch.ops import sparse
from sparkhvd.torch.ops.devices import in_stream_order, reduced_by_nccl, scale
from sparkhvd.torch.ops.tensors import buffer_of, plain_dtype, stage


@dataclass(frozen=True)
class ExchangeSettings:
    """Settings for the combination of gradients.

    Attributes:
        op: the reduction of unweighted steps.
        passes: backward passes that are summed on the rank before the exchange.
        predivide: divides gradients before the reduction and multiplies the result, against overflow in small floats.
        compression: compresses dense gradients for transfer.
        sparse_as_dense: whether sparse gradients are converted to dense tensors before they are sent.
        process_set: the ranks whose gradients are combined, all by default.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    passes: int = 1
    predivide: float = 1.0
    compression: Compressor = NoneCompressor
    sparse_as_dense: bool = False
    process_set: ProcessSet | None = None

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a gradient of ``dtype`` is most likely sent."""
        return self.compression.wire_dtype(dtype) if isinstance(self.compression, CastCompressor) else dtype


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of this rank's gradients in a step.

    Attributes:
        op: how the ranks' gradients are combined.
        share: factor of this rank's gradients.
    """

    op: ReduceOp
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A submitted gradient.

    Attributes:
        gradient: the ``grad`` of the parameter when it was submitted.
        handle: returns the combined gradient; it is ``gradient`` itself if that is dense.
        sparse: whether the gradient is sent as a sparse tensor.
        version: the number of changes of ``gradient`` until it was submitted, as PyTorch counts them.
    """

    gradient: torch.Tensor | None
    handle: Handle[torch.Tensor]
    sparse: bool
    version: int

    @classmethod
    def of(cls, gradient: torch.Tensor | None, handle: Handle[torch.Tensor], *, sparse: bool = False) -> Self:
        """Return the transfer of a gradient that was submitted just now."""
        return cls(gradient, handle, sparse, _version(gradient))

    @property
    def was_disturbed(self) -> bool:
        """Return whether the gradient was changed after it was submitted; valid until the handle is waited for."""
        return _version(self.gradient) != self.version


def _version(gradient: torch.Tensor | None) -> int:
    return 0 if gradient is None else gradient._version  # noqa: SLF001  (documented, and without a public name)


def send(parameter: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings) -> Transfer:
    """Submit the gradient of a parameter."""
    gradient = parameter.grad
    if gradient is None:
        raise AssertionError(f"Parameter {name!r} has no gradient to send.")
    if gradient.layout is torch.sparse_coo:
        if not settings.sparse_as_dense:
            return _send_sparse(gradient, parameter, name, weight, settings)
        gradient = parameter.grad = _dense(gradient)
    return _send_dense(gradient, name, weight, settings)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    # PyTorch's to_dense() returns zeros for one entry whose values are an expanded view, such as the gradient of a sum.
    # A product has memory of its own.
    return (gradient * 1.0).to_dense()


def send_zeros(
    parameter: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings, *, as_sparse: bool
) -> Transfer:
    """Submit a zero gradient for a parameter for which only other ranks have a gradient."""
    if as_sparse:
        return _send_sparse(None, parameter, name, weight, settings)
    parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return _send_dense(parameter.grad, name, weight, settings)


def _send_dense(gradient: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings) -> Transfer:
    reduction = Reduction(weight.op, weight.share / settings.predivide, settings.predivide)
    options = SubmitOptions(name, settings.process_set)
    dtype = plain_dtype(gradient) if settings.compression is NoneCompressor else None
    if dtype is not None:
        handle = session.current().reduce_in_place(
            gradient.data_ptr(), gradient.shape, dtype, gradient, *reduction, *options
        )
        return Transfer.of(gradient, handle)
    what = f"The gradient {name!r}"
    compressed, context = settings.compression.compress(gradient)
    on_device = gradient.is_cuda and reduced_by_nccl((gradient,), reduction, options, settings.compression)
    staged = stage(compressed, what, on_device=on_device)
    if on_device:
        scale(staged.memory, reduction.prescale)
    sent = buffer_of(staged.memory, what)

    def receive(_: None) -> torch.Tensor:
        if on_device:
            scale(staged.memory, reduction.postscale)
        reduced = staged.write_back()
        if reduced is not gradient:
            with torch.no_grad():
                gradient.copy_(settings.compression.decompress(reduced, context))
        return gradient

    handle = session.current().reduce_buffer(sent, sent, reduction, options).then(receive)
    return Transfer.of(gradient, in_stream_order(handle, gradient.device) if on_device else handle)


def _send_sparse(
    gradient: torch.Tensor | None, parameter: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings
) -> Transfer:
    if settings.op not in {ReduceOp.AVERAGE, ReduceOp.SUM}:
        raise UnsupportedError(
            f"The gradient {name!r} is sparse and cannot be combined with op={settings.op}; pass sparse_as_dense=True, "
            "or use Average or Sum."
        )
    communicator = session.current()
    ranks = communicator.channel(settings.process_set).ranks
    total = sparse.SparseSum(parameter.detach(), weight.op, ranks, f"The gradient {name!r}")
    content = sparse.no_bytes() if gradient is None else total.pack(gradient * weight.share)
    handle = communicator.gather_buffer(buffer_of(content, name), SubmitOptions(name, settings.process_set)).then(
        total.combine
    )
    return Transfer.of(gradient, handle, sparse=True)
