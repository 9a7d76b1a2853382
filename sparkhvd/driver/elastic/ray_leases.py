"""Leases of an elastic job on Ray: each is an actor with the resources of a rank.

Without a discovery, Ray chooses the nodes of the actors. A discovery limits the nodes and the number of actors on each.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.client import ray as ray_client

from sparkhvd._util.background import is_done_within
from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.deadline import Deadline
from sparkhvd.driver.ray.cluster import CONNECTION, RankResources, node_resources
from sparkhvd.driver.ray.gang import ended_actor
from sparkhvd.errors import ConfigError, LaunchError
from sparkhvd.task.job import Job
from sparkhvd.task.ray.lease import LeaseTask

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_KILLED_SECONDS = 5.0
# The share of a node's own resource that binds an actor to the node; Ray counts ten-thousandths.
_NODE_SHARE = 0.0001


class RayLeases:
    """Runs leases in Ray actors; ``opened`` must be entered before any other method is called.

    Args:
        resources: the resources of each rank.
        grows: whether there is a lease for every slot of the cluster, also on nodes that join later.
        has_discovery: whether a discovery limits the leases: none starts before the first ``offer``.
    """

    name = "Ray"
    loss = "was lost with its Ray actor: the actor or its node has ended, or the node is cut off"
    # Keeps this process connected to Ray.
    opened = staticmethod(CONNECTION.opened)

    def __init__(self, resources: RankResources, *, grows: bool, has_discovery: bool = False) -> None:
        self._resources = resources
        self._grows = grows
        self._attempts = itertools.count()
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}  # by lease; guarded by _lock
        self._nodes: dict[int, str] = {}  # the ids of the actors' nodes, by attempt; guarded by _lock
        self._changed = threading.Condition(self._lock)  # notified when a lease may start on a node
        self._offered: Mapping[str, int] | None = {} if has_discovery else None  # slots by address; guarded by _lock
        self._addresses: dict[int, str] = {}  # the leases of a discovery's slots, by number; guarded by _lock
        self._cancelled: set[int] = set()  # guarded by _lock

    def offer(self, slots: Mapping[str, int]) -> None:
        """Note the slots that the discovery offers, by the address of the node."""
        with self._lock:
            self._offered = slots
            self._changed.notify_all()

    def addresses(self) -> tuple[str, str]:
        """Return the address of this driver's node twice: actors reach the driver there, and it can be bound.

        Raises:
            ConfigError: this process is connected through Ray Client, so it may run on another network.
        """
        if ray_client.is_connected():
            raise ConfigError(
                "Elastic jobs do not work through Ray Client, because the ranks must connect to the driver. Run this "
                "program on a node of the cluster, for example with `ray job submit`."
            )
        own_id = ray.get_runtime_context().get_node_id()
        address = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own_id)
        return address, address

    def inheriting(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return ``act``: Ray's connection belongs to the whole process."""
        return act

    def run(self, number: int, job: Job, membership: MembershipAddress) -> Exception | None:
        """Start an actor that holds a lease, and return its error or None once it has ended."""
        attempt = next(self._attempts)
        try:
            actor = self._start(number)
            try:
                node = self._answer(actor.node.remote())
                with self._lock:
                    self._nodes[attempt] = node
                self._answer(actor.hold.remote(job, membership, number, attempt, self._resources.cpus))
            finally:
                with self._lock:
                    self._nodes.pop(attempt, None)
                    self._actors.pop(number, None)
                _kill(actor)
        except (RayError, LaunchError) as error:
            return error
        finally:
            with self._lock:
                if self._addresses.pop(number, None) is not None:
                    self._changed.notify_all()
        return None

    def cancel(self, number: int, done: Future[None]) -> None:
        """Kill the actor of a lease unless ``done``, also while it waits for resources."""
        end = Deadline.after(_KILLED_SECONDS)
        with self._lock:
            self._cancelled.add(number)
            self._changed.notify_all()
        while not done.done() and not end.expired():  # its thread may be about to start the actor
            with self._lock:
                actor = self._actors.get(number)
            if actor is not None:
                _kill(actor)
            is_done_within(done, _POLL_SECONDS)
        with self._lock:
            self._cancelled.discard(number)

    def is_stopped(self) -> bool:
        """Return whether this process is no longer connected to Ray."""
        return not ray.is_initialized()

    def explain(self, error: Exception) -> tuple[str, bool]:
        """Return the message for the error of an actor; the job can continue with other actors."""
        cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
        why = str(cause or error) if isinstance(cause or error, LaunchError) else ended_actor(error)
        return f"A Ray actor of the elastic job has ended: {why.rstrip('.')}", False

    def others_run(self, submitted: int, connected: int) -> bool:
        """Return whether other programs have reserved resources of the cluster.

        An actor that starts has its resources before it connects. So if the cluster has room for all leases, those of
        all leases may be the job's own.
        """
        if self.is_stopped():
            return False
        try:
            total, free = ray.cluster_resources(), ray.available_resources()
        except RayError as error:
            logger.debug("The free resources of the Ray cluster are unknown: %s", error)
            return False
        own = self._resources.bundle(submitted if self._resources.ranks_in(total) >= submitted else connected)
        return any(total.get(name, 0.0) - free.get(name, 0.0) > amount + 1e-3 for name, amount in own.items())

    def leaving(self, attempts: Mapping[int, int]) -> dict[int, str]:
        """Return the leases that must end.

        Ray drains their nodes, for example because a spot instance is about to end, or the discovery has withdrawn
        their slots.
        """
        draining = _draining_nodes()
        with self._lock:
            drained = [number for number, attempt in attempts.items() if self._nodes.get(attempt) in draining]
            withdrawn = [] if self._offered is None else _excess(attempts, self._addresses, self._offered)
        return {
            **dict.fromkeys(withdrawn, "The discovery has withdrawn the slot"),
            **dict.fromkeys(drained, "Ray drains the node"),
        }

    def slots(self) -> int:
        """Return how many ranks have room in the cluster, or 0 if the number of leases is constant."""
        if not self._grows or self.is_stopped():
            return 0
        with self._lock:
            if self._offered is not None:
                return sum(self._offered.values())
        with suppress(Exception):  # the head node may restart
            return sum(self._resources.ranks_in(node) for node in node_resources())
        return 0

    def _start(self, number: int) -> Any:
        if self.is_stopped():  # a call would start Ray again
            raise LaunchError("Ray has been shut down in this process.")
        address = self._slot_for(number)
        kind = ray.remote(LeaseTask).options(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            # Every node has this resource, under its own address.
            resources=None if address is None else {f"node:{address}": _NODE_SHARE},
            max_restarts=0,
        )
        with self._lock:
            actor = self._actors[number] = kind.remote()
        return actor

    def _slot_for(self, number: int) -> str | None:
        """Take a slot for a lease and return the address of its node; None without a discovery.

        Waits until the discovery offers a free slot.

        Raises:
            LaunchError: the lease was cancelled, or Ray was shut down.
        """
        with self._lock:
            while self._offered is not None:
                held = Counter(self._addresses.values())
                free = [address for address, slots in self._offered.items() if held[address] < slots]
                if free:
                    self._addresses[number] = free[0]
                    return free[0]
                if number in self._cancelled or self.is_stopped():
                    raise LaunchError("The discovery offered no slot until the end of the lease.")
                self._changed.wait(_POLL_SECONDS)
        return None

    def _answer(self, ref: Any) -> Any:
        while not ray.wait([ref], timeout=_POLL_SECONDS)[0]:
            if self.is_stopped():
                raise LaunchError("Ray has been shut down in this process.")
        return ray.get(ref)


def _excess(leases: Iterable[int], addresses: Mapping[int, str], offered: Mapping[str, int]) -> list[int]:
    """Return the leases with the highest numbers on every node that has more leases than offered slots."""
    kept: Counter[str] = Counter()
    excess = []
    for number in sorted(leases):
        if (address := addresses.get(number)) is None:
            continue
        kept[address] += 1
        if kept[address] > offered.get(address, 0):
            excess.append(number)
    return excess


def _kill(actor: Any) -> None:
    if ray.is_initialized():
        with suppress(Exception):  # Ray itself may have ended, with its actors
            ray.kill(actor)


def _draining_nodes() -> set[str]:
    """Return the ids of the nodes that Ray drains; Ray has no public function for it."""
    if not ray.is_initialized():
        return set()
    try:
        return set(ray._private.state.state.get_draining_nodes())  # noqa: SLF001
    except Exception as error:  # noqa: BLE001 - other versions of Ray may lack the function
        logger.debug("Ray did not tell which nodes it drains: %s", error)
        return set()
