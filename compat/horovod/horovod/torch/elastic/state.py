"""The state of elastic jobs."""

from __future__ import annotations

from sparkhvd.torch.elastic import TorchState

__all__ = ["TorchState"]
