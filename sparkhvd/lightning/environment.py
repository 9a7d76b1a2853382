"""The ranks of a job as Lightning's cluster environment, without the base class: each Lightning package has its own."""

from __future__ import annotations

from sparkhvd.comm import session
from sparkhvd.world import World


class RankEnvironment:
    """Provides ranks and sizes. It also keeps Lightning from detecting environments, which would start MPI."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0  # nothing listens: the ranks are connected already

    @staticmethod
    def detect() -> bool:
        return session.is_initialized()

    @property
    def _world(self) -> World:
        session.init()
        return session.current().world

    def world_size(self) -> int:
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has set the size."""

    def global_rank(self) -> int:
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has set the rank."""

    def local_rank(self) -> int:
        return self._world.local_rank

    def node_rank(self) -> int:
        return self._world.cross_rank

    def teardown(self) -> None:
        """Do nothing: the ranks stay connected."""
