"""The connection of this process to a Ray cluster, and the resources of the cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from sparkhvd.errors import LaunchError


class RayConnection:
    """Counts the jobs that use the connection to Ray. If sparkhvd opened the connection, the last job closes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0  # guarded by _lock
        self._opened_here = False  # guarded by _lock

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep this process connected to Ray.

        If there is no connection, call ``ray.init()``, as Ray's own libraries do. It connects to the cluster in
        ``RAY_ADDRESS``, or else to a cluster on this machine, or else it starts a cluster here.

        Raises:
            LaunchError: the connection failed.
        """
        with self._lock:
            if self._users == 0:
                self._opened_here = not ray.is_initialized()
                if self._opened_here:
                    _connect()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._opened_here:
                    ray.shutdown()


# Ray has one connection per process.
CONNECTION = RayConnection()


@dataclass(frozen=True)
class RankResources:
    """The resources of one rank in a Ray cluster."""

    cpus: int = 1
    gpus: float = 0.0

    def bundle(self, ranks: int = 1) -> dict[str, float]:
        """Return the bundle of a placement group for a number of ranks on one node."""
        gpus = {"GPU": self.gpus * ranks} if self.gpus else {}
        return {"CPU": float(self.cpus * ranks), **gpus}

    def ranks_in(self, resources: Mapping[str, float]) -> int:
        """Return how many ranks fit into the resources of a node or a bundle."""
        return min(_number_in(resources.get(name, 0.0), amount) for name, amount in self.bundle().items())

    def __str__(self) -> str:
        return resources_text(self.bundle())


def _number_in(available: float, amount: float) -> int:
    """Return how often an amount fits into the available one; a fraction of a GPU is a part of one GPU."""
    pieces = [1.0] * int(available) + [available % 1.0] if amount < 1.0 else [available]
    return sum(int(piece / amount + 1e-6) for piece in pieces)  # Ray counts ten-thousandths


def node_resources() -> list[dict[str, float]]:
    """Return the CPUs and GPUs of each node that is alive."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [{name: node[name] for name in ("CPU", "GPU") if node.get(name)} for node in nodes]


def resources_text(resources: Mapping[str, float]) -> str:
    """Return resources as text, such as ``2 CPU and 0.5 GPU``."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "no CPU"


def describe_nodes(nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the nodes of a cluster as text, small ones first and equal ones together."""
    texts = [resources_text(node) for node in sorted(nodes, key=lambda node: sorted(node.items()))]
    counted = [(texts.count(text), text) for text in dict.fromkeys(texts)]
    return "; ".join(f"{count} node{'s' if count > 1 else ''} with {text}" for count, text in counted) or "no node"


def _connect() -> None:
    try:
        ray.init()
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        raise LaunchError(
            f"Ray does not connect: {str(error).rstrip('.')}. Call ray.init(address=...) before the job starts, or set "
            "RAY_ADDRESS."
        ) from error
