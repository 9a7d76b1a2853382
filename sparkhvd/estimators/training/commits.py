"""The commits of an elastic fit: checkpoints in the memory of every rank, from which the ranks resume after a change.

Rank 0 makes a commit and sends it to all ranks, so any survivor can continue from it. The number of steps between two
commits is chosen so that commits take about ``_TARGET_TIME_SHARE`` of the training time.
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

_TARGET_TIME_SHARE = 0.02


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
        """Restart the measurement of step times, which depend on the number of ranks.

        The next commit is a full interval away, as after a commit. If it came earlier, each recurrence of an error at
        the same step would follow a new commit, and the driver would mistake the new commits for progress.
        """
        self._steps, self._since = 0, time.monotonic()

    def on_reset(self) -> None:
        """Free the threads and files of the interrupted training, and call ``reset``."""
        gc.collect()
        super().on_reset()

    def save(self) -> None:
        """Do nothing: ``take`` keeps the checkpoint."""

    def restore(self) -> None:
        """Do nothing: the training resumes from ``checkpoint``."""

    def sync(self) -> None:
        """Replace the last commit of every rank with rank 0's; collective."""
        commit = (self.checkpoint, self._interval)
        self.checkpoint, self._interval = objects.broadcast_object(session.current(), commit, name="last commit")

    def is_due(self) -> bool:
        """Count a step and return whether to commit after it; the result is the same on all ranks."""
        self._steps += 1
        return self._steps >= self._interval

    def take(self, make: Callable[[], Checkpoint]) -> None:
        """Commit the checkpoint that rank 0 makes; collective.

        Raises:
            HostsUpdatedInterrupt: ranks are about to join or to leave, so the training stops here.
            ParamError: rank 0 cannot make the checkpoint; raised on all ranks, because another rank 0 would fail, too.
        """
        communicator = session.current()
        started = time.monotonic()
        outcome: tuple[Checkpoint, int] | ParamError | None = None
        if communicator.world.rank == 0:
            try:
                outcome = (make(), self._next_interval(started))
            except ParamError as error:
                outcome = error
        outcome = objects.broadcast_object(communicator, outcome, name="commit")
        if isinstance(outcome, ParamError):
            raise outcome
        self.checkpoint, self._interval = outcome  # type: ignore[misc]  # rank 0 has made one
        self.commit()
        self._since, self._steps = time.monotonic(), 0
        self._cost = self._since - started

    def published(self, path: str) -> None:
        """Report to the driver that a checkpoint is in the Store: new ranks resume from it if all are lost."""
        if (membership := session.membership()) is not None:
            membership.published(path)

    def _next_interval(self, started: float) -> int:
        step_seconds = max((started - self._since) / max(self._steps, 1), 1e-6)
        cost = self._cost or time.monotonic() - started
        return max(1, math.ceil(cost / _TARGET_TIME_SHARE / step_seconds))
