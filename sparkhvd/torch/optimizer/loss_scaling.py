"""Loss scaling: ``torch.amp.GradScaler`` sees the gradients of all ranks, and all ranks skip the same steps."""

from __future__ import annotations

import functools
from typing import Any

import torch

from sparkhvd.torch.optimizer.exchange import ExchangingOptimizer


@functools.cache
def make_scalers_wait() -> None:
    """Make every ``GradScaler`` wait for a distributed optimizer before it divides gradients in place.

    ``GradScaler`` has no hook for this. Without the wait, it would divide gradients while they are being exchanged, and
    a rank whose own gradients are finite would take a step that another rank skips.
    """
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def unscale_all_ranks(
        scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, ExchangingOptimizer):
            return unscale(scaler, optimizer, *args, **kwargs)
        optimizer.before_unscaling()
        infinite = unscale(scaler, optimizer, *args, **kwargs)
        for found_inf in infinite.values():
            optimizer.agree_on_skipping(found_inf)
        return infinite

    torch.amp.GradScaler._unscale_grads_ = unscale_all_ranks  # type: ignore[method-assign, assignment]
