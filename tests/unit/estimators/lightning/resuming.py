"""Hooks and fits that the tests of resumed Lightning runs share."""

from __future__ import annotations

from sparkhvd.comm import session
from tests.unit.estimators.arrays import Hooks
from tests.unit.estimators.lightning.networks import (
    SOME_EMPTY,
    module,
    source,
    trainer_of,
)


class Keeping(Hooks):
    """Keeps the state like a checkpoint: only on rank 0, at the end of an epoch."""

    def on_epoch_end(self, report, trainer):
        self.state = trainer.state() if session.current().world.rank == 0 else None
        return super().on_epoch_end(report, trainer)


LONGER = [*SOME_EMPTY, *SOME_EMPTY]


def fitted(kind, hooks, rows_left=None, state=None, epochs=3, **more):
    """Return the trainer of a fit that resumes from ``state``."""
    whole = source(LONGER, session.current().world.rank)
    trainer = trainer_of(module(kind), epochs, **more)
    if state is not None:
        trainer.restore(state)
    trainer.fit(rows_left or whole, whole, hooks)
    return trainer
