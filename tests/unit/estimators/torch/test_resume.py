"""Interrupted and resumed training with PyTorch."""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.utils import prune

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.checkpoint.optimizer_groups import load_with_groups, named_groups
from sparkhvd.estimators.torch.checkpoint.safe_state import plain_numbers
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.estimators.torch.schedule import LRSchedule, RunningSchedule
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.training.logs.history import average_over_ranks
from sparkhvd.world import World
from tests.unit.estimators.arrays import Hooks, spec
from tests.unit.estimators.interruptions import assert_equal_values, values_of_epochs
from tests.unit.estimators.torch.networks import (
    DATA,
    EVEN,
    OPTIMIZERS,
    PreciseMomentum,
    accuracy,
    as_one,
    flat,
    make_trainer,
    network,
    source,
)


def uninterrupted_and_resumed(make, steps):
    """Return a trainer after four epochs, and a new one with the state after two; ``make`` takes the epochs."""
    undisturbed, first, second = make(4), make(2), make(4)
    undisturbed.fit(as_one(steps), None, Hooks())
    first.fit(as_one(steps), None, Hooks())
    second.restore(first.state())
    return undisturbed, second


@pytest.mark.parametrize("optimizer", [OPTIMIZERS["Adam"], lambda model: PreciseMomentum(model.parameters(), lr=0.05)])
def test_a_resumed_run_equals_an_uninterrupted_one(alone, optimizer):
    world, steps = session.current().world, [(8,)] * 6
    make = partial(make_trainer, optimizer, world)
    undisturbed, second = uninterrupted_and_resumed(lambda epochs: make(epochs=epochs), steps)
    hooks = Hooks(first_epoch=2)
    second.fit(as_one(steps), None, hooks)
    assert [report.epoch for report in hooks.reports] == [2, 3]
    assert np.array_equal(flat(second._model), flat(undisturbed._model))


class Unfreezing(TorchCallback):
    """Trains the first layer from the second epoch on."""

    def on_epoch_begin(self, run, epoch):
        if epoch == 1:
            run.model[0].requires_grad_(True)


class CountingLoss(torch.nn.Module):
    """Counts its calls in a buffer that no ``state_dict`` holds, and in an extra state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.ones(()), persistent=False)
        self.calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, output, label):
        if torch.is_grad_enabled():
            self.factor *= 0.95
            self.calls += 1
        return functional.cross_entropy(output, label) * self.factor / self.calls


@pytest.mark.parametrize("changes", [{"callbacks": [Unfreezing()]}, {"loss": CountingLoss()}], ids=["unfrozen", "loss"])
def test_a_resumed_run_continues_with_unfrozen_layers_and_the_state_of_a_loss(alone, changes):
    world, steps = session.current().world, [(8,)] * 6

    def trainer(epochs):
        model = network()
        model[0].requires_grad_("callbacks" not in changes)
        params = {"loss": functional.cross_entropy, **changes, "label_cols": ("y",), "schema": DATA}
        params |= {"model": model, "optimizer": OPTIMIZERS["momentum"](model)}
        return PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs), world)

    undisturbed, second = uninterrupted_and_resumed(trainer, steps)
    second.fit(as_one(steps), None, Hooks(first_epoch=2))
    assert not np.array_equal(flat(second._model)[:96], flat(network())[:96])
    assert np.array_equal(flat(second._model), flat(undisturbed._model))


class Pruning(TorchCallback):
    """Prunes a layer in the second epoch, and counts the epochs in a buffer that is None before the first."""

    def on_epoch_begin(self, run, epoch):
        if epoch == 1:
            prune.l1_unstructured(run.model[0], "weight", 0.5)
        run.model[0].epochs = torch.tensor([epoch])


def test_a_resumed_run_continues_with_masks_and_buffers_that_callbacks_have_added(alone):
    world, steps = session.current().world, [(8,)] * 6

    def trainer(epochs):
        model = network()
        model[0].register_buffer("epochs", None)
        params = {"loss": functional.cross_entropy, "callbacks": [Pruning()], "label_cols": ("y",), "schema": DATA}
        params |= {"model": model, "optimizer": OPTIMIZERS["momentum"](model)}
        return PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs), world)

    undisturbed, second = uninterrupted_and_resumed(trainer, steps)
    assert second._model[0].epochs.item() == 1
    second.fit(as_one(steps), None, Hooks(first_epoch=2))
    layer, other = undisturbed._model[0], second._model[0]
    assert (layer.weight_mask == 0).sum().item() == layer.weight.numel() // 2
    assert torch.equal(layer.weight * layer.weight_mask, other.weight * other.weight_mask)
    assert np.array_equal(flat(second._model), flat(undisturbed._model))


class Fading(torch.optim.lr_scheduler.LRScheduler):
    """A schedule whose state has a NumPy number and an object that is not a number."""

    def __init__(self, optimizer):
        self.rate, self.seen = np.float32(1.0), {1}
        super().__init__(optimizer)

    def get_lr(self):
        self.rate = np.float32(self.rate * 0.5)
        return [float(base * self.rate) for base in self.base_lrs]


class Shrinking:
    """A function with a state, part of which a checkpoint cannot contain."""

    def __init__(self):
        self.calls, self.seen = np.int64(0), {1}

    def __call__(self, _epoch):
        self.calls += 1
        return 0.5**self.calls


def two_parts(optimizer):
    parts = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.LambdaLR(optimizer, Shrinking())]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [1])


@pytest.mark.parametrize(
    ("scheduler", "omitted"),
    [
        (Fading, ["seen (set)"]),
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, Shrinking()), ["lr_lambdas[0].seen (set)"]),
        (two_parts, ["_schedulers[1].lr_lambdas[0].seen (set)"]),
        (lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 3, 4]), 0.5), []),
    ],
    ids=["own", "function", "sequence", "milestones"],
)
def test_a_resumed_schedule_continues_with_its_numpy_numbers(scheduler, omitted, caplog):
    def rates(count, state=None):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = RunningSchedule(LRSchedule(scheduler), optimizer, 1.0)
        if state is not None:
            content = torch.load(io.BytesIO(state), weights_only=True)
            optimizer.load_state_dict(content[0])
            schedule.restore(content[1], 1.0)
        states = []
        for epoch in range(count):
            schedule.after_epoch(EpochRecord(epoch, {}))
            states.append(optimizer.param_groups[0]["lr"])
        buffer = io.BytesIO()
        torch.save([plain_numbers(optimizer.state_dict()), schedule.state()], buffer)
        schedule.state()
        return states, buffer.getvalue()

    wanted, _ = rates(5)
    assert len(set(wanted)) > 2
    caplog.clear()
    first, state = rates(2)
    assert [record.getMessage().split(": ")[1].split(". ")[0] for record in caplog.records] == omitted
    assert first + rates(3, state)[0] == wanted


class Growing(torch.nn.Module):
    """A loss whose weight grows with every step."""

    def __init__(self, start):
        super().__init__()
        self.register_buffer("steps", start)

    def forward(self, output, label):
        if torch.is_grad_enabled():
            self.steps = torch.ones(()) if self.steps is None else self.steps + 1
        return functional.cross_entropy(output, label.long().reshape(-1)) * (1 if self.steps is None else self.steps)


class Averaging(torch.nn.Module):
    """A loss that is divided by a running mean of its values, also of those in a validation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, label):
        value = functional.cross_entropy(output, label.long().reshape(-1))
        self.mean = 0.8 * self.mean + 0.2 * value.detach()
        return value / self.mean


def train_with_a_running_mean(sizes):
    """Return the mean and the parameters of an undisturbed run and of a run in two parts."""
    world = session.current().world
    rows, results = source(sizes, world.rank, world.size), []
    for parts in ((3,), (1, 3)):
        state, first = None, 0
        for epochs in parts:
            model, loss = network(), Averaging()
            params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": loss, "label_cols": ("y",)}
            trainer = PLUGIN.trainer(PLUGIN.pack({**params, "schema": DATA}), spec(DATA, epochs=epochs), world)
            if state is not None:
                trainer.restore(state)
            trainer.fit(rows, rows, Hooks(first_epoch=first))
            state, first = hvd.broadcast_object(trainer.state(), 0), epochs
        results.append((trainer._package.objective.losses[0].mean.item(), flat(trainer._model)))
    return results


def test_a_loss_keeps_a_mean_over_the_rows_of_all_ranks_and_a_resumed_run_continues_with_it(group):
    results = group.run(train_with_a_running_mean, [(5, 3, 2), (2, 7, 0)] * 3)
    for undisturbed, resumed in results:
        assert undisturbed[0] == results[0][0][0], "the ranks divide their losses by different means"
        assert resumed[0] == undisturbed[0]
        assert np.array_equal(resumed[1], undisturbed[1])


@pytest.mark.parametrize("start", [torch.zeros(()), None])
def test_a_resumed_run_continues_with_the_buffers_of_its_loss(alone, start):
    def make(epochs):
        model, loss = network(), Growing(start)
        params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": loss, "label_cols": ("y",)}
        return PLUGIN.trainer(PLUGIN.pack({**params, "schema": DATA}), spec(DATA, epochs=epochs), World())

    undisturbed, first, second = make(2), make(1), make(2)
    undisturbed.fit(as_one([(8,)] * 3), None, Hooks())
    first.fit(as_one([(8,)] * 3), None, Hooks())
    second.restore(first.state())
    second.fit(as_one([(8,)] * 3), None, Hooks(first_epoch=1))
    assert np.array_equal(flat(second._model), flat(undisturbed._model))


def test_the_learning_rate_survives_a_resume_and_is_returned_unscaled(alone, tmp_path):
    def with_size(size):
        return make_trainer(OPTIMIZERS["Adam"], replace(World(), size=size), scale_lr=True)

    first = with_size(2)
    assert first._plain_optimizer.param_groups[0]["lr"] == pytest.approx(0.02)
    second = with_size(4)
    second.restore(first.state())
    assert second._plain_optimizer.param_groups[0]["lr"] == pytest.approx(0.04)
    second.export(tmp_path)
    optimizer = artifact.load_optimizer(tmp_path, artifact.load_model(tmp_path))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def normalizing():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3), torch.nn.Dropout(0.3))
    model.register_buffer("kept_beside", torch.zeros(6), persistent=False)
    model.register_forward_pre_hook(keep_mean)
    return model


def keep_mean(model, inputs):
    if model.training:
        model.kept_beside += inputs[0].mean(dim=0)


class AddingGroup(TorchCallback):
    """Adds the first layer to the optimizer in the second epoch."""

    def on_epoch_begin(self, run, epoch):
        if epoch == 1:
            first = run.model[0].requires_grad_(True)
            run.optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.02})


class EveryEpoch(Hooks):
    """Keeps the state after every epoch."""

    def on_epoch_end(self, report, trainer):
        self.states = [*getattr(self, "states", ()), hvd.broadcast_object(trainer.state())]
        return super().on_epoch_end(report, trainer)


def unfreezing_trainer():
    model = network()
    model[0].requires_grad_(False)
    params = {"model": model, "optimizer": torch.optim.Adam(model[2].parameters(), lr=0.05)}
    more = {"loss": functional.cross_entropy, "label_cols": ("y",), "schema": DATA, "callbacks": [AddingGroup()]}
    return PLUGIN.trainer(PLUGIN.pack({**params, **more}), spec(DATA, epochs=3), session.current().world)


def train_with_another_group():
    """Return parameters of an undisturbed and a resumed run, and the groups and parameters of the restored epochs."""
    world = session.current().world
    rows_of_rank = source(EVEN, world.rank, world.size)
    trainer, hooks, again = unfreezing_trainer(), EveryEpoch(), unfreezing_trainer()
    trainer.fit(rows_of_rank, None, hooks)
    last = flat(trainer._model)
    again.restore(hooks.states[1])
    again.fit(rows_of_rank, None, Hooks(first_epoch=2))
    restored = []
    for state in hooks.states:
        trainer.restore(state)
        frozen = [name for name, parameter in trainer._model.named_parameters() if not parameter.requires_grad]
        restored.append((len(trainer._plain_optimizer.param_groups), frozen))
    return last, flat(again._model), flat(trainer._model), restored


def test_groups_that_callbacks_add_to_the_optimizer_are_part_of_each_epochs_state(group):
    for undisturbed, resumed, restored, groups in group.run(train_with_another_group):
        assert np.array_equal(undisturbed, resumed)
        assert np.array_equal(undisturbed, restored)
        assert groups == [(1, ["0.weight", "0.bias"]), (2, []), (2, [])]


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="this PyTorch has no named parameters in optimizers")
def test_added_groups_of_named_parameters_keep_their_names():
    model = network()
    first, last = (list(model[index].named_parameters(prefix=str(index))) for index in (0, 2))
    trained, resumed = (torch.optim.SGD(last, lr=0.1, momentum=0.9) for _ in range(2))
    trained.add_param_group({"params": first, "lr": 0.5})
    load_with_groups(resumed, trained.state_dict(), own=1, module=model, names=named_groups(trained, model))
    assert resumed.state_dict() == trained.state_dict()


class AtStep(Hooks):
    """Keeps the state after the seventh step, like a checkpoint."""

    def on_step_end(self, report, trainer):
        if report.step == 7:
            report.synchronize()
            self.kept = (hvd.broadcast_object(trainer.state()), report.rank_state())


def normalized_trainer(callbacks=(), **more):
    model = normalizing()
    if not callbacks:  # an AveragedModel does not support such buffers
        model.register_buffer("expanded", torch.tensor(2.0).expand(3))
        model.register_buffer("sparse", torch.eye(2).to_sparse())
    params = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "loss": functional.cross_entropy}
    payload = PLUGIN.pack({**params, "callbacks": callbacks, "label_cols": ("y",), "schema": DATA})
    return PLUGIN.trainer(payload, spec(DATA, **more), session.current().world)


def train_with_buffers(sizes):
    """Return the loss of a validation, the loss of rank 0's model after it, and the states of all runs.

    The runs are one with a checkpoint, the one that resumes from it, and one without any.
    """
    world = session.current().world
    rows_of_rank = source(sizes, world.rank, world.size)
    trainer, hooks = normalized_trainer(), AtStep()
    trainer.fit(rows_of_rank, rows_of_rank, hooks)
    loss = average_over_ranks(hooks.reports[-1], session.current()).validation["loss"]
    kept, rank_state = hooks.kept
    again = normalized_trainer()
    again.restore(kept)
    again.fit(rows_of_rank, None, Hooks(first_step=7, rank_state=rank_state))
    without = normalized_trainer()
    without.fit(rows_of_rank, None, Hooks())
    model = hvd.broadcast_object(trainer._model).eval()
    data = rows_of_rank.columns
    with torch.no_grad():
        wanted = functional.cross_entropy(model(torch.from_numpy(data["x"]).float()), torch.from_numpy(data["y"]))
    states = [
        {**dict(each._model.named_parameters()), **dict(each._model.named_buffers())}
        for each in (trainer, again, without)
    ]
    arrays = [{name: value.detach().to_dense().numpy() for name, value in each.items()} for each in states]
    return loss, wanted.item(), arrays


@pytest.mark.parametrize("sizes", [[(5, 3, 2), (2, 7, 0)] * 5, [(0, 4, 4)] * 9], ids=["uneven", "no rows on rank 0"])
def test_the_validation_measures_the_returned_model_and_resumes_bit_for_bit(group, sizes):
    results = group.run(train_with_buffers, sizes)
    for loss, wanted, states in results:
        assert loss == pytest.approx(wanted, rel=1e-6)
        for state in states:
            for name, value in state.items():
                assert np.array_equal(value, results[0][2][0][name]), name
    assert results[0][2][0]["0.num_batches_tracked"] > 0


class KeepingAverage(TorchCallback):
    """Trains towards an average of the weights and of the running statistics."""

    def __init__(self, where):
        self.where, self.kept = where, {}

    def _create(self, run):
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.kept["average"] = torch.optim.swa_utils.AveragedModel(run.model, multi_avg_fn=average, use_buffers=True)

    def on_train_begin(self, run):
        if self.where == "on_train_begin":
            self._create(run)

    def on_epoch_begin(self, run, epoch):
        if self.where == "on_epoch_begin" and not self.kept:
            self._create(run)
        if run.rank == 0:
            self.alone = torch.nn.Linear(2, 2)

    def on_step_end(self, run, epoch, step, loss):
        if self.kept:
            self.kept["average"].update_parameters(run.model)

    def on_train_end(self, run):
        if self.kept:
            run.model.load_state_dict(self.kept["average"].module.state_dict())


def averaged_trainings(where, sizes):
    """Return the states after a run, after one that resumes within its epoch, and after one that resumes at its end."""
    world = session.current().world
    rows_of_rank = source(sizes, world.rank, world.size)

    class AtEnd(AtStep):
        def on_epoch_end(self, report, trainer):
            more = super().on_epoch_end(report, trainer)
            if report.epoch == 0:
                self.end = hvd.broadcast_object(trainer.state())
            return more

    def trained(hooks, state=None):
        trainer = normalized_trainer(callbacks=[KeepingAverage(where)], epochs=2)
        if state is not None:
            trainer.restore(state)
        trainer.fit(rows_of_rank, rows_of_rank, hooks)
        return {name: value.to_dense().numpy() for name, value in trainer._model.state_dict().items()}

    hooks, undisturbed = AtEnd(), Hooks()
    with_checkpoints, without = trained(hooks), trained(undisturbed)
    within = trained(Hooks(first_epoch=1, first_step=7, rank_state=hooks.kept[1]), hooks.kept[0])
    return [without, with_checkpoints, within, trained(Hooks(first_epoch=1), hooks.end)]


@pytest.mark.parametrize("where", ["on_train_begin", "on_epoch_begin"])
def test_averages_that_a_callback_keeps_are_those_of_all_ranks_and_resume_bit_for_bit(group, where):
    results = group.run(averaged_trainings, where, [(5, 3, 2), (2, 7, 0)] * 5)
    for states in results:
        for state in states:
            for name, value in state.items():
                assert np.array_equal(value, results[0][0][name]), name


def test_states_of_modules_that_a_callback_does_not_create_again_are_reported(alone, caplog):
    first, second = (normalized_trainer(callbacks=[KeepingAverage(where)]) for where in ("on_train_begin", "later"))
    first.fit(as_one([(8,)] * 2), None, Hooks())
    second.restore(first.state())
    second.fit(as_one([(8,)] * 2), None, Hooks())
    assert "modules that the callbacks have not created again: callbacks[0].kept average." in caplog.text


def steps_without_the_module_of_a_callback():
    world = session.current().world
    rows_of_rank = source([(5, 3, 2), (2, 7, 0)] * 5, world.rank, world.size)
    first, second = (normalized_trainer(callbacks=[KeepingAverage(where)]) for where in ("on_train_begin", "later"))
    hooks = AtStep()
    first.fit(rows_of_rank, None, hooks)
    second.restore(hooks.kept[0])
    again = Hooks(first_step=7, rank_state=hooks.kept[1])
    second.fit(rows_of_rank, None, again)
    return len(again.steps)


def test_a_run_resumes_within_an_epoch_although_a_callback_does_not_create_its_module_again(group):
    assert group.run(steps_without_the_module_of_a_callback) == [3] * group.size


class Annealing(torch.nn.Sequential):
    """Scales its outputs by a number, adds a mean over time, and counts its rows, all in attributes."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale, self.mean, self.seen, self.label = 1.0, None, {"rows": 0}, "begin"

    def forward(self, inputs):
        if self.training:
            self.scale *= 0.9
            self.mean = torch.full((3,), self.scale) if self.mean is None else 0.9 * self.mean + self.scale
            self.seen["rows"] += len(inputs)
            self.label = f"scale {self.scale}"
        output = super().forward(inputs) * self.scale
        return output if self.mean is None else output + self.mean


class Resetting(TorchCallback):
    """Sets attributes that the training changes, at its start and at the start of each epoch."""

    def on_train_begin(self, run):
        run.model.scale = 2.0

    def on_epoch_begin(self, run, epoch):
        run.model.mean = torch.full((3,), float(epoch))


class Lookahead(torch.optim.SGD):
    """Moves slow weights towards the weights in every third step, and continues from them."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]
        self.trained, self.steps = list(self.param_groups[0]["params"]), 0

    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            for slow, fast in zip(self.slow, self.trained, strict=True):
                slow.add_(fast - slow, alpha=0.5)
                fast.copy_(slow)
        return result


class KeptMessages(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def train_with_attributes(end, rows_of_step):
    """Train undisturbed, and in two parts with an interruption within or after the second epoch."""
    world = session.current().world
    rows_of_rank = source([rows_of_step] * 7, world.rank, world.size)

    class Interrupted(Hooks):
        def on_step_end(self, report, trainer):
            if (report.epoch, report.step) == end:
                report.synchronize()
                self.kept = (hvd.broadcast_object(trainer.state()), report.rank_state())
                raise InterruptedError

        def on_epoch_end(self, report, trainer):
            ends = super().on_epoch_end(report, trainer)
            if (report.epoch + 1, 0) == end:
                self.kept = (hvd.broadcast_object(trainer.state()), None)
                raise InterruptedError
            return ends

    def trainer():
        torch.manual_seed(3)
        model = Annealing(torch.nn.Linear(6, 8), torch.nn.utils.weight_norm(torch.nn.Linear(8, 3)))
        params = {"model": model, "optimizer": Lookahead(model.parameters(), lr=0.2, momentum=0.5)}
        more = {"loss": functional.cross_entropy, "label_cols": ("y",), "schema": DATA, "callbacks": [Resetting()]}
        return PLUGIN.trainer(PLUGIN.pack({**params, **more}), spec(DATA, epochs=3), world)

    undisturbed, first, hooks, second = trainer(), trainer(), Interrupted(), trainer()
    undisturbed.fit(rows_of_rank, None, Hooks())
    with contextlib.suppress(InterruptedError):
        first.fit(rows_of_rank, None, hooks)
    second.restore(hooks.kept[0])
    again = Hooks(first_epoch=end[0], first_step=end[1], rank_state=hooks.kept[1])
    kept = KeptMessages()
    logging.getLogger("sparkhvd.estimators").addHandler(kept)
    second.fit(rows_of_rank, None, again)
    logging.getLogger("sparkhvd.estimators").removeHandler(kept)
    results = [
        (flat(each._model), each._model.scale, each._model.mean.numpy(), each._plain_optimizer.steps)
        for each in (undisturbed, second)
    ]
    return results, kept.messages


@pytest.mark.parametrize("end", [(1, 4), (2, 0)], ids=["within an epoch", "between epochs"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (4, 4, 3)], ids=["even", "uneven"])
def test_a_resumed_run_continues_with_numbers_and_tensors_in_attributes(group, end, sizes):
    rows = sizes[: group.size - 1] + sizes[-1:]
    missing = "model.label" if len(set(sizes)) == 1 else "model.label, model.seen"
    for rank, ((undisturbed, resumed), messages) in enumerate(group.run(train_with_attributes, end, rows)):
        assert all(np.array_equal(one, other) for one, other in zip(undisturbed, resumed, strict=True))
        assert len(messages) == (1 if rank == 0 else 0)
        assert rank > 0 or f"does not hold them: {missing}. The resumed run begins with" in messages[0]


def train_with_metrics(interruptions):
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score  # noqa: PLC0415

    metrics = {
        "auroc": MulticlassAUROC(3),  # its state has all predictions
        "f1": MulticlassF1Score(3, average="macro"),
        "accuracy": accuracy,
    }
    world = session.current().world
    sizes = [(4, 4, 4), (3, 0, 5), (1, 4, 2), (0, 0, 7), (4, 4, 4)]
    rows_of_rank = source([size[: world.size - 1] + size[-1:] for size in sizes], world.rank, world.size)

    def make():
        model = network()
        params = {"model": model, "optimizer": OPTIMIZERS["Adam"](model), "loss": functional.cross_entropy}
        payload = PLUGIN.pack({**params, "label_cols": ("y",), "schema": DATA, "metrics": metrics})
        return PLUGIN.trainer(payload, spec(DATA, epochs=2), world)

    return values_of_epochs(make, rows_of_rank, spec(DATA, epochs=2), interruptions)


@pytest.mark.parametrize("interruptions", [[(0, 2)], [(1, 1), (1, 4)]], ids=["once", "twice in an epoch"])
def test_the_metrics_of_an_interrupted_epoch_are_over_all_of_its_rows(group, interruptions):
    for undisturbed, resumed in group.run(train_with_metrics, interruptions):
        assert_equal_values(undisturbed, resumed, rel=1e-6)


class StopAtStep2(TorchCallback):
    """Requests the end of the training on one rank, at one step of the second epoch."""

    def on_step_end(self, run, epoch, step, loss):
        if (epoch, step, run.rank) == (1, 2, 0):
            run.stop = True


def train_until_a_callback_stops(interruptions):
    world, how = session.current().world, spec(DATA, epochs=4)

    def make():
        model = network()
        params = {"model": model, "optimizer": OPTIMIZERS["Adam"](model), "loss": functional.cross_entropy}
        more = {"label_cols": ("y",), "schema": DATA, "callbacks": [StopAtStep2()]}
        return PLUGIN.trainer(PLUGIN.pack({**params, **more}), how, world)

    return values_of_epochs(make, source(EVEN, world.rank, world.size), how, interruptions)


def test_a_stop_that_a_callback_requested_before_an_interruption_ends_the_resumed_training(group):
    for undisturbed, resumed in group.run(train_until_a_callback_stops, [(1, 3), (1, 5)]):
        assert_equal_values(undisturbed, resumed, rel=1e-6)


def steps_of_an_epoch(first_step, batches_left):
    world, hooks = session.current().world, Hooks(first_step=first_step, first_epoch_batches=batches_left)
    make_trainer(OPTIMIZERS["Adam"], world, epochs=2).fit(source(EVEN, world.rank, world.size), None, hooks)
    return [report.steps for report in hooks.reports]


@pytest.mark.parametrize(("first_step", "batches_left", "steps"), [(0, None, 20), (15, None, 5), (0, 30, 30)])
def test_the_reported_steps_of_a_resumed_epoch_are_the_timed_steps(group, first_step, batches_left, steps):
    assert group.run(steps_of_an_epoch, first_step, batches_left) == [[steps, 20]] * group.size


DRAWN: list[float] = []


def noisy_loss(output, label):
    DRAWN.append(float(torch.rand(())))
    return functional.cross_entropy(output, label)


class DrawingAtBegin(TorchCallback):
    """Draws a number at the beginning of an epoch, like a callback that sets a random learning rate."""

    def on_epoch_begin(self, run, epoch):
        DRAWN.append(float(torch.rand(())))


def test_ranks_that_resume_an_epoch_of_others_do_not_draw_their_numbers_again(alone):
    def drawn(steps, hooks):
        model = network()
        params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": noisy_loss, "label_cols": ("y",)}
        params |= {"callbacks": [DrawingAtBegin()], "schema": DATA}
        trainer = PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs=1), session.current().world)
        DRAWN.clear()
        trainer.fit(as_one([(8,)] * steps), None, hooks)
        return DRAWN[0], DRAWN[1:]

    begin, whole = drawn(6, Hooks())
    begin_again, rest = drawn(4, Hooks(first_epoch_batches=4, steps_done=3))
    assert begin_again == begin
    assert set(rest).isdisjoint(whole)
    assert len({*rest}) == 4
    assert drawn(4, Hooks(first_epoch_batches=4, steps_done=3)) == (begin, rest)
    assert drawn(4, Hooks(first_epoch_batches=4, steps_done=4))[1] != rest
