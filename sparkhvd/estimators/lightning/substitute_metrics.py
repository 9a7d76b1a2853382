"""The torchmetrics of a rank that has no rows in a step, and runs it on a substitute batch only to communicate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sparkhvd.lightning.reductions import collections_of, metrics_of


@contextmanager
def metrics_ignore_batch(*owners: object) -> Iterator[None]:
    """Keep the current batch out of the values that torchmetrics of modules and callbacks synchronize over the ranks.

    A value that ``forward`` does not synchronize is still that of the batch: metrics may have no value without rows.
    """
    with ExitStack() as stack:
        for collection in collections_of(owners):
            stack.enter_context(_keeps_groups(collection))
        for metric in metrics_of(owners):
            if is_shared(metric):
                stack.enter_context(_ignores_batch(metric))
        yield


def is_shared(metric: Any) -> bool:
    """Return whether a metric may synchronize its values over the ranks."""
    return bool(metric.dist_sync_on_step or metric.sync_on_compute)


@contextmanager
def _keeps_groups(collection: Any) -> Iterator[None]:
    """Let a later batch decide which metrics have equal states and are updated as one; here, all states are equal."""
    enabled = collection._enable_compute_groups  # noqa: SLF001
    if not collection._groups_checked:  # noqa: SLF001
        collection._enable_compute_groups = False  # noqa: SLF001
    try:
        yield
    finally:
        collection._enable_compute_groups = enabled  # noqa: SLF001


@contextmanager
def _ignores_batch(metric: Any) -> Iterator[None]:
    own_update, own_forward = metric.update, metric.forward
    in_forward = False
    ignored = 0  # the updates that ``metric._update_count`` contains until the end of the batch

    def update(*batch: object, **named: object) -> None:
        nonlocal ignored
        if in_forward:
            own_update(*batch, **named)
        else:
            metric._computed = None  # noqa: SLF001  (as every update does)
            metric._update_count += 1  # noqa: SLF001
            ignored += 1

    def forward(*batch: object, **named: object) -> object:
        nonlocal in_forward, ignored
        updates = ignored
        try:
            if metric.dist_sync_on_step:
                return own_forward(*batch, **named)
            state = metric._copy_state_dict()  # noqa: SLF001
            in_forward = True
            try:
                return own_forward(*batch, **named)
            finally:
                in_forward = False
                vars(metric).update(state)
        finally:
            ignored = updates + 1  # however often ``forward`` calls ``update``

    vars(metric).update(update=update, forward=forward)
    try:
        yield
    finally:
        vars(metric)["update"] = own_update
        del vars(metric)["forward"]
        # The metric may have been reset since.
        metric._update_count = max(metric._update_count - ignored, 0)  # noqa: SLF001
