"""Hooks and fits that the tests of resumed Lightning runs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparkhvd.comm import objects, session
from sparkhvd.data.read.batches import BatchSource
from sparkhvd.estimators.plugin import Trainer
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


def trained_in_parts(
    stops: Sequence[int],
    make: Callable[[int], Trainer],
    rows: BatchSource,
    validation: BatchSource | None = None,
    hooks_class: type[Keeping] = Keeping,
) -> tuple[Trainer, Keeping]:
    """Return the trainer and the hooks of the last of several fits, each of which resumes from the previous one.

    Args:
        stops: the number of epochs after which each fit ends.
        make: returns a new trainer for a number of epochs.
        rows: the rows for training.
        validation: the rows for validation.
        hooks_class: the class of the hooks, one object per fit.
    """
    state, first = None, 0
    for epochs in stops:
        trainer, hooks = make(epochs), hooks_class(first_epoch=first)
        if state is not None:
            trainer.restore(state)
        trainer.fit(rows, validation, hooks)
        assert [report.epoch for report in hooks.reports] == list(range(first, epochs))
        # Like ranks that read it from the Store.
        state, first = objects.broadcast_object(session.current(), hooks.state), epochs
    return trainer, hooks


LONGER = [*SOME_EMPTY, *SOME_EMPTY]


def fitted(kind, hooks, rows_left=None, state=None, epochs=3, **more):
    """Return the trainer of a fit that resumes from ``state``."""
    whole = source(LONGER, session.current().world.rank)
    trainer = trainer_of(module(kind), epochs, **more)
    if state is not None:
        trainer.restore(state)
    trainer.fit(rows_left or whole, whole, hooks)
    return trainer
