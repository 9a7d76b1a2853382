"""All ranks of PyTorch are one big batch: weights, losses and metrics equal those of plain PyTorch."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.estimators.reports import EpochReport
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.estimators.training.logs.history import average_over_ranks
from sparkhvd.world import World
from tests.unit.estimators.arrays import ArraySource, Hooks, schema, spec
from tests.unit.estimators.torch.networks import (
    DATA,
    EVEN,
    OPTIMIZERS,
    as_one,
    flat,
    make_trainer,
    network,
    rows,
    source,
)

PARTIAL_END = [(4, 4, 4)] * 19 + [(2, 1, 1)]


UNEVEN = [(5, 3, 1), (1, 7, 2), (4, 4, 4), (6, 1, 9)] * 5


SOME_EMPTY = [(5, 0, 1), (0, 7, 0), (4, 4, 4), (3, 2, 0)] * 5


def train_as_weighted_rank(sizes):
    world = session.current().world
    model = network()
    data = DataSchema((*DATA.columns, *schema(w=("weight", "float64", (), "scalar")).columns))
    params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": functional.cross_entropy}
    payload = PLUGIN.pack({**params, "label_cols": ("y",), "sample_weight_col": "w", "schema": data})
    trainer = PLUGIN.trainer(payload, spec(data), world)
    plain = source(sizes, world.rank, world.size)
    weighted = ArraySource(data, {**plain.columns, "w": weights(plain.rows())}, plain.mine, plain.everyones)
    hooks = Hooks()
    trainer.fit(weighted, weighted, hooks)
    return flat(trainer._model), average_over_ranks(hooks.reports[-1], session.current()).validation["loss"]


def weights(count):
    return np.random.default_rng(6).uniform(0.1, 3.0, count)


def train_as_rank(sizes, optimizer, more):
    world = session.current().world
    trainer = make_trainer(OPTIMIZERS[optimizer], world, **more)
    hooks = Hooks()
    trainer.fit(source(sizes, world.rank, world.size), source(sizes, world.rank, world.size), hooks)
    record = average_over_ranks(hooks.reports[-1], session.current())
    return flat(trainer._model), record


def train_plainly(steps, optimizer, epochs=1):
    """Train with plain PyTorch on the global batches; return parameters, mean loss and accuracy over the rows."""
    model = network()
    chosen = OPTIMIZERS[optimizer](model)
    data = rows(sum(steps))
    for _ in range(epochs):
        start, losses, right = 0, 0.0, 0
        for size in steps:
            x = torch.from_numpy(data["x"][start : start + size]).float()
            y = torch.from_numpy(data["y"][start : start + size])
            start += size
            chosen.zero_grad()
            output = model(x)
            loss = functional.cross_entropy(output, y)
            loss.backward()
            chosen.step()
            losses += loss.item() * size
            right += int((output.argmax(dim=1) == y).sum())
    return flat(model), losses / sum(steps), right / sum(steps)


def test_weighted_rows_count_as_in_one_big_batch_in_training_and_validation(group):
    steps = [sum(step[: group.size]) for step in SOME_EMPTY]
    model = network()
    optimizer = OPTIMIZERS["momentum"](model)
    data, weight, start = rows(sum(steps)), torch.from_numpy(weights(sum(steps))).float(), 0
    for size in steps:
        part = slice(start, start + size)
        start += size
        optimizer.zero_grad()
        output = model(torch.from_numpy(data["x"][part]).float())
        losses = functional.cross_entropy(output, torch.from_numpy(data["y"][part]), reduction="none")
        (losses * weight[part]).mean().backward()
        optimizer.step()
    with torch.no_grad():
        output = model(torch.from_numpy(data["x"]).float())
    losses = functional.cross_entropy(output, torch.from_numpy(data["y"]), reduction="none")
    for parameters, of_validation in group.run(train_as_weighted_rank, SOME_EMPTY):
        assert relative_error(parameters, flat(model)) < 1e-5
        assert of_validation == pytest.approx((losses * weight).mean().item(), rel=1e-5)


def relative_error(parameters, wanted):
    return np.linalg.norm(parameters - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("group", [2, 3], ids=["2 ranks", "3 ranks"], indirect=True)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "sizes", [EVEN, PARTIAL_END, UNEVEN, SOME_EMPTY], ids=["even", "partial end", "uneven", "some empty"]
)
def test_all_ranks_together_are_one_big_batch(group, sizes, optimizer):
    steps = [sum(step[: group.size]) for step in sizes]
    wanted, loss, right = train_plainly(steps, optimizer)
    found = group.run(train_as_rank, sizes, optimizer, {})
    assert relative_error(wanted, flat(network())) > 0.01  # the training has changed the parameters
    for parameters, record in found:
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)
        assert record.train["accuracy"] == pytest.approx(right)


def test_all_ranks_have_bitwise_equal_parameters(group):
    found = [parameters for parameters, _ in group.run(train_as_rank, SOME_EMPTY, "Adam", {})]
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("passes", [2, 3])
def test_several_backward_passes_make_one_larger_batch_even_at_the_end_of_the_epoch(group, passes):
    """20 is not a multiple of 3, so the last two passes are a step of their own."""
    each = [sum(step[: group.size]) for step in SOME_EMPTY]
    wanted, _, _ = train_plainly([sum(each[i : i + passes]) for i in range(0, 20, passes)], "momentum")
    for parameters, _ in group.run(train_as_rank, SOME_EMPTY, "momentum", {"backward_passes_per_step": passes}):
        assert relative_error(parameters, wanted) < 1e-5


def test_scale_lr_multiplies_the_learning_rate_by_the_number_of_ranks(group):
    size = group.size
    wanted = flat(network())
    model = network()
    data = rows(sum(sum(step[:size]) for step in EVEN))
    one = torch.optim.SGD(model.parameters(), lr=0.05 * size, momentum=0.9)
    for start in range(0, len(data["y"]), 4 * size):
        chosen = slice(start, start + 4 * size)
        one.zero_grad()
        loss = functional.cross_entropy(
            model(torch.from_numpy(data["x"][chosen]).float()), torch.from_numpy(data["y"][chosen])
        )
        loss.backward()
        one.step()
    wanted = flat(model)
    for parameters, _ in group.run(train_as_rank, EVEN, "momentum", {"scale_lr": True}):
        assert relative_error(parameters, wanted) < 1e-5


def dropout_streams():
    world = session.current().world
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout(0.5))
    params = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
    loss = {"loss": functional.cross_entropy, "label_cols": ("y",)}
    trainer = PLUGIN.trainer(PLUGIN.pack({**params, **loss, "schema": DATA}), spec(DATA), world)
    trainer.fit(source([(1, 1, 1)], world.rank, world.size), None, Hooks())
    return torch.rand(4).tolist()


def test_every_rank_draws_its_own_random_numbers(group):
    drawn = group.run(dropout_streams)
    assert len({tuple(numbers) for numbers in drawn}) == group.size


def test_validation_uses_neither_dropout_nor_gradients_and_changes_nothing(alone):
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.9))
    params = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.0)}
    loss = {"loss": functional.cross_entropy, "label_cols": ("y",)}
    trainer = PLUGIN.trainer(PLUGIN.pack({**params, **loss, "schema": DATA}), spec(DATA), session.current().world)
    hooks, data = Hooks(), as_one([(12,)])
    trainer.fit(data, data, hooks)
    trained = trainer._model.eval()
    wanted = functional.cross_entropy(
        trained(torch.from_numpy(data.columns["x"]).float()), torch.from_numpy(data.columns["y"])
    )
    assert hooks.reports[0].validation["loss"] == (pytest.approx(wanted.item()), 1), "the mean of all ranks' rows"
    assert trained[1].num_batches_tracked.item() == 1


class Noisy(torch.nn.Linear):
    """Draws from the generators of NumPy and Python."""

    def forward(self, x):
        return super().forward(x) * np.random.rand() + random.random()


def test_a_seed_repeats_the_numbers_of_the_global_generators_of_numpy_and_python(alone):
    def trained(seed):
        torch.manual_seed(3)
        model = Noisy(6, 3)
        params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": functional.cross_entropy}
        payload = PLUGIN.pack({**params, "label_cols": ("y",), "schema": DATA})
        trainer = PLUGIN.trainer(payload, replace(spec(DATA), seed=seed), World())
        trainer.fit(as_one([(8,)] * 3), None, Hooks())
        return flat(trainer._model)

    assert np.array_equal(trained(1), trained(1))
    assert not np.array_equal(trained(1), trained(2))


def test_a_hook_stops_the_training(alone):
    class Impatient(Hooks):
        def on_epoch_end(self, report: EpochReport, trainer: object) -> bool:
            super().on_epoch_end(report, trainer)
            return False

    hooks = Impatient()
    make_trainer(OPTIMIZERS["Adam"], session.current().world, epochs=5).fit(as_one([(3,)]), None, hooks)
    assert len(hooks.reports) == 1


def test_the_report_contains_the_times_by_kind(alone):
    hooks = Hooks()
    make_trainer(OPTIMIZERS["Adam"], session.current().world).fit(as_one([(3,)] * 4), None, hooks)
    report = hooks.reports[0]
    assert report.steps == 4
    assert min(report.times.data_wait, report.times.compute, report.times.communication) > 0
    line = average_over_ranks(report, session.current()).line(epochs=3)
    assert line.startswith("epoch 1/3  loss ")
    assert "rows/s  step " in line
    assert all(f"{kind} " in line for kind in ("data", "compute", "communication"))


IGNORING = {
    "ignored": (torch.nn.CrossEntropyLoss(ignore_index=1), [1] * 8 + [0, 2, 1, 2]),
    "torch's default": (torch.nn.CrossEntropyLoss(), [-100] * 8 + [0, 2, 1, 2]),
    "weighted": (torch.nn.CrossEntropyLoss(weight=torch.tensor([0.0, 5.0, 1.0])), [0, 0, 0, 0, 1, 2, 2, 2, 2, 1, 0, 1]),
    "half the steps": (torch.nn.CrossEntropyLoss(), [-100] * 12 + [0, 2, 1, 2] * 6),
    "masked outputs": (torch.nn.CrossEntropyLoss(), [-100] * 8 + [0, 2, 2, 0]),
    "sequences": (torch.nn.CrossEntropyLoss(), [[-100, -100]] * 8 + [[0, 2], [1, -100], [2, 1], [0, 0]]),
    "sequences of floats": (torch.nn.CrossEntropyLoss(), [[-100.0, -100.0]] * 8 + [[0.0, 2.0], [1.0, -100.0]] * 2),
    "weighted probabilities": (
        torch.nn.CrossEntropyLoss(weight=torch.tensor([3.0, 5.0, 1.0])),
        [[0.5, 0.5, 0.0]] * 8 + [[0.0, 0.3, 0.7], [0.2, 0.0, 0.8]] * 2,
    ),
    "probabilities": (torch.nn.CrossEntropyLoss(), [[1, 0, 0]] * 8 + [[0, 1, 0], [0, 0, 1]] * 2),
}


class Masked(torch.nn.Module):
    """Gives one class the probability 0."""

    def forward(self, x):
        return x.masked_fill(torch.tensor([False, True, False]), float("-inf"))


def ignoring_network(kind):
    torch.manual_seed(3)
    if "sequences" in kind:
        return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Unflatten(1, (3, 2)))
    return torch.nn.Sequential(network(), Masked()) if kind == "masked outputs" else network()


def train_ignoring(kind, sizes):
    world, (loss, labels) = session.current().world, IGNORING[kind]
    model, shape = ignoring_network(kind), np.shape(labels)[1:]
    params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": loss, "label_cols": ("y",)}
    dtype = "float64" if isinstance(np.ravel(labels)[0], float) else "int64"
    data = schema(x=("feature", "float64", (6,), "array"), y=("label", dtype, shape, "array" if shape else "scalar"))
    trainer = PLUGIN.trainer(PLUGIN.pack({**params, "schema": data}), spec(data), world)
    data = source(sizes, world.rank, world.size)
    count = data.rows()
    data.columns["y"] = np.array(labels * 9)[:count]
    validation, hooks = replace(data, columns=dict(data.columns)), Hooks()
    trainer.fit(data, validation, hooks)
    record = average_over_ranks(hooks.reports[-1], session.current())
    model = trainer._model.eval()
    with torch.no_grad():
        wanted = loss(model(torch.from_numpy(data.columns["x"]).float()), ignoring_labels(kind, data.columns["y"]))
    return flat(model), record, wanted.item()


def ignoring_labels(kind, labels):
    return torch.as_tensor(labels, dtype=torch.float32 if "probabilities" in kind else torch.int64)


def train_ignoring_plainly(kind, steps):
    loss_of, labels = IGNORING[kind]
    model = ignoring_network(kind)
    optimizer, data, start = OPTIMIZERS["momentum"](model), rows(sum(steps)), 0
    label = ignoring_labels(kind, labels * 9)[: sum(steps)]
    losses = []
    for size in steps:
        part = slice(start, start + size)
        start += size
        optimizer.zero_grad()
        loss = loss_of(model(torch.from_numpy(data["x"][part]).float()), label[part])
        if torch.isfinite(loss):
            loss.backward()
            losses.append((loss.item(), size))
        else:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return flat(model), np.average([loss for loss, _ in losses], weights=[size for _, size in losses])


@pytest.mark.parametrize("kind", IGNORING)
def test_ignored_labels_are_handled_in_training_and_validation_as_in_one_big_batch(group, kind):
    """This includes steps in which all labels of a rank, or of all ranks, are ignored."""
    sizes = [(4, 4, 4), (4, 2, 3), (4, 0, 4), (4, 4, 4)]
    wanted, loss = train_ignoring_plainly(kind, [sum(step[: group.size]) for step in sizes])
    for parameters, record, of_validation in group.run(train_ignoring, kind, sizes):
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)
        assert record.validation["loss"] == pytest.approx(of_validation, rel=1e-5)


class OfLogarithms(torch.nn.Module):
    """Accepts only positive numbers, and at least two rows."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = torch.nn.Linear(6, 4, bias=False), norm(4)
        self.last = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, x):
        self.seen = self.seen + len(x) * self.training
        return self.last(self.norm(self.first(torch.log(x))) * self.scale)


def train_synchronized(sizes):
    world, model = session.current().world, OfLogarithms(hvd.SyncBatchNorm)
    params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": functional.cross_entropy}
    payload = PLUGIN.pack({**params, "label_cols": ("y",), "schema": DATA})
    data = source(sizes, world.rank, world.size)
    data.columns["x"] = np.abs(data.columns["x"]) + 0.1
    sample = {name: array[:1] for name, array in data.columns.items()}
    trainer = PLUGIN.trainer(payload, spec(DATA, sample=sample), world)
    trainer.fit(data, None, Hooks())
    return flat(trainer._model)


def trained_alone(steps, least_label=0):
    """Return the parameters after steps of these sizes in one process."""
    model, data = OfLogarithms(torch.nn.BatchNorm1d), rows(sum(steps))
    optimizer = OPTIMIZERS["momentum"](model)
    for x, y in zip(*(torch.split(torch.from_numpy(data[name]), steps) for name in "xy"), strict=True):
        optimizer.zero_grad()
        functional.cross_entropy(model((x.abs() + 0.1).float()), y.clamp(min=least_label)).backward()
        optimizer.step()
    return flat(model)


def test_a_rank_without_rows_takes_part_in_synchronized_statistics_with_a_sample_row_or_earlier_rows(group):
    sizes = [(0, 4, 0), (4, 0, 0)] * 2  # the layer that is not synchronized sees one big batch, too
    steps = [sum(step[: group.size]) for step in sizes]
    expected = trained_alone(steps)
    for parameters in group.run(train_synchronized, sizes):
        assert relative_error(parameters, expected) < 1e-5


class KeptRows(torch.nn.Module):
    """A loss over the rows whose label is not 0, or NaN without such rows; counts the rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.tensor(0))

    def forward(self, output, label):
        self.rows += len(label)
        kept = label != 0
        return (functional.cross_entropy(output, label, reduction="none") * kept).sum() / kept.sum()


def train_synchronized_masked(sizes):
    world, model = session.current().world, OfLogarithms(hvd.SyncBatchNorm)
    params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": KeptRows()}
    data = source(sizes, world.rank, world.size)
    data.columns.update(x=np.abs(data.columns["x"]) + 0.1, y=np.maximum(data.columns["y"], 1))
    sample = {"x": data.columns["x"][:1], "y": np.zeros(1, np.int64)}
    payload = PLUGIN.pack({**params, "label_cols": ("y",), "schema": DATA})
    trainer, seen = PLUGIN.trainer(payload, spec(DATA, sample=sample), world), []
    (loss,) = trainer._package.objective.losses

    class Seeing(Hooks):
        """Reads the buffer of the rank's loss after each step, before the end of the epoch synchronizes it."""

        def on_step_end(self, report, trainer):
            seen.append(loss.rows.item())

    trainer.fit(data, None, Seeing())
    return flat(trainer._model), seen[-1]


def test_the_placeholders_of_a_rank_without_rows_change_neither_gradients_nor_buffers_of_a_loss(group):
    sizes = [(0, 4, 0)] * 4
    steps = [sum(step[: group.size]) for step in sizes]
    expected = trained_alone(steps, least_label=1)
    for rank, (parameters, seen) in enumerate(group.run(train_synchronized_masked, sizes)):
        assert relative_error(parameters, expected) < 1e-5
        assert seen == sum(step[rank] for step in sizes)


def try_on_one_rank():
    world, model = session.current().world, OfLogarithms(hvd.SyncBatchNorm)
    params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": functional.cross_entropy}
    payload = PLUGIN.pack({**params, "label_cols": ("y",), "schema": DATA})
    sample = {name: np.abs(array) for name, array in source([(2, 0, 0)], 0, world.size).columns.items()}
    shapes = PLUGIN.try_out(payload, DATA, sample) if world.rank == 0 else [(3,)]
    hvd.barrier()
    return shapes


def test_checking_a_model_with_synchronized_layers_does_not_wait_for_other_ranks(group):
    assert group.run(try_on_one_rank) == [[(3,)]] * group.size


class Counting(torch.nn.Module):
    """Counts its forward passes in an attribute, which is part of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.network, self.passes = network(), 0

    def forward(self, x):
        self.passes += 1
        return self.network(x)


class CountingAlone(Counting):
    """Saves its counter itself."""

    def get_extra_state(self):
        return self.passes

    def set_extra_state(self, state):
        self.passes = state


class Shrinking(Counting):
    """Changes its weights in the forward pass."""

    def forward(self, x):
        with torch.no_grad():
            self.network[0].weight.mul_(0.99)
        return self.network(x)


class ShrinkingSilently(Counting):
    """Changes its weights in the forward pass in a way that PyTorch does not count."""

    def forward(self, x):
        self.network[0].weight.data.mul_(0.99)
        return self.network(x)


MODELS = {
    "plain": network,
    "buffers": lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(6), network()),
    "attribute": Counting,
    "extra state": CountingAlone,
    "weights": Shrinking,
    "weights through data": ShrinkingSilently,
}


class KeepingAverage(TorchCallback):
    def on_train_begin(self, run):
        self.average = torch.optim.swa_utils.AveragedModel(run.model)


class Recovering(Hooks):
    """Recovers the state of each step, before and after the next update."""

    def __init__(self):
        super().__init__()
        self.states, self.before, self.after, self.recover = [], [], [], None

    def before_update(self, epoch, sums=None):
        if self.steps:
            recovered = self.recover()
            self.before.append(None if recovered is None else recovered == self.states[-1])

    def on_step_end(self, report, trainer):
        if self.steps:
            self.after.append(self.recover())
        super().on_step_end(report, trainer)
        self.recover = (lambda: None) if report.prepare_recovery is None else report.prepare_recovery()
        self.states.append(trainer.state())


def recover_as_rank(kind):
    world, model = session.current().world, MODELS.get(kind, network)()
    training = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": functional.cross_entropy}
    callbacks = [KeepingAverage()] if kind == "average" else []
    payload = PLUGIN.pack({"model": model, "callbacks": callbacks, "label_cols": ("y",), "schema": DATA, **training})
    hooks = Recovering()
    PLUGIN.trainer(payload, spec(DATA, elastic=True), world).fit(source(EVEN, world.rank, world.size), None, hooks)
    return hooks.before, hooks.after


@pytest.mark.parametrize(
    ("kind", "recovers"),
    [("plain", True), *((kind, None) for kind in MODELS if kind != "plain"), ("average", None)],
)
def test_the_state_of_a_step_can_be_recovered_until_the_next_update_unless_a_forward_pass_changes_it(
    group, kind, recovers
):
    for before, after in group.run(recover_as_rank, kind):
        assert len(before) > 2
        assert set(before) == {recovers}
        assert set(after) == {None}
