"""The Ray actor of an elastic job: it offers one slot to the driver, and runs the workers that the driver starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ray

from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.rpc.registration import Introduction
from sparkhvd.task.elastic.lease import describe_slot, hold_lease
from sparkhvd.task.host.host_hash import host_hash
from sparkhvd.task.job import Job
from sparkhvd.task.ray.cleanup import Cleanup


class LeaseTask:
    """A slot in a Ray cluster. The driver calls ``node``, then ``hold``, which returns at the end of the lease."""

    def node(self) -> str:
        """Return the id of this actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    def hold(self, job: Job, membership: MembershipAddress, lease: int, attempt: int, cpus: int) -> None:
        """Offer the slot until the driver ends the lease, and run the workers in it.

        Args:
            job: the job.
            membership: the address of the membership server, without a worker's number.
            lease: the number of the lease.
            attempt: distinguishes the actors that hold the lease one after the other.
            cpus: the number of cores of a worker.

        Raises:
            LaunchError: this host cannot take part in the job, or the driver was lost.
        """
        # A warm process would be a child of another worker, not of the actor that Ray ends.
        job = replace(job, config=replace(job.config, warm_seconds=0.0))
        # Ray's GPU ids are names from the CUDA_VISIBLE_DEVICES with which the node was started.
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        offer = describe_slot(job, lease, ray.util.get_node_ip_address(), host_hash(self.node()), devices)
        hold_lease(job, membership, Introduction(attempt, offer, 0), cpus, _guard)


def _guard(leader: int, folder: str | None) -> Callable[[], None]:
    """Let a worker end, and its folder be removed, if Ray kills this actor."""
    return Cleanup(leader, folder).close
