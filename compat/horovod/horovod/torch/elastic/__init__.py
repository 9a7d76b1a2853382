"""``horovod.torch.elastic`` on top of ``sparkhvd.torch.elastic``."""

from __future__ import annotations

from horovod.torch.elastic.sampler import ElasticSampler
from sparkhvd.torch.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    ObjectState,
    State,
    TorchState,
    run,
)

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
