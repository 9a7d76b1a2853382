"""The commits of an elastic fit: checkpoints in the memory of every rank, from which the ranks resume after a change.

Rank 0 makes a commit and sends it to all ranks, so any survivor can continue from it. The number of steps between two
commits is chosen so that commits take about ``_TARGET_TIME_SHARE`` of the training time.

A survivor whose weights are still those at the end of its last step makes a checkpoint of them instead of returning to
the last commit (``until_change``). This needs the metrics of all ranks at that step, because those of a lost rank are
lost with it. So the ranks exchange them in every step, unless the steps are too short for that. PyTorch exchanges them
before the update. Keras and Lightning have them only after the update: if a rank is lost in between, its metrics of the
step are lost, and the survivors return to the last commit.
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
# The time for which ranks exchange their metrics, between hosts: sums, or also states of metrics as bytes.
_SUMS_SECONDS, _STATES_SECONDS = 2e-4, 1e-3


class Commits(State):
    """The last commit of an elastic fit, and the steps until the next one.

    Attributes:
        checkpoint: the last commit; None before the first.
        exchanges_metrics: whether the ranks exchange their metrics in every step, for ``complete_step``.
        can_recover: whether this rank's trainer can have its last complete step after a failure. Rank 0's counts.
        exchanges_states: whether the exchange includes states of metrics.
        requested_end: the epoch in which this rank had requested the end of the training before the last change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint: Checkpoint | None = None
        self._cost = 0.0  # seconds that the last commit took
        self._interval = 1  # the steps from one commit to the next
        self.exchanges_metrics = False
        self.can_recover, self.exchanges_states = False, True
        self.requested_end: int | None = None
        self.reset()

    def reset(self) -> None:
        """Restart the measurement of step times, which depend on the number of ranks.

        The next commit is a full interval away, as after a commit. If it came earlier, each recurrence of an error at
        the same step would follow a new commit, and the driver would mistake the new commits for progress.
        """
        self._steps, self._since = 0, time.monotonic()
        self._recover: Callable[[], Checkpoint | None] | None = None

    def on_reset(self) -> None:
        """Call ``reset``, and free the threads and files of the interrupted training."""
        super().on_reset()
        gc.collect()

    def save(self) -> None:
        """Do nothing: ``take`` keeps the checkpoint."""

    def restore(self) -> None:
        """Make a commit of the last complete step if this rank still has its state, else keep ``checkpoint``."""
        recover, self._recover = self._recover, None
        membership = session.membership()
        if recover is None or membership is None or not self._steps:
            return
        if (recovered := recover()) is not None:
            self.checkpoint = recovered
            membership.commit += self._steps  # so that all ranks resume from the newest step that a rank has completed

    def sync(self) -> None:
        """Replace the last commit of every rank with rank 0's; collective."""
        commit = (self.checkpoint, self._interval, self.exchanges_metrics)
        self.checkpoint, self._interval, self.exchanges_metrics = objects.broadcast_object(
            session.current(), commit, name="last commit"
        )

    def begin_update(self) -> None:
        """Note that the weights change: from now on, a failure returns to the last commit."""
        self._recover = None

    def complete_step(self, recover: Callable[[], Checkpoint | None]) -> None:
        """Note that a step is complete; after a failure, ``recover`` returns a checkpoint of it, or None."""
        self._recover = recover

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
        outcome: tuple[Checkpoint, int, bool] | ParamError | None = None
        if communicator.world.rank == 0:
            try:
                outcome = (make(), *self._next_interval(started))
            except ParamError as error:
                outcome = error
        outcome = objects.broadcast_object(communicator, outcome, name="commit")
        if isinstance(outcome, ParamError):
            raise outcome
        self.checkpoint, self._interval, self.exchanges_metrics = outcome  # type: ignore[misc]  # rank 0 has made one
        self.commit()
        self._since, self._steps = time.monotonic(), 0
        self._cost = self._since - started

    def published(self, path: str) -> None:
        """Report to the driver that a checkpoint is in the Store: new ranks resume from it if all are lost."""
        if (membership := session.membership()) is not None:
            membership.published(path)

    def _next_interval(self, started: float) -> tuple[int, bool]:
        """Return the steps until the next commit, and whether to exchange metrics in each of them."""
        step_seconds = max((started - self._since) / max(self._steps, 1), 1e-6)
        cost = self._cost or time.monotonic() - started
        interval = max(1, math.ceil(cost / _TARGET_TIME_SHARE / step_seconds))
        exchange_seconds = _STATES_SECONDS if self.exchanges_states else _SUMS_SECONDS
        is_cheap = _TARGET_TIME_SHARE * step_seconds > exchange_seconds
        return interval, self.can_recover and interval > 1 and is_cheap


def until_change(version: Callable[[], object], state: Callable[[], bytes | None]) -> Callable[[], bytes | None]:
    """Return a function that returns ``state()`` while ``version()`` is the same as now, and None afterwards.

    Args:
        version: returns a value that differs if the weights have changed since.
        state: returns the state of a trainer; None if other parts of it may have changed.
    """
    kept = version()
    return lambda: state() if version() == kept else None
