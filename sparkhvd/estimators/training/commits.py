"""The commits of an elastic fit: checkpoints in the memory of every rank, from which the ranks resume after a change.

Rank 0 makes a commit and sends it to all ranks, so any survivor can continue from it. A commit costs time, so the steps
between two commits are chosen such that commits take about ``_SHARE`` of the training's time.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

from sparkhvd.comm import objects, session
from sparkhvd.comm.elastic.state import State
from sparkhvd.errors import ParamError
from sparkhvd.estimators.training.checkpoint import Checkpoint

_SHARE = 0.02


class Commits(State):
    """The last commit of an elastic fit, and the steps until the next one.

    Attributes:
        checkpoint: the last commit; None before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint: Checkpoint | None = None
        self._cost = 0.0  # seconds that the last commit took
        self._interval = 1  # the steps from one commit to the next
        self.reset()

    def reset(self) -> None:
        """Measure the duration of steps anew, which depends on the number of ranks.

        The next commit is as many steps away as before the change. If it came earlier, an error that recurs at the
        same step would follow a new commit each time. The driver would take the new commits for progress.
        """
        self._steps, self._since = 0, time.monotonic()

    def on_reset(self) -> None:
        """Free the threads and files of the interrupted training, and adapt to the new ranks."""
        gc.collect()
        super().on_reset()

    def save(self) -> None:
        """Do nothing: ``take`` keeps the checkpoint."""

    def restore(self) -> None:
        """Do nothing: the training resumes from ``checkpoint``."""

    def sync(self) -> None:
        """Overwrite the last commit of all ranks with that of rank 0; collective."""
        kept = (self.checkpoint, self._interval)
        self.checkpoint, self._interval = objects.broadcast_object(session.current(), kept, name="last commit")

    def is_due(self) -> bool:
        """Count a step; return whether to commit after it. All ranks return the same."""
        self._steps += 1
        return self._steps >= self._interval

    def take(self, make: Callable[[], Checkpoint]) -> None:
        """Commit the checkpoint that rank 0 makes; collective.

        Raises:
            HostsUpdatedInterrupt: ranks are about to join or to leave, so the training stops here.
            ParamError: rank 0 refused to make the checkpoint; raised on all ranks, because any rank 0 would refuse.
        """
        communicator = session.current()
        begun = time.monotonic()
        made: tuple[Checkpoint, int] | ParamError | None = None
        if communicator.world.rank == 0:
            try:
                made = (make(), self._next_interval(begun))
            except ParamError as error:
                made = error
        made = objects.broadcast_object(communicator, made, name="commit")
        if isinstance(made, ParamError):
            raise made
        self.checkpoint, self._interval = made  # type: ignore[misc]  # rank 0 has made one
        self.commit()
        self._since, self._steps = time.monotonic(), 0
        self._cost = self._since - begun

    def published(self, path: str) -> None:
        """Report to the driver that a checkpoint is in the Store: new ranks resume from it if all are lost."""
        if (membership := session.membership()) is not None:
            membership.published(path)

    def _next_interval(self, begun: float) -> int:
        step_seconds = max((begun - self._since) / max(self._steps, 1), 1e-6)
        cost = self._cost or time.monotonic() - begun
        return max(1, math.ceil(cost / _SHARE / step_seconds))
