"""The gang of a job on Ray: a placement group that reserves all resources at once, and an actor per rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sparkhvd.deadline import Deadline
from sparkhvd.driver.ray.cluster import RankResources, describe_nodes, node_resources
from sparkhvd.errors import LaunchError, SlotsError, StartTimeoutError
from sparkhvd.task.ray.rank_task import CONCURRENCY_GROUPS, RankTask

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
# How long a placement group may be pending before a warning says what the cluster lacks.
_SETTLE_SECONDS = 5.0
_END_SECONDS = 8.0


@dataclass(frozen=True)
class RayPlacement:
    """Where the ranks of a job run.

    Attributes:
        resources: the resources of each rank.
        ranks_per_node: the number of ranks that each node must have; None lets Ray pack them on few nodes.
        group: an existing placement group to use; None creates one.
        seconds: the time limit of the reservation; None uses the rest of the job's start timeout.
        limit_name: the name of the argument that sets the time limit, for error messages.
    """

    resources: RankResources = field(default_factory=RankResources)
    ranks_per_node: int | None = None
    group: Any = None
    seconds: float | None = None
    limit_name: str = "start_timeout"


class RayGang:
    """The placement group and the actors of one job; ``close`` ends them.

    Args:
        placement: where the actors run.
        num_proc: the number of actors.
    """

    def __init__(self, placement: RayPlacement, num_proc: int) -> None:
        self._placement = placement
        self._num_proc = num_proc
        self._group = placement.group
        self.actors: list[Any] = []

    def reserve(self, deadline: Deadline, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Wait until all resources are reserved.

        Args:
            deadline: the end of the wait.
            seconds: the length of the wait, for error messages.
            cancelled: polled during the wait; returns whether to stop waiting.

        Raises:
            SlotsError: the cluster has fewer resources than the ranks need.
            StartTimeoutError: the cluster has enough resources, but they stayed busy.
            LaunchError: the job was cancelled.
        """
        if self._group is not None:
            self._check_group()
            return
        per_node = self._placement.ranks_per_node
        bundle = self._placement.resources.bundle(per_node or 1)
        strategy = "PACK" if per_node is None else "STRICT_SPREAD"
        self._group = placement_group([bundle] * (self._num_proc // (per_node or 1)), strategy=strategy)
        warning_deadline = deadline.capped(_SETTLE_SECONDS)
        while not self._group.wait(max(0.01, min(_POLL_SECONDS, deadline.remaining()))):
            if cancelled():
                raise LaunchError("The job was cancelled before Ray had reserved its resources.")
            if deadline.expired():
                raise self._not_reserved(seconds)
            if warning_deadline.expired() and not self._fits():
                # An autoscaler may add nodes.
                limit = self._limit_text(seconds)
                logger.warning("%s The job waits for more nodes until %s is over.", self._shortage_text(), limit)
                warning_deadline = deadline

    def start_actors(self) -> list[Any]:
        """Start the actors, and return them."""
        actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankTask)
        per_bundle = self._placement.ranks_per_node or 1
        resources = self._placement.resources
        for index in range(self._num_proc):
            bundle = index // per_bundle if self._placement.group is None else -1  # -1: any bundle with room
            options = actor.options(
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, bundle),
            )
            self.actors.append(options.remote())
        return self.actors

    def close(self) -> None:
        """End the ranks, then the actors, and release the resources."""
        if not ray.is_initialized():  # the user has shut Ray down, and so the actors; a call would start Ray again
            return
        try:
            with contextlib.suppress(Exception):  # Ray itself may have ended, with its actors
                ends = [actor.end.remote() for actor in self.actors]
                if ends:
                    ray.wait(ends, num_returns=len(ends), timeout=_END_SECONDS)
        finally:  # another Ctrl-C may interrupt the wait
            for actor in self.actors:
                with contextlib.suppress(Exception):
                    ray.kill(actor)
            if self._group is not None and self._placement.group is None:
                with contextlib.suppress(Exception):
                    remove_placement_group(self._group)

    def _check_group(self) -> None:
        resources, bundles = self._placement.resources, self._group.bundle_specs
        room = sum(resources.ranks_in(bundle) for bundle in bundles)
        if room < self._num_proc:
            raise SlotsError(
                f"The current placement group has room for {room} ranks with {resources} each, but {self._num_proc} "
                f"were requested. Its bundles are {list(bundles)}. Request fewer ranks, or pass "
                "use_current_placement_group=False."
            )

    def _fits(self) -> bool:
        rooms = [self._placement.resources.ranks_in(node) for node in node_resources()]
        per_node = self._placement.ranks_per_node
        if per_node is None:
            return sum(rooms) >= self._num_proc
        return sum(room >= per_node for room in rooms) >= self._num_proc // per_node

    def _shortage_text(self) -> str:
        per_node = self._placement.ranks_per_node
        where = "" if per_node is None else f", {per_node} on each of {self._num_proc // per_node} nodes"
        return (
            f"{self._num_proc} ranks with {self._placement.resources} each{where} were requested, but the Ray cluster "
            f"has {describe_nodes(node_resources())}."
        )

    def _limit_text(self, seconds: float) -> str:
        return f"{self._placement.limit_name}={seconds:g} s"

    def _not_reserved(self, seconds: float) -> LaunchError:
        if not self._fits():
            return SlotsError(f"{self._shortage_text()} Request fewer ranks or resources, or add nodes.")
        return StartTimeoutError(
            f"Ray did not reserve the resources of {self._num_proc} ranks with {self._placement.resources} each within "
            f"{self._limit_text(seconds)}. The cluster has {describe_nodes(node_resources())}, but other jobs use "
            f"them: only {_free_resources()} are free. Wait until other jobs have ended, or raise "
            f"{self._placement.limit_name}."
        )


def _free_resources() -> str:
    free = ray.available_resources()
    return " and ".join(f"{free.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))


def ended_actor(error: Exception) -> str:
    """Return why Ray lost an actor, from the exception of a call to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if line.startswith("The actor is dead because")), lines[0] if lines else "")
    return cause.partition(" Some common causes")[0].removesuffix(".") or type(error).__name__
