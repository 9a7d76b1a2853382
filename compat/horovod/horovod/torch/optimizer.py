"""The distributed optimizer."""

from __future__ import annotations

from sparkhvd.torch.optimizer.distributed_optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
