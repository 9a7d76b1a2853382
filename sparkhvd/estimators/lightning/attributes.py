"""Undo the changes of a step to the attributes of a module, for steps that must have no effect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkhvd.estimators.lightning.substitute_metrics import is_shared
from sparkhvd.lightning.reductions import metrics_of

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_COUNT_OF_METRIC, _VALUE_OF_METRIC = "_update_count", "_computed"

Restorer = Callable[[], Any]


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
        for part in {id(part): part for part in (*module.modules(), *metrics_of((module,)))}.values()
        for name in _attribute_names(part)
        if (restore := _restorer(vars(part)[name], counters or name == _COUNT_OF_METRIC, set())) is not None
    ]
    try:
        yield
    finally:
        for part, name, restore in restores:
            vars(part)[name] = restore()


def _attribute_names(part: nn.Module) -> Collection[str]:
    from torchmetrics import Metric, MetricCollection  # noqa: PLC0415  (Lightning brings it)

    if isinstance(part, MetricCollection):
        return ()
    if isinstance(part, Metric):
        # The ranks must agree whether a shared metric has a value already: otherwise, only some would synchronize it.
        more = () if is_shared(part) else (_COUNT_OF_METRIC, _VALUE_OF_METRIC)
        return [name for name in (*part._defaults, *more) if name in vars(part)]  # noqa: SLF001
    return vars(part).keys() - _MODULE_ATTRIBUTES


def _restorer(value: Any, counters: bool, seen: set[int]) -> Restorer | None:
    """Return a function that later restores and returns ``value``; None for objects that are not restored."""
    if isinstance(value, torch.Tensor):
        return partial(_restored_tensor, value, value.detach().clone())  # deepcopy refuses tensors with a graph
    if isinstance(value, float | complex) or (counters and isinstance(value, int)):
        return partial(_unchanged, value)
    if not isinstance(value, list | deque | set | dict) or id(value) in seen:
        return None
    seen.add(id(value))
    if isinstance(value, dict):
        return partial(
            _restored_container, value, [(key, _part_restorer(part, counters, seen)) for key, part in value.items()]
        )
    return partial(_restored_container, value, [(None, _part_restorer(part, counters, seen)) for part in value])


def _part_restorer(value: Any, counters: bool, seen: set[int]) -> Restorer:
    return _restorer(value, counters, seen) or partial(_unchanged, value)


def _unchanged(value: Any) -> Any:
    return value


def _restored_tensor(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return tensor if torch.equal(tensor, before) else before


def _restored_container(container: Any, parts: list[tuple[Any, Restorer]]) -> Any:
    """Return the container itself, which others may refer to, with its earlier parts."""
    restored = [(key, part()) for key, part in parts]
    container.clear()
    if isinstance(container, dict | set):
        container.update(restored if isinstance(container, dict) else [part for _, part in restored])
    else:
        container.extend(part for _, part in restored)
    return container
