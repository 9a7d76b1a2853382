"""Modules with parametrizations (``weight_norm``, ``spectral_norm``, ``register_parametrization``) for pickle.

PyTorch gives such a module a class that it creates at run time, and refuses to pickle the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import parametrize


def is_parametrized(value: object) -> bool:
    """Return whether a value is a module with a parametrization of its own, not only of a child."""
    return isinstance(value, torch.nn.Module) and parametrize.is_parametrized(value)


def reduced(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return the reduction of a module for pickle: its original class, its attributes, and its parametrizations."""
    kind = parametrize.type_before_parametrizations(module)
    return _blank, (kind,), module.__dict__, None, None, _parametrize_again


def _blank(kind: type[torch.nn.Module]) -> torch.nn.Module:
    return kind.__new__(kind)


def _parametrize_again(module: torch.nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    parametrize._inject_new_class(module)  # noqa: SLF001  (torch has no public way)
    for name in module.parametrizations:  # type: ignore[union-attr]
        parametrize._inject_property(module, name)  # noqa: SLF001
