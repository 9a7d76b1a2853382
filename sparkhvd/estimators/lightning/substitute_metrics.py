"""The torchmetrics of a rank that has no rows in a step, and runs it on a substitute batch only to communicate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from sparkhvd.lightning.reductions import metrics_of


@contextmanager
def metrics_ignore_batch(module: nn.Module) -> Iterator[None]:
    """Keep the batch of a step out of the values that torchmetrics synchronize over the ranks in this step.

    A value that ``forward`` does not synchronize is still that of the batch: metrics may have no value without rows.
    """
    with ExitStack() as stack:
        for metric in metrics_of((module,)):
            if is_shared(metric):
                stack.enter_context(_ignores_batch(metric))
        yield


def is_shared(metric: Any) -> bool:
    """Return whether a metric may synchronize its values over the ranks."""
    return bool(metric.dist_sync_on_step or metric.sync_on_compute)


@contextmanager
def _ignores_batch(metric: Any) -> Iterator[None]:
    own_update, own_forward = metric.update, metric.forward
    in_forward = False

    def update(*batch: object, **named: object) -> None:
        if in_forward:
            own_update(*batch, **named)
        else:
            metric._computed = None  # noqa: SLF001  (as every update does)
            metric._update_count += 1  # noqa: SLF001

    def forward(*batch: object, **named: object) -> object:
        nonlocal in_forward
        if metric.dist_sync_on_step:
            return own_forward(*batch, **named)
        state = metric._copy_state_dict()  # noqa: SLF001
        in_forward = True
        try:
            return own_forward(*batch, **named)
        finally:
            in_forward = False
            vars(metric).update(state)

    vars(metric).update(update=update, forward=forward)
    try:
        yield
    finally:
        vars(metric)["update"] = own_update
        del vars(metric)["forward"]
