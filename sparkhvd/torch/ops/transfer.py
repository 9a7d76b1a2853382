"""The transfer of one gradient: compressed by the settings when it is submitted, and restored when it is received."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.errors import UnsupportedError
from sparkhvd.torch.compression import CastCompressor, Compressor, NoneCompressor
from sparkhvd.torch.ops import sparse
from sparkhvd.torch.ops.devices import in_stream_order, reduces_with_nccl, scale
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
        original: a copy of ``gradient`` before the exchange, if it shares its memory, and so its count of changes, with
            other tensors.
    """

    gradient: torch.Tensor | None
    handle: Handle[torch.Tensor]
    sparse: bool = False
    version: int = 0
    original: torch.Tensor | None = None

    @property
    def was_disturbed(self) -> bool:
        """Return whether the gradient was changed after it was submitted; valid until the handle is waited for."""
        if self.gradient is None:
            return False
        if self.original is not None:
            return not torch.allclose(self.gradient, self.original, rtol=0.0, atol=0.0, equal_nan=True)
        return self.gradient._version != self.version  # noqa: SLF001  (documented, and without a public name)


def send(parameter: torch.Tensor, name: str, weight: Weight, settings: ExchangeSettings) -> Transfer:
    """Submit the gradient of a parameter."""
    gradient = parameter.grad
    if gradient is None:
        raise AssertionError(f"Parameter {name!r} has no gradient to send.")
    if gradient.layout is torch.sparse_coo:
        if not settings.sparse_as_dense:
            return _send_sparse(gradient, parameter, name, weight, settings)
        gradient = parameter.grad = _dense(gradient)
    if gradient.requires_grad and session.current().channel(settings.process_set).size > 1:
        gradient = parameter.grad = gradient.detach()  # its graph is that of this rank's own gradient
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
    # Autograd may give a parameter memory that layers before it still read, such as a view of an activation's gradient.
    original = gradient.clone() if _shares_memory(gradient) else None
    dtype = plain_dtype(gradient) if settings.compression is NoneCompressor and original is None else None
    if dtype is not None:
        version = gradient._version  # noqa: SLF001
        handle = session.current().reduce_in_place(
            gradient.data_ptr(), gradient.shape, dtype, gradient, *reduction, *options
        )
        return Transfer(gradient, handle, version=version)
    what = f"The gradient {name!r}"
    compressed, context = settings.compression.compress(gradient if original is None else gradient.clone())
    on_device = gradient.is_cuda and reduces_with_nccl((gradient,), reduction, options, settings.compression)
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
    ordered = in_stream_order(handle, gradient.device) if on_device else handle
    return Transfer(gradient, ordered, version=gradient._version, original=original)  # noqa: SLF001


def _shares_memory(gradient: torch.Tensor) -> bool:
    """Return whether other tensors use the memory of a gradient; also if this PyTorch cannot tell."""
    if not hasattr(torch._C, "_storage_Use_Count"):  # noqa: SLF001  (no public name; older builds without CUDA lack it)
        return True
    storage = gradient.untyped_storage()
    return _uses(storage) != _uses_of_one_tensor() or storage.nbytes() != gradient.nbytes


@functools.cache
def _uses_of_one_tensor() -> int:
    tensor = torch.empty(1)
    return _uses(tensor.untyped_storage())


def _uses(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))  # noqa: SLF001


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
    return Transfer(gradient, handle, sparse=True, version=0 if gradient is None else gradient._version)  # noqa: SLF001
