"""Buffers of ``torch.ao.quantization``'s observers, whose mean over the ranks is not what one rank would observe."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch

_EXTREMES = {"min_val": "min", "max_val": "max"}


def observed_extremes(module: torch.nn.Module) -> dict[str, str]:
    """Return the buffers that hold the least or the greatest value seen, each with "min" or "max"."""
    observers = _named(module, "observer", "MinMaxObserver", "PerChannelMinMaxObserver")
    return {_join(path, name): extreme for path, _ in observers for name, extreme in _EXTREMES.items()}


def copied_buffers(module: torch.nn.Module) -> set[str]:
    """Return the buffers that make sense only together with others: of histograms, and of scales and zero points."""
    histograms = {
        _join(path, name)
        for path, _ in _named(module, "observer", "HistogramObserver")
        for name in ("histogram", *_EXTREMES)
    }
    return histograms | {_join(path, "scale") for path, _ in _named(module, "fake_quantize", "FakeQuantize")}


@torch.no_grad()
def renew_scales(module: torch.nn.Module, changed: Collection[str]) -> None:
    """Recompute the scales and zero points of fake quantization where the observed extremes have changed."""
    extremes = observed_extremes(module)
    for path, part in _named(module, "fake_quantize", "FakeQuantize"):
        prefix = _join(path, "activation_post_process")
        if any(name in changed for name in (f"{prefix}.{extreme}" for extreme in _EXTREMES) if name in extremes):
            for buffer, value in zip((part.scale, part.zero_point), part.calculate_qparams(), strict=True):
                buffer.resize_(value.shape).copy_(value)


def _named(module: torch.nn.Module, source: str, *names: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of some classes of a module of PyTorch; without its import, there are no such parts."""
    imported = sys.modules.get(f"torch.ao.quantization.{source}")
    classes = () if imported is None else tuple(getattr(imported, name) for name in names)
    yield from ((path, part) for path, part in module.named_modules() if isinstance(part, classes))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
