"""What modules log and lose, in real ranks, without Spark."""

from __future__ import annotations

import math

from sparkhvd.comm import session
from sparkhvd.estimators.history import averaged
from tests.unit.estimators.arrays import Hooks
from tests.unit.lightning.networks import EVEN, module, source, trainer_of


def logged_by_rank_0():
    """The record of an epoch in which rank 0 alone logs, and how often the logger is to write."""
    kind = type(module())

    class Alone(kind):
        def training_step(self, batch, index):
            if self.trainer.is_global_zero:
                self.log("first", 3.0 + index, rank_zero_only=True, on_step=False, on_epoch=True)
            return super().training_step(batch, index)

        def on_validation_epoch_end(self):
            if self.trainer.is_global_zero:
                self.log("val_first", 5.0, rank_zero_only=True)

    rank = session.current().world.rank
    trainer, hooks = trainer_of(Alone(), how={"log_every_n_steps": 7}), Hooks()
    trainer.fit(source(EVEN, rank), source(EVEN, rank), hooks)
    return averaged(hooks.reports[-1], session.current()), trainer._trainer.log_every_n_steps


def test_what_rank_0_alone_logs_is_in_the_history(group):
    for record, every in group.run(logged_by_rank_0):
        assert (round(record.train["first"], 4), record.validation["first"]) == (8.5, 5.0)
        assert set(record.train) == {"loss", "accuracy", "twice", "first"}
        assert every == 7


def losses_by_hand():
    class ByHand(type(module())):
        def training_step(self, batch, index):
            super().training_step(batch, index)
            if index == 3:
                self.manual_backward(math.nan * self(batch["x"]).sum())

    trainer, hooks = trainer_of(ByHand("by hand")), Hooks()
    trainer.fit(source(EVEN, session.current().world.rank), None, hooks)
    return [report.loss is not None and math.isnan(report.loss) for report in hooks.steps], hooks.reports[0].train


def test_a_step_that_returns_no_loss_tells_of_one_that_is_no_number(group):
    for steps, train in group.run(losses_by_hand):
        assert steps[:4] == [False, False, False, True]
        assert train["loss"] == (0.0, 0)
