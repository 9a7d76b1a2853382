"""Where the survivors of a lost rank resume, in real ranks, without Spark."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.errors import HorovodInternalError
from tests.unit.estimators.arrays import spec
from tests.unit.estimators.interruptions import assert_equal_values, fits_with_and_without_loss
from tests.unit.estimators.lightning.networks import DATA, EVEN, flat, network, source, trainer_of

# The hook of a callback in which the rank is lost, by the moment.
HOOKS = {"in the step": "on_after_backward", "after the update": "on_train_batch_end"}


def losing_module(kind):
    """Return a module that logs three values for each epoch."""
    import lightning.pytorch as lightning  # noqa: PLC0415
    from torchmetrics import MeanMetric  # noqa: PLC0415

    class Logging(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()
            self.automatic_optimization = kind != "by hand"
            if kind == "buffer":
                self.register_buffer("scale", torch.ones(()))
            self.mean = MeanMetric() if kind == "metric" else None

        def training_step(self, batch, index):
            if kind == "attribute":
                self.steps = index
            loss = torch.nn.functional.cross_entropy(self.layers(batch["x"]), batch["y"])
            self.log("twice", 2 * loss, on_step=True, on_epoch=True)
            self.log("most", batch["x"].max(), reduce_fx="max", on_step=False, on_epoch=True)
            if kind == "by hand":
                step_by_hand(self, loss)
            return loss

        def on_train_batch_end(self, *_):
            self.log("late", self.layers[0].bias.mean(), on_step=False, on_epoch=True)

        def validation_step(self, batch, index):
            self.log("val_loss", torch.nn.functional.cross_entropy(self.layers(batch["x"]), batch["y"]))

        def configure_optimizers(self):
            return scheduled(torch.optim.Adam(self.parameters(), lr=0.02), kind)

    return Logging()


def step_by_hand(module, loss):
    module.optimizers().zero_grad()
    module.manual_backward(loss)
    module.optimizers().step()


def scheduled(optimizer, kind):
    by_step = {"interval": "step", "monitor": "twice"}
    schedules = torch.optim.lr_scheduler
    schedule = schedules.ReduceLROnPlateau(optimizer) if kind == "plateau" else schedules.ExponentialLR(optimizer, 0.97)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **by_step}}


def lose_rank(kind, moment):
    """Lose a rank in the sixth step of the second epoch; return what the survivors resume with."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: PLC0415

    class LoseRank(Callback):
        pass

    def lose(_callback, trainer, *_rest):
        if (trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx) == (1, 5):
            raise HorovodInternalError("rank 1 was lost")

    class Counting(Callback):
        def state_dict(self):
            return {"batches": 1}

    setattr(LoseRank, HOOKS[moment], lose)
    rank, how = session.current().world.rank, {"elastic": True}
    more = {"callback": [Counting()], "best": [ModelCheckpoint(monitor="val_loss")]}.get(kind, [])

    def make(loses):
        return trainer_of(losing_module(kind), 2, how, callbacks=[*more, *([LoseRank()] if loses else [])])

    fits = fits_with_and_without_loss(make, source(EVEN, rank), spec(DATA, 2, **how))
    if fits is None:
        return None
    position, *trained = fits
    return position, *((flat(trainer._package.model), values) for trainer, values in trained)


def test_survivors_of_a_lost_rank_resume_from_the_last_complete_step(group):
    for position, (weights, values), (resumed_weights, resumed_values) in group.run(lose_rank, "", "in the step"):
        assert position == (1, 5)
        assert np.array_equal(weights, resumed_weights)
        assert_equal_values(values, resumed_values, rel=1e-6)
        assert {"loss", "twice", "most", "late"} <= set(values[1][0])


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("", "after the update"),
        *(
            (kind, "in the step")
            for kind in ("buffer", "metric", "attribute", "by hand", "plateau", "callback", "best")
        ),
    ],
)
def test_survivors_return_to_the_last_commit_if_they_lack_the_state_of_the_last_step(group, kind, moment):
    assert group.run(lose_rank, kind, moment) == [None, None]
