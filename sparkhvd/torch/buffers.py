"""The buffers of a module, which every rank changes for itself: the same on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from sparkhvd.comm import session
from sparkhvd.comm.agreement import agree

# NumPy has no such types; these hold all their values.
_AS_NUMPY = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


@torch.no_grad()
def synchronize_buffers(module: torch.nn.Module, weight: float, name: str = "buffers") -> None:
    """Give all ranks the same buffers; collective.

    Running statistics become the mean over ranks, and other types those of one rank: see ``comm.agreement.agree``.
    Buffers that cannot be written as arrays (sparse, quantized, uninitialized) stay each rank's own.

    Args:
        module: the model, with the same submodules on every rank.
        weight: what this rank's buffers count, such as the rows that changed them.
        name: the operation's name, equal on all ranks.
    """
    buffers = {key: buffer for key, buffer in module.named_buffers() if _is_plain(buffer)}
    found = agree(
        session.current(),
        {key: _array(buffer) for key, buffer in buffers.items()},
        weight,
        means_of_variances=_means_of_variances(buffers),
        never_averaged=_unit_vectors(module),
        name=name,
    )
    take_buffers(module, {key: torch.from_numpy(array) for key, array in found.items()})


def buffers_beside(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that ``module.state_dict()`` leaves out."""
    saved = module.state_dict().keys()
    return {key: buffer for key, buffer in module.named_buffers(remove_duplicate=False) if key not in saved}


@torch.no_grad()
def take_buffers(module: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Overwrite buffers, in place where they have the shape, with these of the same names."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for key, value in values.items():
        _take_over(module, key, buffers.get(key), value)


@contextmanager
def buffers_unchanged(module: torch.nn.Module, but: Collection[torch.nn.Module] = ()) -> Iterator[None]:
    """Put back, at the end, the buffers that are changed or replaced in this block, except those of some layers."""
    kept = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        if part not in but
        for name, buffer in part.named_buffers(recurse=False)
        if _is_plain(buffer)
    ]
    try:
        yield
    finally:
        for part, name, buffer, before in kept:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)  # unseen by autograd, which may still need the buffer for gradients
            if getattr(part, name) is not buffer:
                setattr(part, name, buffer)


def _is_plain(buffer: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(buffer) or buffer.is_meta:
        return False
    return buffer.layout is torch.strided and not buffer.is_quantized


def _array(buffer: torch.Tensor) -> npt.NDArray[np.generic]:
    plain = buffer.detach().cpu().resolve_conj().resolve_neg()
    small_float = plain.is_floating_point() and plain.element_size() == 1
    kind = torch.float32 if small_float else _AS_NUMPY.get(plain.dtype, plain.dtype)
    return plain.to(kind).numpy()


def _means_of_variances(buffers: dict[str, torch.Tensor]) -> dict[str, str]:
    """The running variances of normalization layers, and their means."""
    pairs = {key: f"{key.removesuffix('running_var')}running_mean" for key in buffers if key.endswith("running_var")}
    return {variance: mean for variance, mean in pairs.items() if mean in buffers}


def _unit_vectors(module: torch.nn.Module) -> set[str]:
    """The vectors of spectral normalizations: a mean of two is shorter than either."""
    found: set[str] = set()
    for path, part in module.named_modules():
        names = ["_u", "_v"] if isinstance(part, parametrizations._SpectralNorm) else []  # noqa: SLF001
        hooks = [hook for hook in part._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]  # noqa: SLF001
        names += [f"{hook.name}{end}" for hook in hooks for end in ("_u", "_v")]
        found.update(f"{path}.{name}" if path else name for name in names)
    return found


def _take_over(module: torch.nn.Module, key: str, buffer: torch.Tensor | None, value: torch.Tensor) -> None:
    if buffer is not None and buffer.shape == value.shape and 0 not in buffer.stride():
        buffer.copy_(value)
        return
    path, _, name = key.rpartition(".")
    owner: Any = module.get_submodule(path)
    device = next((each.device for each in (*owner.buffers(), *module.parameters())), torch.device("cpu"))
    if name in owner._buffers:  # noqa: SLF001  (torch has no public way to replace one that is None)
        owner._buffers[name] = value.to(device, None if buffer is None else buffer.dtype)  # noqa: SLF001
    else:
        owner.register_buffer(name, value.to(device))
