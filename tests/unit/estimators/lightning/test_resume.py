"""Interrupted and resumed training with Lightning, in real ranks, without Spark."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.errors import ParamError
from sparkhvd.estimators.lightning import RUN_KEY
from sparkhvd.estimators.params import policies
from sparkhvd.estimators.training.history import average_over_ranks
from sparkhvd.estimators.training.hooks import RunHooks
from sparkhvd.store import Store
from tests.unit.estimators.arrays import ArraySource, Hooks, spec
from tests.unit.estimators.interruptions import assert_equal_values, values_of_epochs
from tests.unit.estimators.lightning.networks import (
    DATA,
    EVEN,
    SIZE,
    SOME_EMPTY,
    flat,
    module,
    network,
    rated,
    source,
    trainer_of,
)


class Keeping(Hooks):
    """Keeps the state like a checkpoint: only on rank 0, at the end of an epoch."""

    def on_epoch_end(self, report, trainer):
        self.state = trainer.state() if session.current().world.rank == 0 else None
        return super().on_epoch_end(report, trainer)


def continued(kind, keeps_best=""):
    """Return the parameters of an uninterrupted run of four epochs, and of one that stops after two and resumes."""
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, results = session.current().world.rank, []
    for stops in ((1,), (4,), (1, 2, 4)) if keeps_best else ((4,), (2, 4)):
        state, first = None, 0
        for epochs in stops:
            # The loss falls, so the first epoch has the highest loss, which counts as the best.
            best = [ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=2)] if keeps_best else []
            model = module(kind)
            if keeps_best == "module":
                model.configure_callbacks = best.copy
            trainer = trainer_of(model, epochs, callbacks=[] if keeps_best == "module" else best)
            hooks = Keeping(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(EVEN, rank), source(EVEN, rank), hooks)
            assert [report.epoch for report in hooks.reports] == list(range(first, epochs))
            state, first = hvd.broadcast_object(hooks.state, 0), epochs  # like ranks that read it from the Store
        results.append(flat(trainer._package.model) if rank == 0 or not keeps_best else None)
    return results


@pytest.mark.parametrize("owner", ["estimator", "module"])
def test_a_resumed_run_returns_the_best_epoch_of_all(group, owner):
    """The callback that chooses it is a parameter of the estimator, or the module configures it."""
    first, undisturbed, resumed = group.run(continued, "with objects", owner)[0]
    assert np.array_equal(first, undisturbed)
    assert np.array_equal(first, resumed)


@pytest.mark.parametrize("kind", ["simple", "plateau", "with objects", "precise"])
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


def continued_after_unfreezing(within):
    """Return the parameters of an undisturbed run whose second epoch unfreezes a layer, and of one resumed later."""
    from lightning.pytorch.callbacks import BaseFinetuning  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    class Second(BaseFinetuning):
        def freeze_before_training(self, trained):
            self.freeze(trained.layers[0])

        def finetune_function(self, trained, epoch, optimizer):
            if epoch == 1 and not within:
                self.unfreeze_and_add_param_group(trained.layers[0], optimizer)

    rank, results = session.current().world.rank, []
    for stops in ((4,), (3, 4)):
        state, first = None, 0
        for epochs in stops:
            model, callbacks = (freezing_by_itself(), []) if within else (module(), [Second()])
            if not within:
                type(model).configure_optimizers = lambda trained: torch.optim.SGD(trained.layers[2].parameters(), 0.1)
            trainer, hooks = trainer_of(model, epochs, callbacks=callbacks), Keeping(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(EVEN, rank), None, hooks)
            state, first = hvd.broadcast_object(hooks.state, 0), epochs
        results.append(flat(trainer._package.model))
    return results


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

    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, results = session.current().world.rank, []
    for stops in ((4,), (2, 4)):
        state, first = None, 0
        for epochs in stops:
            finder = LearningRateFinder(1e-3, 0.1, num_training_steps=20, early_stop_threshold=None)
            trainer, hooks = trainer_of(rated(finder), epochs), Rates(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(EVEN, rank), None, hooks)
            assert [report.epoch for report in hooks.reports] == list(range(first, epochs))
            state, first = hvd.broadcast_object(hooks.state, 0), epochs
        results.append((flat(trainer._package.model), set(hooks.rates)))
    return results


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
    from lightning.pytorch.callbacks import BaseFinetuning  # noqa: PLC0415

    class Second(BaseFinetuning):
        def freeze_before_training(self, trained):
            self.freeze(trained.layers[0])

        def finetune_function(self, trained, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(trained.layers[0], optimizer)

    model, rank, results = module(), session.current().world.rank, []
    type(model).configure_optimizers = lambda trained: torch.optim.SGD(trained.layers[2].parameters(), 0.1)
    trainer, hooks = trainer_of(model, 2, callbacks=[Second()]), First()
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


class Interrupting(Hooks):
    """Keeps the state within an epoch, like a checkpoint, and stops the training there."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == (1, 6):
            assert report.whole
            state = trainer.state() if session.current().world.rank == 0 else None
            self.found = state, report.rank_state()
            raise InterruptedError


@dataclass
class Begun(ArraySource):
    """Provides the rest of the second epoch, as if another number of ranks had begun it."""

    done: int = 6

    def epoch(self, number, first_step=0):
        assert first_step == 0
        return super().epoch(number, self.done if number == 1 else 0)


LONGER = [*SOME_EMPTY, *SOME_EMPTY]


def fitted(kind, hooks, rows_left=None, state=None, epochs=3, **more):
    """Return the trainer of a fit that resumes from ``state``."""
    whole = source(LONGER, session.current().world.rank)
    trainer = trainer_of(module(kind), epochs, **more)
    if state is not None:
        trainer.restore(state)
    trainer.fit(rows_left or whole, whole, hooks)
    return trainer


def states_within_an_epoch(kind, **more):
    """Return the state after six batches of the second epoch, and this rank's own state."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    hooks = Interrupting()
    with pytest.raises(InterruptedError):
        fitted(kind, hooks, **more)
    return hvd.broadcast_object(hooks.found[0], 0), hooks.found[1]


def begun_by_others(done):
    """Return the rest of the second epoch, and the hooks to resume with."""
    whole = source(LONGER, session.current().world.rank)
    rows_left = Begun(whole.schema, whole.columns, whole.mine, whole.everyones, done)
    return rows_left, Hooks(first_epoch=1, first_epoch_batches=len(LONGER) - done)


def interrupted(kind, passes, by_others):
    """Return parameters and last loss of an uninterrupted run of three epochs, and of an interrupted one."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler  # noqa: PLC0415

    scheduled = {"callbacks": [GradientAccumulationScheduler({0: passes})]}
    is_scheduled = not by_others and not kind.startswith("by hand")
    more = scheduled if is_scheduled else {"trainer_args": {"accumulate_grad_batches": passes}}
    undisturbed = Hooks()
    wanted = flat(fitted(kind, undisturbed, **more)._package.model)
    state, own = states_within_an_epoch(kind, **more)
    rows_left, hooks = None, Hooks(first_epoch=1, first_step=6, rank_state=own)
    if by_others:
        rows_left, hooks = begun_by_others(6)
    resumed = flat(fitted(kind, hooks, rows_left, state, **more)._package.model)
    steps = [(report.epoch, report.step, report.whole) for report in hooks.steps]
    before = {1: 6} if by_others else {}
    assert steps == [
        (r.epoch, r.step - before.get(r.epoch, 0), r.whole) for r in undisturbed.steps if (r.epoch, r.step) > (1, 6)
    ]
    assert [report.steps for report in hooks.reports] == [len(LONGER) - 6, len(LONGER)], "only timed steps count"
    one, other = (average_over_ranks(each.reports[-1], session.current()) for each in (hooks, undisturbed))
    assert (one.train, one.validation) == (other.train, other.validation)
    return wanted, resumed


@pytest.mark.parametrize(
    ("kind", "passes", "by_others"),
    [
        ("dropping", 1, False),
        ("dropping", 3, False),
        ("plateau", 1, False),
        ("plateau", 1, True),
        ("plateau by step on twice", 1, False),
        ("plateau by step on val_loss", 1, False),
        ("simple", 2, True),
        ("by hand with old gradients", 1, False),
        ("by hand with old gradients", 1, True),
    ],
)
def test_a_run_interrupted_within_an_epoch_ends_like_an_uninterrupted_one(group, kind, passes, by_others):
    """Check dropout, changes by hooks at the start of a batch or epoch, other ranks, and gradients that are kept."""
    for wanted, resumed in group.run(interrupted, kind, passes, by_others):
        assert np.array_equal(wanted, resumed)


class Synchronizing(Hooks):
    """Synchronizes after six batches of the second epoch, as before a checkpoint."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == (1, 6):
            report.synchronize()


class SynchronizingInterrupted(Interrupting):
    """Also synchronizes there."""

    def on_step_end(self, report, trainer):
        if (report.epoch, report.step) == (1, 6):
            report.synchronize()
        super().on_step_end(report, trainer)


def interrupted_with_moving_averages():
    """Return what an uninterrupted run and an interrupted one end with: the model's state, and the last validation."""
    from lightning.pytorch.callbacks import EMAWeightAveraging  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    whole = source([(5, 3), (2, 7), (4, 2)] * 3, session.current().world.rank)

    def trained(hooks, state=None):
        trainer = trainer_of(module("normalizing"), 3, callbacks=[EMAWeightAveraging(decay=0.9)])
        if state is not None:
            trainer.restore(state)
        trainer.fit(whole, whole, hooks)
        weights = {name: value.tolist() for name, value in trainer._package.model.state_dict().items()}
        return weights, average_over_ranks(hooks.reports[-1], session.current()).validation

    undisturbed, interrupting = trained(Synchronizing()), SynchronizingInterrupted()
    with pytest.raises(InterruptedError):
        trained(interrupting)
    state, own = interrupting.found
    return undisturbed, trained(Hooks(first_epoch=1, first_step=6, rank_state=own), hvd.broadcast_object(state, 0))


def test_moving_averages_of_running_statistics_resume_as_if_uninterrupted(group):
    results = group.run(interrupted_with_moving_averages)
    for (weights, validation), (resumed_weights, resumed_validation) in results:
        assert resumed_validation == pytest.approx(validation, rel=1e-6)
        for name, values in weights.items():
            np.testing.assert_allclose(resumed_weights[name], values, rtol=1e-6, atol=1e-8, err_msg=name)
    assert all(result == results[0] for result in results)


def resumed_by_others_with_a_limit(done, limit):
    """Return the reported steps of ranks that take over the rest of an epoch of at most ``limit`` steps."""
    limited = {"trainer_args": {"limit_train_batches": limit}}
    state, _ = states_within_an_epoch("simple", **limited)
    rows_left, hooks = begun_by_others(done)
    fitted("simple", hooks, rows_left, state, **limited)
    return [(report.step, report.steps) for report in hooks.steps if report.epoch == 1]


def test_steps_of_an_epoch_that_other_ranks_began_are_those_of_its_rest(group):
    """Checkpoints have these positions; resuming from others would skip or repeat rows."""
    for steps in group.run(resumed_by_others_with_a_limit, 6, 9):
        assert steps == [(1, 3), (2, 3), (3, 3)]


@dataclass
class LongRest(ArraySource):
    """Provides a rest of the second epoch that has more steps than a whole epoch."""

    def epoch(self, number, first_step=0):
        steps = slice(None) if number == 1 else slice(len(SOME_EMPTY))
        whole = ArraySource(self.schema, self.columns, self.mine[steps], self.everyones[steps])
        return whole.epoch(number, first_step)

    def steps(self):
        return len(SOME_EMPTY)


def resumed_with_a_long_rest(kind):
    """Return the steps of the trained epochs, the validated epochs, and Lightning's estimate of the steps."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    class Estimating(type(module(kind))):
        def configure_optimizers(self):
            self.estimated = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    rank, hooks = session.current().world.rank, Interrupting()
    with pytest.raises(InterruptedError):
        trainer_of(module(kind), 3).fit(source(LONGER, rank), source(EVEN, rank), hooks)
    model, again = Estimating(), Hooks(first_epoch=1, first_epoch_batches=len(LONGER))
    trainer, whole = trainer_of(model, 3), source(LONGER, rank)
    trainer.restore(hvd.broadcast_object(hooks.found[0], 0))
    trainer.fit(LongRest(whole.schema, whole.columns, whole.mine, whole.everyones), source(EVEN, rank), again)
    steps = [(report.epoch, report.step, report.steps) for report in again.steps]
    rows = [report.train["loss"][1] for report in again.reports]
    return steps, rows, [bool(report.validation) for report in again.reports], trainer._package.model.estimated


@pytest.mark.parametrize("kind", ["simple", "plateau by step on twice"])
def test_an_epoch_may_resume_with_more_steps_than_a_whole_epoch(group, kind):
    long, short = len(LONGER), len(SOME_EMPTY)
    for rank, (steps, rows, validated, estimated) in enumerate(group.run(resumed_with_a_long_rest, kind)):
        assert steps == [
            *((1, step + 1, long) for step in range(long)),
            *((2, step + 1, short) for step in range(short)),
        ]
        assert rows == [sum(step[rank] for step in sizes) for sizes in (LONGER, SOME_EMPTY)]
        assert validated == [True, True]
        assert estimated == 3 * short


def interrupted_after_unfreezing():
    """Return parameters of an uninterrupted run whose hooks change learning rates, and of one resumed in epoch 1."""
    from lightning.pytorch.callbacks import BackboneFinetuning  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank = session.current().world.rank

    class Halving(type(module())):
        def __init__(self):
            super().__init__()
            self.backbone = self.layers[0]

        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

        def configure_optimizers(self):
            return torch.optim.SGD(self.layers[2].parameters(), 0.4)

    def made():
        tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=0, backbone_initial_lr=0.01)
        return trainer_of(Halving(), 3, callbacks=[tuning])

    whole, again, hooks = made(), made(), Interrupting()
    whole.fit(source(EVEN, rank), None, Hooks())
    with pytest.raises(InterruptedError):
        made().fit(source(EVEN, rank), None, hooks)
    again.restore(hvd.broadcast_object(hooks.found[0], 0))
    again.fit(source(EVEN, rank), None, Hooks(first_epoch=1, first_step=6, rank_state=hooks.found[1]))
    return flat(whole._package.model), flat(again._package.model)


def test_hooks_of_an_epochs_start_change_a_saved_learning_rate_once(group):
    for undisturbed, resumed in group.run(interrupted_after_unfreezing):
        assert np.array_equal(undisturbed, resumed)


def continued_where_lightning_would_validate(done):
    """Return when the second epoch validates if other ranks began it, and the batch counts for loggers."""
    import lightning.pytorch as lightning  # noqa: PLC0415

    class Validations(lightning.Callback):
        def __init__(self):
            self.after = []

        def on_validation_end(self, trainer, _module):
            self.after.append((trainer.current_epoch, trainer.fit_loop.batch_idx + 1))

    state, _ = states_within_an_epoch("plateau by step on twice")
    rows_left, hooks = begun_by_others(done)
    more = {"trainer_args": {"val_check_interval": 7}, "callbacks": [Validations()]}
    trainer = fitted("plateau by step on twice", hooks, rows_left, state, 2, **more)
    assert [report.step for report in hooks.steps] == list(range(1, 15 - done))
    return trainer._package.callbacks[0].after, trainer._trainer.fit_loop.epoch_loop._batches_that_stepped


@pytest.mark.parametrize(("done", "after"), [(0, [7, 14]), (7, [14])])
def test_another_number_of_ranks_may_resume_where_lightning_would_validate(group, done, after):
    """Lightning treats the batch before that validation as unfinished, and has no metrics for it."""
    wanted = [(1, batch) for batch in after], len(LONGER) + 6 + len(LONGER) - done
    assert group.run(continued_where_lightning_would_validate, done) == [wanted] * SIZE


def whole_steps(kind, arguments):
    """Return the steps, in two epochs of seven steps, after which a checkpoint would be complete."""
    rank, hooks = session.current().world.rank, Hooks()
    trainer_of(module(kind), 2, trainer_args=arguments).fit(source(SOME_EMPTY, rank), source(SOME_EMPTY, rank), hooks)
    return [(report.epoch, report.step) for report in hooks.steps if report.whole]


@pytest.mark.parametrize(
    ("kind", "arguments", "first", "second"),
    [
        ("simple", {"val_check_interval": 3}, [1, 2, 4, 5, 7], [1, 2, 4, 5, 7]),
        ("simple", {"val_check_interval": 3, "check_val_every_n_epoch": 2}, [1, 2, 3, 4, 5, 6, 7], [1, 2, 4, 5, 7]),
        ("simple", {"val_check_interval": 5, "check_val_every_n_epoch": None}, [1, 2, 3, 4, 6, 7], [1, 2, 4, 5, 6, 7]),
        ("simple", {"max_steps": 10}, [1, 2, 3, 4, 5, 6], [1, 2]),
        ("by hand in threes", {}, [3, 6], [3, 6]),
    ],
)
def test_no_checkpoint_is_made_before_a_validation_or_the_end_or_between_steps(group, kind, arguments, first, second):
    wanted = [*((0, step) for step in first), *((1, step) for step in second)]
    assert group.run(whole_steps, kind, arguments) == [wanted] * SIZE


def kept_with_an_object():
    """Return the error on rank 0, the only rank that makes the checkpoint."""
    import lightning.pytorch as lightning  # noqa: PLC0415

    class Noting(lightning.Callback):
        def state_dict(self):
            return {"noted": ArraySource}

    trainer, rows = trainer_of(module(), callbacks=[Noting()]), source(EVEN, session.current().world.rank)
    try:
        trainer.fit(rows, None, Keeping())
    except ParamError as error:
        return str(error)
    return None


def test_a_checkpoint_that_could_not_be_opened_is_refused_when_it_is_made(group):
    message, others = group.run(kept_with_an_object)
    assert "(on_save_checkpoint, or state_dict of callbacks) holds tests.unit.estimators.arrays.ArraySource" in message
    assert others is None


def ended_three_times(folder, rule):
    """Return the epochs and parameters of each fit that Lightning's callback or early_stopping ends."""
    import lightning.pytorch as lightning  # noqa: PLC0415
    from lightning.pytorch.callbacks import EarlyStopping  # noqa: PLC0415

    class Zeros(lightning.Callback):
        def on_train_end(self, _trainer, module):
            torch.nn.init.zeros_(module.layers[-1].weight)

    results, rank = [], session.current().world.rank
    for _ in range(3):
        # The loss falls, so stopping by the highest loss ends the training after the second epoch.
        callbacks = [Zeros()] if rule else [Zeros(), EarlyStopping("val_loss", mode="max", patience=1)]
        how = {"early_stopping": policies.EarlyStopping("val_loss", 1, mode="max")} if rule else {}
        trainer = trainer_of(module(), 6, how, callbacks=callbacks)
        hooks = RunHooks(Store.create(folder), f"run {rule}", trainer._spec, session.current())
        if hooks.resume.checkpoint is not None:
            trainer.restore(hooks.resume.checkpoint.state)
        trainer.fit(source(EVEN, rank), source(EVEN, rank), hooks)
        results.append((len(hooks.history), flat(trainer._package.model)))
    return results


@pytest.mark.parametrize("rule", [False, True])
def test_a_run_that_stopped_early_does_not_resume(group, tmp_path, rule):
    for found in group.run(ended_three_times, str(tmp_path), rule):
        assert [epochs for epochs, _ in found] == [2, 2, 2]
        assert np.array_equal(found[1][1], found[2][1])
        assert rule or np.array_equal(found[0][1], found[1][1])


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
    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, results = session.current().world.rank, []
    for stops in ((2,), (1, 2)):
        state, first = None, 0
        for epochs in stops:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            trainer, hooks = trainer_of(model, epochs, optimizer=optimizer, loss=Fading()), Keeping(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(sizes, rank), None, hooks)
            state, first = hvd.broadcast_object(hooks.state, 0), epochs
        results.append((trainer._package.losses[0].weight.item(), flat(model)))
    return results


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

    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, results = session.current().world.rank, []
    for stops in ((4,), (2, 3, 4)):
        state, first = None, 0
        for epochs in stops:
            pruning = ModelPruning(
                "l1_unstructured",
                amount=lambda epoch: 0.3 if epoch < 2 else 0,
                make_pruning_permanent=permanent,
                use_lottery_ticket_hypothesis=lottery,
            )
            trainer, hooks = trainer_of(module(), epochs, callbacks=[pruning]), Keeping(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(EVEN, rank), None, hooks)
            state, first = hvd.broadcast_object(hooks.state, 0), epochs
        layers = trainer._package.model.layers
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
    assert left == pytest.approx(0.5, abs=0.02)


def continued_in_double_precision():
    """Return the parameters of an uninterrupted run with the precision 64-true, and of one that resumes."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, results = session.current().world.rank, []
    for stops in ((4,), (2, 4)):
        state, first = None, 0
        for epochs in stops:
            trainer = trainer_of(module(), epochs, trainer_args={"precision": "64-true"})
            hooks = Keeping(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(EVEN, rank), None, hooks)
            state, first = hvd.broadcast_object(hooks.state, 0), epochs
        results.append(flat(trainer._package.model))
    return results


def test_a_resumed_run_keeps_the_digits_of_double_precision(group):
    for undisturbed, resumed in group.run(continued_in_double_precision):
        assert undisturbed.dtype == np.float64
        assert np.array_equal(undisturbed, resumed)


def continued_with_late_buffers():
    """Return the parameters and a buffer of runs whose module fills, in the first epoch, a buffer that was None."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    class Late(type(module())):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", None)

        def on_train_batch_end(self, *parts):
            super().on_train_batch_end(*parts)
            self.seen = (0 if self.seen is None else self.seen) + torch.ones(2)

    rank, results = session.current().world.rank, []
    for stops in ((4,), (2, 4)):
        state, first = None, 0
        for epochs in stops:
            trainer, hooks = trainer_of(Late(), epochs), Keeping(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(EVEN, rank), None, hooks)
            state, first = hvd.broadcast_object(hooks.state, 0), epochs
        results.append((flat(trainer._package.model), trainer._package.model.seen.numpy()))
    return results


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
    return [(report.step, report.whole) for report in hooks.steps if report.epoch > 0]


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
