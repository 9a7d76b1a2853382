"""Training with Lightning that resumes between epochs, in real ranks, without Spark."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.estimators.training.logs.history import average_over_ranks
from tests.unit.estimators.lightning.networks import (
    EVEN,
    flat,
    module,
    network,
    rated,
    source,
    trainer_of,
)
from tests.unit.estimators.lightning.resuming import Keeping, trained_in_parts


def continued(kind, keeps_best=""):
    """Return the parameters of an uninterrupted run of four epochs, and of one that stops after two and resumes.

    With ``keeps_best``, return those of the best epoch on rank 0, after those of a run that ends with this epoch.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

    rank = session.current().world.rank
    rows = source(EVEN, rank)

    def make(epochs):
        # The loss falls, so the first epoch has the highest loss, which counts as the best.
        best = [ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=2)] if keeps_best else []
        model = module(kind)
        if keeps_best == "module":
            model.configure_callbacks = best.copy
        return trainer_of(model, epochs, callbacks=[] if keeps_best == "module" else best)

    runs = ((1,), (4,), (1, 2, 4)) if keeps_best else ((4,), (2, 4))
    trainers = [trained_in_parts(stops, make, rows, rows)[0] for stops in runs]
    models = [trainer._package.model for trainer in trainers]
    return [np.append(flat(model), model.brief.numpy()) if rank == 0 or not keeps_best else None for model in models]


@pytest.mark.parametrize("owner", ["estimator", "module"])
def test_a_resumed_run_returns_the_best_epoch_of_all(group, owner):
    """The callback that chooses it is a parameter of the estimator, or the module configures it."""
    first, undisturbed, resumed = group.run(continued, "with objects", owner)[0]
    assert np.array_equal(first, undisturbed)
    assert np.array_equal(first, resumed)


@pytest.mark.parametrize("kind", ["simple", "plateau", "with objects", "precise", "dropping"])
def test_a_resumed_run_equals_an_uninterrupted_one(group, kind):
    for undisturbed, resumed in group.run(continued, kind):
        assert np.array_equal(undisturbed, resumed)


def freezing_by_itself():
    """Return a module whose hooks freeze a layer for the first epoch."""

    class Freezing(type(module())):
        def on_train_start(self):
            super().on_train_start()
            self.layers[0].requires_grad_(False)

        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            if self.current_epoch == 1:
                self.layers[0].requires_grad_(True)

    return Freezing()


def unfreezing_in_the_second_epoch(epochs):
    """Return a trainer with a callback that freezes a layer for the first epoch."""
    from lightning.pytorch.callbacks import BaseFinetuning  # noqa: PLC0415

    class Second(BaseFinetuning):
        def freeze_before_training(self, trained):
            self.freeze(trained.layers[0])

        def finetune_function(self, trained, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(trained.layers[0], optimizer)

    model = module()
    type(model).configure_optimizers = lambda trained: torch.optim.SGD(trained.layers[2].parameters(), 0.1)
    return trainer_of(model, epochs, callbacks=[Second()])


def continued_after_unfreezing(within):
    """Return the parameters of an undisturbed run whose second epoch unfreezes a layer, and of one resumed later."""

    def make(epochs):
        return trainer_of(freezing_by_itself(), epochs) if within else unfreezing_in_the_second_epoch(epochs)

    rows = source(EVEN, session.current().world.rank)
    return [flat(trained_in_parts(stops, make, rows)[0]._package.model) for stops in ((4,), (3, 4))]


@pytest.mark.parametrize("within", [False, True], ids=["callback", "module"])
def test_layers_that_an_earlier_epoch_unfroze_continue_to_train_in_a_resumed_run(group, within):
    for undisturbed, resumed in group.run(continued_after_unfreezing, within):
        assert not np.array_equal(undisturbed[:96], flat(network())[:96])
        assert np.array_equal(undisturbed, resumed)


def ended_by_steps():
    """Return the epochs, parameters and losses of a run of 30 steps, with 12 per epoch, and of one that resumes."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    class Ending(Keeping):
        def on_epoch_end(self, report, trainer):
            super().on_epoch_end(report, trainer)
            if report.epoch == self.last:
                raise InterruptedError
            return True

    rank, results = session.current().world.rank, []
    for stops in ((None,), (0, None), (0, 1, None)):
        state, first, reports = None, 0, []
        for last in stops:
            trainer, hooks = trainer_of(module(), 9, trainer_args={"max_steps": 30}), Ending(first_epoch=first)
            hooks.last = last
            if state is not None:
                trainer.restore(state)
            with pytest.raises(InterruptedError) if last is not None else contextlib.nullcontext():
                trainer.fit(source(EVEN, rank), None, hooks)
            reports += [(report.epoch, report.train["loss"]) for report in hooks.reports]
            state = hvd.broadcast_object(hooks.state, 0)
            first = (last or 0) + 1
        results.append((flat(trainer._package.model), reports, trainer._trainer.global_step))
    return results


def test_a_run_that_max_steps_will_end_resumes_with_its_next_epoch(group):
    for (parameters, reports, steps), *resumed in group.run(ended_by_steps):
        assert ([epoch for epoch, _ in reports], steps) == ([0, 1, 2], 30)
        for others in resumed:
            assert others[1:] == (reports, steps)
            assert np.array_equal(others[0], parameters)


def continued_at_the_rate_that_was_found():
    """Return parameters and rates of runs like those of ``continued``, with a rate set by a LearningRateFinder."""
    from lightning.pytorch.callbacks import LearningRateFinder  # noqa: PLC0415

    def make(epochs):
        finder = LearningRateFinder(1e-3, 0.1, num_training_steps=20, early_stop_threshold=None)
        return trainer_of(rated(finder), epochs)

    rows = source(EVEN, session.current().world.rank)
    runs = [trained_in_parts(stops, make, rows, hooks_class=Rates) for stops in ((4,), (2, 4))]
    return [(flat(trainer._package.model), set(hooks.rates)) for trainer, hooks in runs]


def test_a_resumed_run_keeps_the_learning_rate_that_was_found_at_its_start(group):
    for (parameters, rates), (resumed, kept) in group.run(continued_at_the_rate_that_was_found):
        assert rates == kept
        assert rates != {0.02}
        assert np.array_equal(parameters, resumed)


class First(Keeping):
    """Keeps the state of the first epoch."""

    def on_epoch_end(self, report, trainer):
        goes_on = super().on_epoch_end(report, trainer)
        self.first = getattr(self, "first", self.state)
        return goes_on


def steps_of_the_first_epoch():
    """Return the optimizer's step counts after two epochs and after restoring the first, and its learning rate."""
    rank = session.current().world.rank
    trainer, hooks = trainer_of(module(), 2, {"scale_lr": True}), First()
    trainer.fit(source(EVEN, rank), None, hooks)
    optimizer = trainer._trainer.optimizers[0]
    steps = [int(next(iter(optimizer.state.values()))["step"])]
    if rank == 0:
        trainer.restore(hooks.first)
        steps.append(int(next(iter(optimizer.state.values()))["step"]))
    return steps, optimizer.param_groups[0]["lr"]


def test_the_optimizer_of_the_best_epoch_is_restored_with_its_weights(group):
    (steps, rate), (_, wanted) = group.run(steps_of_the_first_epoch)
    assert steps == [2 * len(EVEN), len(EVEN)]
    assert rate == wanted


def first_epoch_before_unfreezing():
    """Return the groups of the optimizer and the frozen parameters at the end, and after restoring the first epoch."""
    rank, results = session.current().world.rank, []
    trainer, hooks = unfreezing_in_the_second_epoch(2), First()
    trainer.fit(source(EVEN, rank), None, hooks)
    for state in (None, hooks.first) if rank == 0 else (None,):
        if state is not None:
            trainer.restore(state)
        frozen = [name for name, one in trainer._package.model.named_parameters() if not one.requires_grad]
        results.append((len(trainer._trainer.optimizers[0].param_groups), frozen))
    return results


def test_the_best_epoch_may_precede_a_change_of_the_optimizers_groups(group):
    (last, first), _ = group.run(first_epoch_before_unfreezing)
    assert last == (2, [])
    assert first == (1, ["layers.0.weight", "layers.0.bias"])


class Recording(First):
    """Also keeps the history."""

    def on_epoch_end(self, report, trainer):
        self.history = (*self.history, average_over_ranks(report, session.current()))
        return super().on_epoch_end(report, trainer)


def averaged_with_batch_normalization():
    """Return the epochs and parameters of a whole run, of a second fit of it, and of a fit after early stopping."""
    from lightning.pytorch.callbacks import StochasticWeightAveraging  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, rows_of_rank = session.current().world.rank, source(EVEN, session.current().world.rank)

    def fitted_with(hooks, *states):
        trainer = trainer_of(module("normalizing"), 2, callbacks=[StochasticWeightAveraging(0.01, swa_epoch_start=1)])
        for state in states:
            trainer.restore(hvd.broadcast_object(state, 0))
        trainer.fit(rows_of_rank, None, hooks)
        return trainer

    whole = Recording()
    trainer = fitted_with(whole)
    over = Recording(first_epoch=len(whole.history), history=whole.history)
    again = fitted_with(over, whole.state)
    ended = Recording(first_epoch=2, history=whole.history[:1])  # like a run that early stopping has ended
    fitted_with(ended, whole.first)
    epochs = [[report.epoch for report in hooks.reports] for hooks in (whole, over, ended)]
    return epochs, rank or flat(trainer._package.model), rank or flat(again._package.model)


def test_a_finished_run_trains_no_epoch_that_callbacks_add(group):
    for epochs, parameters, unchanged in group.run(averaged_with_batch_normalization):
        assert epochs == [[0, 1, 2], [], []]
        assert np.array_equal(parameters, unchanged)


class Rates(Keeping):
    """Records the learning rate at the end of every epoch, which applies to the next epoch."""

    def on_epoch_end(self, report, trainer):
        self.rates = [*getattr(self, "rates", ()), trainer._trainer.optimizers[0].param_groups[0]["lr"]]
        return super().on_epoch_end(report, trainer)


def rates_of_scaled_runs():
    """Return the rates of a run by ``SIZE`` ranks, and of a run that one rank began and these ranks resume."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, results, state = session.current().world.rank, [], None
    for scaled, first, epochs in ((True, 0, 4), (False, 0, 1), (True, 1, 4)):
        trainer, hooks = trainer_of(module("composed"), epochs, {"scale_lr": scaled}), Rates(first_epoch=first)
        if first:
            trainer.restore(state)
        trainer.fit(source(EVEN, rank), None, hooks)
        state = hvd.broadcast_object(hooks.state, 0)
        results.append(hooks.rates)
    return results


def test_the_learning_rate_is_rescaled_in_a_run_that_resumes_on_another_number_of_ranks(group):
    for whole, first, rest in group.run(rates_of_scaled_runs):
        assert whole == pytest.approx([0.04, 0.02, 0.02, 0.02])
        assert (first, rest) == (pytest.approx([0.02]), pytest.approx([0.02, 0.02, 0.02]))
