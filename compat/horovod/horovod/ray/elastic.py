"""``ElasticRayExecutor``, and the discovery from which programs derive their own."""

from __future__ import annotations

from collections import Counter

import ray

from horovod.ray import ElasticRayExecutor
from sparkhvd.driver.ray.cluster import RankResources

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]


class RayHostDiscovery:
    """Finds the slots of all nodes of the Ray cluster; for ``settings.discovery`` with ``override_discovery=False``.

    Args:
        use_gpu: whether each slot has GPUs.
        cpus_per_slot: the number of cores of each slot.
        gpus_per_slot: the number of GPUs of each slot.
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.use_gpu = use_gpu
        self.cpus_per_slot = cpus_per_slot
        self.gpus_per_slot = gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots by address of each node that has slots."""
        resources = RankResources(self.cpus_per_slot, float(self.gpus_per_slot) if self.use_gpu else 0.0)
        slots: Counter[str] = Counter()
        for node in ray.nodes():
            if node["Alive"]:
                slots[node["NodeManagerAddress"]] += resources.ranks_in(node["Resources"])
        return dict(+slots)
