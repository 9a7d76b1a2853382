"""What resumed Lightning runs keep: buffers, masks, numbers in attributes and stops, in real ranks, without Spark."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning.checkpoint.best_model import RUN_KEY
from sparkhvd.estimators.params import policies
from sparkhvd.estimators.training.hooks import RunHooks
from tests.unit.estimators.arrays import Hooks, spec
from tests.unit.estimators.interruptions import assert_equal_values, values_of_epochs
from tests.unit.estimators.lightning.networks import (
    DATA,
    EVEN,
    SIZE,
    SOME_EMPTY,
    flat,
    module,
    network,
    source,
    trainer_of,
)
from tests.unit.estimators.lightning.resuming import fitted, trained_in_parts


class Fading(torch.nn.Module):
    """A loss whose weight falls with every step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(()))

    def forward(self, output, label):
        if torch.is_grad_enabled():
            self.weight *= 0.9
        return self.weight * torch.nn.functional.cross_entropy(output, label)


def resumed_with_a_fading_loss(sizes):
    """Return the weight of the loss and the parameters of an undisturbed and a resumed run."""

    def make(epochs):
        model = network()
        return trainer_of(model, epochs, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=Fading())

    rows = source(sizes, session.current().world.rank)
    packages = [trained_in_parts(stops, make, rows)[0]._package for stops in ((2,), (1, 2))]
    return [(package.losses[0].weight.item(), flat(package.model)) for package in packages]


def test_the_buffers_of_a_plain_modules_loss_are_those_of_all_ranks_rows_and_resume(group):
    for undisturbed, resumed in group.run(resumed_with_a_fading_loss, EVEN):
        assert undisturbed[0] == pytest.approx(0.9 ** (2 * len(EVEN)))
        assert resumed[0] == undisturbed[0]
        assert np.array_equal(resumed[1], undisturbed[1])
    # A rank without rows in a step leaves its buffer alone. The ranks' buffers are averaged at the end of an epoch.
    rows_of_ranks = np.sum(SOME_EMPTY, axis=0)
    weights = [0.9 ** sum(step[rank] > 0 for step in SOME_EMPTY) for rank in range(SIZE)]
    for undisturbed, resumed in group.run(resumed_with_a_fading_loss, SOME_EMPTY):
        assert undisturbed[0] == pytest.approx(np.average(weights, weights=rows_of_ranks) ** 2)
        assert resumed[0] == undisturbed[0]
        assert np.array_equal(resumed[1], undisturbed[1])


def continued_with_pruning(permanent, lottery):
    """Return the parameters and the number of zeros of an uninterrupted run that prunes, and of one that resumes."""
    from lightning.pytorch.callbacks import ModelPruning  # noqa: PLC0415

    def make(epochs):
        pruning = ModelPruning(
            "l1_unstructured",
            amount=lambda epoch: 0.3 if epoch < 2 else 0,
            make_pruning_permanent=permanent,
            use_lottery_ticket_hypothesis=lottery,
        )
        return trainer_of(module(), epochs, callbacks=[pruning])

    rows, results = source(EVEN, session.current().world.rank), []
    for stops in ((4,), (2, 3, 4)):
        layers = trained_in_parts(stops, make, rows)[0]._package.model.layers
        weights = np.concatenate([layers[at].weight.detach().flatten().numpy() for at in (0, 2)])
        results.append((weights, layers[0].bias.detach().numpy()))
    return results


@pytest.mark.parametrize(("permanent", "lottery"), [(True, False), (False, False), (True, True)])
def test_weights_that_were_pruned_stay_pruned_in_a_resumed_run(group, permanent, lottery):
    for undisturbed, resumed in group.run(continued_with_pruning, permanent, lottery):
        assert np.mean(undisturbed[0] == 0) == pytest.approx(0.51, abs=0.02)
        for one, other in zip(undisturbed, resumed, strict=True):
            assert np.array_equal(one, other)


def pruned_by_chance():
    """Return a mask of a run that prunes weights at random after each epoch, and the fraction of the weights left."""
    from lightning.pytorch.callbacks import ModelPruning  # noqa: PLC0415

    pruning = ModelPruning("random_unstructured", amount=lambda epoch: 0.5 if epoch == 0 else 0)
    rank, masks = session.current().world.rank, []

    class Masks(Hooks):
        def on_epoch_end(self, report, trainer):
            masks.append(trainer._module.layers[0].weight_mask.numpy().copy())
            return super().on_epoch_end(report, trainer)

    trainer = trainer_of(module(), 2, callbacks=[pruning])
    trainer.fit(source(EVEN, rank), source(EVEN, rank), Masks())
    return masks, float((trainer._package.model.layers[0].weight != 0).float().mean())


def test_weights_that_a_callback_prunes_at_random_are_the_same_on_all_ranks(group):
    (masks, left), (other_masks, _) = group.run(pruned_by_chance)
    for mask, other in zip(masks, other_masks, strict=True):
        assert np.array_equal(mask, masks[0])
        assert np.array_equal(mask, other)
        assert set(mask.flatten().tolist()) == {0.0, 1.0}
    # The callback prunes half of all weights together. The masks of two ranks would leave a quarter or three quarters.
    assert left == pytest.approx(0.5, abs=0.12)


def continued_in_double_precision():
    """Return the parameters of an uninterrupted run with the precision 64-true, and of one that resumes."""

    def make(epochs):
        return trainer_of(module(), epochs, trainer_args={"precision": "64-true"})

    rows = source(EVEN, session.current().world.rank)
    return [flat(trained_in_parts(stops, make, rows)[0]._package.model) for stops in ((4,), (2, 4))]


def test_a_resumed_run_keeps_the_digits_of_double_precision(group):
    for undisturbed, resumed in group.run(continued_in_double_precision):
        assert undisturbed.dtype == np.float64
        assert np.array_equal(undisturbed, resumed)


def continued_with_late_buffers():
    """Return the parameters and a buffer of runs whose module fills, in the first epoch, a buffer that was None."""

    class Late(type(module())):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", None)

        def on_train_batch_end(self, *parts):
            super().on_train_batch_end(*parts)
            self.seen = (0 if self.seen is None else self.seen) + torch.ones(2)

    rows = source(EVEN, session.current().world.rank)
    runs = [trained_in_parts(stops, lambda epochs: trainer_of(Late(), epochs), rows) for stops in ((4,), (2, 4))]
    models = [trainer._package.model for trainer, _ in runs]
    return [(flat(model), model.seen.numpy()) for model in models]


def test_a_resumed_run_keeps_buffers_that_were_none_at_its_start(group):
    for undisturbed, resumed in group.run(continued_with_late_buffers):
        assert np.array_equal(undisturbed[1], np.full(2, 4 * len(EVEN)))
        for one, other in zip(undisturbed, resumed, strict=True):
            assert np.array_equal(one, other)


def ended_without_validation():
    """Return the epochs of a run whose last epoch ``max_steps`` ends before its validation, and the best epoch."""
    rank = session.current().world.rank
    trainer = trainer_of(module(), 9, trainer_args={"max_steps": 30})
    run = replace(trainer._spec, checkpoints=policies.Checkpoints(best="val_loss"))
    hooks = RunHooks(None, "r", run, session.current())
    trainer.fit(source(EVEN, rank), source(EVEN, rank), hooks)
    return [bool(record.validation) for record in hooks.history], run.checkpoints.best_epoch(hooks.history)


def test_an_epoch_that_ends_before_its_validation_is_not_the_best(group):
    assert {str(found) for found in group.run(ended_without_validation)} == {"([True, True, False], 1)"}


def annealing():
    """Return a module that scales its loss by attributes, which its hooks and its optimizer change."""

    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            self.param_groups[0]["lr"] = 0.1 / self.steps
            return super().step(closure)

    class Annealing(type(module())):
        def on_train_start(self):
            self.factor, self.means, self.ends = 1.0, [torch.zeros(())], 0
            self.planned = self.trainer.estimated_stepping_batches

        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            self.factor, self.means, self.phase = 0.9 * self.factor, [self.means[0] + 1], f"phase {self.ends}"

        def training_step(self, batch, index):
            self.means[0] *= 0.9
            return super().training_step(batch, index) * (self.factor + self.means[0])

        def on_train_epoch_end(self):
            self.ends += 1

        def configure_optimizers(self):
            return Counting(self.parameters(), lr=0.1)

    return Annealing()


def on_rank_0(function):
    return function() if session.current().world.rank == 0 else None


def train_with_attributes(end):
    """Return weights and attributes of an undisturbed run and of one in two parts, and the attributes that it lost."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    rows = source(EVEN, session.current().world.rank)

    class Ending(Hooks):
        def on_step_end(self, report, trainer):
            if (report.epoch, report.step) == end:
                report.synchronize()
                self.found = hvd.broadcast_object(on_rank_0(trainer.state)), report.rank_state()
                raise InterruptedError

        def on_epoch_end(self, report, trainer):
            ends = super().on_epoch_end(report, trainer)
            if (report.epoch + 1, 0) == end:
                self.found = hvd.broadcast_object(on_rank_0(trainer.state)), None
                raise InterruptedError
            return ends

    undisturbed, first, second = (trainer_of(annealing(), 3) for _ in range(3))
    hooks = Ending()
    undisturbed.fit(rows, None, Hooks())
    with pytest.raises(InterruptedError):
        first.fit(rows, None, hooks)
    second.restore(hooks.found[0])
    second.fit(rows, None, Hooks(first_epoch=end[0], first_step=end[1], rank_state=hooks.found[1]))
    states = []
    for each in (undisturbed, second):
        trained = each._package.model
        numbers = (trained.factor, float(trained.means[0]), trained.ends, trained.phase, trained.planned)
        states.append((flat(trained), numbers))
    content = torch.load(io.BytesIO(hooks.found[0]), weights_only=True)
    return *states, content["callbacks"][RUN_KEY]["attributes"]


@pytest.mark.parametrize("end", [(1, 5), (2, 0)], ids=["within an epoch", "between epochs"])
def test_a_resumed_run_continues_with_numbers_and_tensors_in_attributes(group, end):
    for undisturbed, resumed, attributes in group.run(train_with_attributes, end):
        assert np.array_equal(undisturbed[0], resumed[0])
        assert undisturbed[1] == resumed[1]
        names = {name for _, name in attributes["values"]}
        assert names == {"factor", "means", "steps", "ends", "dropped"}
        assert attributes["missing"] == ["model.phase"]


def steps_before_a_callback_stops():
    """Stop all ranks within the second epoch; return epoch, step, and whether a checkpoint is allowed, by step."""
    from lightning.pytorch import Callback  # noqa: PLC0415

    class Stop(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = (trainer.current_epoch, batch_idx) == (1, 2)

    hooks = Hooks()
    fitted("simple", hooks, callbacks=[Stop()])
    return [(report.step, report.allows_checkpoint) for report in hooks.steps if report.epoch > 0]


def test_no_checkpoint_is_made_at_the_step_at_which_a_callback_ends_the_training(group):
    """A run resumed from it would train the rest of the epoch, and further epochs."""
    assert group.run(steps_before_a_callback_stops) == [[(1, True), (2, True), (3, False)]] * SIZE


def values_with_a_stop_before_min_epochs(interruptions):
    from lightning.pytorch import Callback  # noqa: PLC0415

    class Stop(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (0, 0):
                trainer.should_stop = True

    def make():
        return trainer_of(module("simple"), 4, callbacks=[Stop()], trainer_args={"min_epochs": 2})

    return values_of_epochs(make, source(EVEN, session.current().world.rank), spec(DATA, 4), interruptions)


@pytest.mark.parametrize("interruptions", [[(0, 2)], [(1, 1)]])
def test_a_resumed_run_ends_after_min_epochs_if_a_callback_stopped_it_before(group, interruptions):
    for undisturbed, resumed in group.run(values_with_a_stop_before_min_epochs, interruptions):
        assert_equal_values(undisturbed, resumed, rel=1e-6)


def refusal_of_a_user_defined_loader(how):
    from lightning.pytorch import LightningDataModule  # noqa: PLC0415

    class Own(LightningDataModule):
        def train_dataloader(self):
            return torch.utils.data.DataLoader([{"x": torch.zeros(6), "y": 0}] * 12, batch_size=4)

    whole = source(EVEN, session.current().world.rank)
    with pytest.raises(ParamError) as refusal:
        trainer_of(module("simple"), how=how, data_module=lambda _train, _val: Own()).fit(whole, None, Hooks())
    return str(refusal.value)


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        ({"checkpoints": policies.Checkpoints(every_steps=2)}, "leave every_steps of checkpoints out."),
        ({"elastic": True}, "leave min_num_proc and max_num_proc out."),
    ],
    ids=["every_steps", "elastic"],
)
def test_a_loader_without_a_saved_position_is_refused_if_runs_resume_within_epochs(group, how, remedy):
    for message in group.run(refusal_of_a_user_defined_loader, how):
        assert message.startswith("data_module trains with its own loader, whose position within an epoch cannot")
        assert message.endswith(remedy)
