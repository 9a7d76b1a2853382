"""Training with Lightning that is interrupted within an epoch and resumes, in real ranks, without Spark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params import policies
from sparkhvd.estimators.training.hooks import RunHooks
from sparkhvd.estimators.training.logs.history import average_over_ranks
from sparkhvd.store import Store
from tests.unit.estimators.arrays import ArraySource, Hooks
from tests.unit.estimators.lightning.networks import (
    EVEN,
    SIZE,
    SOME_EMPTY,
    flat,
    module,
    source,
    trainer_of,
)
from tests.unit.estimators.lightning.resuming import LONGER, Keeping, fitted


class Interrupting(Hooks):
    """Keeps the state within an epoch, like a checkpoint, and stops the training there."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == (1, 6):
            assert report.allows_checkpoint
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
    steps = [(report.epoch, report.step, report.allows_checkpoint) for report in hooks.steps]
    before = {1: 6} if by_others else {}
    assert steps == [
        (r.epoch, r.step - before.get(r.epoch, 0), r.allows_checkpoint)
        for r in undisturbed.steps
        if (r.epoch, r.step) > (1, 6)
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


class SynchronizingInterrupted(Interrupting):
    """Synchronizes after six batches of the second epoch, as before a checkpoint."""

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

    undisturbed, interrupting = trained(Hooks()), SynchronizingInterrupted()
    with pytest.raises(InterruptedError):
        trained(interrupting)
    state, own = interrupting.found
    return undisturbed, trained(Hooks(first_epoch=1, first_step=6, rank_state=own), hvd.broadcast_object(state, 0))


def test_running_statistics_and_their_moving_averages_resume_as_if_without_a_checkpoint(group):
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


def checkpoint_steps(kind, arguments):
    """Return the steps, in two epochs of seven steps, after which a checkpoint would be complete."""
    rank, hooks = session.current().world.rank, Hooks()
    trainer_of(module(kind), 2, trainer_args=arguments).fit(source(SOME_EMPTY, rank), source(SOME_EMPTY, rank), hooks)
    return [(report.epoch, report.step) for report in hooks.steps if report.allows_checkpoint]


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
    assert group.run(checkpoint_steps, kind, arguments) == [wanted] * SIZE


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
