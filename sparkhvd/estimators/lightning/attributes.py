"""Undo the changes of a step to the attributes of a module, for steps that must have no effect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
_OF_METRICS = ("_update_count", "_computed")

Restore = Callable[[], Any]


@contextmanager
def attributes_unchanged(module: nn.Module, *, counters: bool) -> Iterator[None]:
    """Restore, after this block, the lists, dicts, sets, numbers, tensors and torchmetrics of a module.

    Attributes that the block created remain, because hooks after a step may read them.

    Args:
        module: the module; the attributes of its submodules are restored, too.
        counters: whether integers are restored. Steps may decide by a counter when to communicate, so it must advance
            on all ranks.
    """
    restores = [
        (part, name, restore)
        for part in module.modules()
        for name in _names(part)
        if (restore := _restore_of(vars(part)[name], counters or name in _OF_METRICS, set())) is not None
    ]
    try:
        yield
    finally:
        for part, name, restore in restores:
            vars(part)[name] = restore()


def _names(part: nn.Module) -> Collection[str]:
    from torchmetrics import Metric, MetricCollection  # noqa: PLC0415  (Lightning brings it)

    if isinstance(part, MetricCollection):
        return ()
    if isinstance(part, Metric):
        return [name for name in (*part._defaults, *_OF_METRICS) if name in vars(part)]  # noqa: SLF001
    return vars(part).keys() - _OF_TORCH


def _restore_of(value: Any, counters: bool, seen: set[int]) -> Restore | None:
    """Return a function that returns ``value`` in its present state; None for other objects, which stay unchanged."""
    if isinstance(value, torch.Tensor):
        return partial(_unless_changed, value, value.detach().clone())  # deepcopy refuses tensors with a graph
    if isinstance(value, float | complex) or (counters and isinstance(value, int)):
        return partial(_same, value)
    if not isinstance(value, list | deque | set | dict) or id(value) in seen:
        return None
    seen.add(id(value))
    if isinstance(value, dict):
        return partial(_refill, value, [(key, _part_of(part, counters, seen)) for key, part in value.items()])
    return partial(_refill, value, [(None, _part_of(part, counters, seen)) for part in value])


def _part_of(value: Any, counters: bool, seen: set[int]) -> Restore:
    return _restore_of(value, counters, seen) or partial(_same, value)


def _same(value: Any) -> Any:
    return value


def _unless_changed(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return tensor if torch.equal(tensor, before) else before


def _refill(container: Any, parts: list[tuple[Any, Restore]]) -> Any:
    """Return the container itself, which others may refer to, with its earlier parts."""
    restored = [(key, part()) for key, part in parts]
    container.clear()
    if isinstance(container, dict | set):
        container.update(restored if isinstance(container, dict) else [part for _, part in restored])
    else:
        container.extend(part for _, part in restored)
    return container
