"""Synchronization of a module's buffers, which every rank changes on its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.spectral_norm import SpectralNorm

from sparkhvd.comm import session
from sparkhvd.comm.agreement import agree
from sparkhvd.torch.quantization import copied_buffers, observed_extremes, renew_scales

# NumPy lacks these dtypes; the larger ones represent all their values.
_AS_NUMPY = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


@torch.no_grad()
def synchronize_buffers(module: torch.nn.Module, weight: float, name: str = "buffers") -> dict[str, torch.Tensor]:
    """Make the buffers of a module equal on all ranks; collective.

    Running statistics become the mean over the ranks. The extremes of observers for quantization become the extremes of
    all ranks. Buffers of other dtypes get the values of one rank, see ``comm.agreement.agree``. Buffers without an
    array form (sparse, quantized, uninitialized) are not synchronized.

    Args:
        module: the model, with the same submodules on every rank.
        weight: the weight of this rank's buffers, such as the number of rows that changed them.
        name: the operation's name, equal on all ranks.

    Returns:
        This rank's own values of the buffers that differed, which ``take_buffers`` sets again.
    """
    arrays = buffer_arrays(module)
    agreed = agree(
        session.current(),
        arrays,
        weight,
        means_of_variances=_means_of_variances(arrays),
        never_averaged=_unit_vectors_and_masks(module) | copied_buffers(module),
        extremes=observed_extremes(module),
        name=name,
    )
    own = copies_of_buffers(module, [key for key in agreed if key in arrays])
    take_buffers(module, {key: torch.from_numpy(array) for key, array in agreed.items()})
    renew_scales(module, own)
    return own


def buffer_arrays(module: torch.nn.Module) -> dict[str, npt.NDArray[np.generic]]:
    """Return the buffers that have an array form, by name; an array may share the memory of its buffer."""
    return {key: _array(buffer) for key, buffer in module.named_buffers() if _is_plain(buffer)}


def copies_of_buffers(module: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return copies of some buffers, by name."""
    return {name: module.get_buffer(name).clone() for name in names}


def non_persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that ``module.state_dict()`` omits."""
    saved = module.state_dict().keys()
    return {key: buffer for key, buffer in module.named_buffers(remove_duplicate=False) if key not in saved}


@torch.no_grad()
def take_buffers(
    module: torch.nn.Module,
    values: Mapping[str, torch.Tensor],
    unless_changed_since: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Overwrite buffers with the values of the same names, in place where the shapes are equal.

    Args:
        module: the module.
        values: the values by the names of the buffers.
        unless_changed_since: earlier values; a buffer that no longer has its earlier value is left alone.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for key, value in values.items():
        before = (unless_changed_since or {}).get(key)
        if before is None or _has_value(buffers.get(key), before):
            _overwrite(module, key, buffers.get(key), value)


def take_new_buffers(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Set the buffers from a state that ``load_state_dict`` cannot set: it needs a buffer with memory of its own."""
    for path, part in module.named_modules():
        names = [name for name, buffer in part._buffers.items() if buffer is None or _is_expanded(buffer)]  # noqa: SLF001
        keys = [f"{path}.{name}" if path else name for name in names]
        take_buffers(module, {key: state[key] for key in keys if key in state})


@contextmanager
def buffers_unchanged(module: torch.nn.Module, but: Collection[torch.nn.Module] = ()) -> Iterator[None]:
    """Restore, after this block, the buffers that it changed or replaced, except those of the layers in ``but``."""
    saved = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        if part not in but
        for name, buffer in part.named_buffers(recurse=False)
        if _is_plain(buffer)
    ]
    try:
        yield
    finally:
        for part, name, buffer, before in saved:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)  # bypasses autograd, which may still need the buffer for gradients
            if getattr(part, name) is not buffer:
                setattr(part, name, buffer)


def _has_value(buffer: torch.Tensor | None, value: torch.Tensor) -> bool:
    """Return whether a buffer has the bytes of a value; a comparison of numbers would find NaN unequal to itself."""
    if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        return False
    own, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (buffer, value))
    return torch.equal(own, other)


def _is_plain(buffer: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(buffer) or buffer.is_meta:
        return False
    return buffer.layout is torch.strided and not buffer.is_quantized


def _is_expanded(buffer: torch.Tensor) -> bool:
    """Return whether several elements of a buffer have one location."""
    return _is_plain(buffer) and 0 in buffer.stride()


def _array(buffer: torch.Tensor) -> npt.NDArray[np.generic]:
    plain = buffer.detach().cpu().resolve_conj().resolve_neg()
    small_float = plain.is_floating_point() and plain.element_size() == 1
    kind = torch.float32 if small_float else _AS_NUMPY.get(plain.dtype, plain.dtype)
    return plain.to(kind).numpy()


def _means_of_variances(buffers: Collection[str]) -> dict[str, str]:
    """Return the running mean that belongs to each running variance, by the names of the buffers."""
    pairs = {key: f"{key.removesuffix('running_var')}running_mean" for key in buffers if key.endswith("running_var")}
    return {variance: mean for variance, mean in pairs.items() if mean in buffers}


def _unit_vectors_and_masks(module: torch.nn.Module) -> set[str]:
    """Return the buffers whose mean would be meaningless.

    A mean of the unit vectors of a spectral normalization is shorter, and a mean of the masks of pruned weights, which
    each rank may draw, is not a mask.
    """
    buffers: set[str] = set()
    for path, part in module.named_modules():
        names = ["_u", "_v"] if isinstance(part, parametrizations._SpectralNorm) else []  # noqa: SLF001
        for hook in part._forward_pre_hooks.values():  # noqa: SLF001
            if isinstance(hook, SpectralNorm):
                names += [f"{hook.name}_u", f"{hook.name}_v"]
            elif isinstance(hook, prune.BasePruningMethod):
                names.append(f"{hook._tensor_name}_mask")  # noqa: SLF001
        buffers.update(f"{path}.{name}" if path else name for name in names)
    return buffers


def _overwrite(module: torch.nn.Module, key: str, buffer: torch.Tensor | None, value: torch.Tensor) -> None:
    if buffer is not None and buffer.shape == value.shape and not _is_expanded(buffer):
        buffer.copy_(value)
        return
    path, _, name = key.rpartition(".")
    owner: Any = module.get_submodule(path)
    device = next((tensor.device for tensor in (*owner.buffers(), *module.parameters())), torch.device("cpu"))
    if name in owner._buffers:  # noqa: SLF001  (torch has no public way to replace a buffer that is None)
        owner._buffers[name] = value.to(device, None if buffer is None else buffer.dtype).clone()  # noqa: SLF001
    else:
        owner.register_buffer(name, value.to(device))
