from __future__ import annotations

import io
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.estimators.reports import EpochRecord, EpochReport
from sparkhvd.estimators.torch import artifact
from sparkhvd.estimators.torch.callbacks import TorchCallback
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.estimators.torch.safe_state import plain_numbers
from sparkhvd.estimators.torch.schedule import LRSchedule, RunningSchedule
from sparkhvd.estimators.training.history import average_over_ranks
from sparkhvd.world import World
from tests.ranks import RankGroup
from tests.unit.estimators.arrays import ArraySource, Hooks, schema, spec

DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))

# Rows of every rank in the steps of an epoch; the third rank is dropped where there are two.
EVEN = [(4, 4, 4)] * 20
PARTIAL_END = [(4, 4, 4)] * 19 + [(2, 1, 1)]
UNEVEN = [(5, 3, 1), (1, 7, 2), (4, 4, 4), (6, 1, 9)] * 5
SOME_EMPTY = [(5, 0, 1), (0, 7, 0), (4, 4, 4), (3, 2, 0)] * 5

OPTIMIZERS = {
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=np.float64(0.01)),  # as of numpy.logspace
}


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def group(request):
    with RankGroup(request.param, imports=("torch._dynamo", "sparkhvd.estimators.torch.plugin")) as started:
        yield started


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def rows(count):
    random = np.random.default_rng(5)
    return {"x": random.normal(size=(count, 6)), "y": random.integers(0, 3, count)}


def accuracy(output, label):
    return (output.argmax(dim=1) == label).float().mean()


def source(sizes, rank, world_size):
    """Return the rows of ``rank`` if rows are assigned in order, step by step and rank by rank."""
    sizes = [step[:world_size] for step in sizes]
    mine, start = [], 0
    for step in sizes:
        first = start + sum(step[:rank])
        mine.append(list(range(first, first + step[rank])))
        start += sum(step)
    return ArraySource(DATA, rows(start), mine, [sum(step) for step in sizes])


def make_trainer(optimizer, world, **more):
    model = network()
    params = {"model": model, "optimizer": optimizer(model), "loss": functional.cross_entropy, "label_cols": ("y",)}
    payload = PLUGIN.pack({**params, "metrics": [accuracy], "schema": DATA})
    return PLUGIN.trainer(payload, spec(DATA, **more), world)


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


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


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


def relative_error(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "sizes", [EVEN, PARTIAL_END, UNEVEN, SOME_EMPTY], ids=["even", "partial end", "uneven", "some empty"]
)
def test_all_ranks_together_are_one_big_batch(group, sizes, optimizer):
    steps = [sum(step[: group.size]) for step in sizes]
    wanted, loss, right = train_plainly(steps, optimizer)
    found = group.run(train_as_rank, sizes, optimizer, {})
    assert relative_error(wanted, flat(network())) > 0.01  # there is something to be equal in
    for parameters, record in found:
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)
        assert record.train["accuracy"] == pytest.approx(right)


def test_all_ranks_hold_bitwise_the_same_parameters(group):
    found = [parameters for parameters, _ in group.run(train_as_rank, SOME_EMPTY, "Adam", {})]
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("passes", [2, 3])
def test_several_backward_passes_make_one_bigger_batch_also_at_the_end_of_the_epoch(group, passes):
    """20 is not a multiple of 3: the last two passes form their own step."""
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


def as_one(sizes):
    return source([(sum(step),) for step in sizes], 0, 1)


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


def test_a_resumed_run_equals_an_uninterrupted_one(alone):
    world, steps = session.current().world, [(8,)] * 6
    undisturbed = make_trainer(OPTIMIZERS["Adam"], world, epochs=4)
    undisturbed.fit(as_one(steps), None, Hooks())
    first = make_trainer(OPTIMIZERS["Adam"], world, epochs=2)
    first.fit(as_one(steps), None, Hooks())
    second = make_trainer(OPTIMIZERS["Adam"], world, epochs=4)
    second.restore(first.state())
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
def test_a_resumed_run_goes_on_with_unfrozen_layers_and_the_state_of_a_loss(alone, changes):
    world, steps = session.current().world, [(8,)] * 6

    def trainer(epochs):
        model = network()
        model[0].requires_grad_("callbacks" not in changes)
        params = {"loss": functional.cross_entropy, **changes, "label_cols": ("y",), "schema": DATA}
        params |= {"model": model, "optimizer": OPTIMIZERS["momentum"](model)}
        return PLUGIN.trainer(PLUGIN.pack(params), spec(DATA, epochs), world)

    undisturbed, first, second = trainer(4), trainer(2), trainer(4)
    undisturbed.fit(as_one(steps), None, Hooks())
    first.fit(as_one(steps), None, Hooks())
    second.restore(first.state())
    second.fit(as_one(steps), None, Hooks(first_epoch=2))
    assert not np.array_equal(flat(second._model)[:96], flat(network())[:96])
    assert np.array_equal(flat(second._model), flat(undisturbed._model))


class Fading(torch.optim.lr_scheduler.LRScheduler):
    """Keeps its rate as a NumPy number, and an object that is not a number."""

    def __init__(self, optimizer):
        self.rate, self.seen = np.float32(1.0), {1}
        super().__init__(optimizer)

    def get_lr(self):
        self.rate = np.float32(self.rate * 0.5)
        return [float(base * self.rate) for base in self.base_lrs]


class Shrinking:
    """A function with a state, some of which a checkpoint cannot hold."""

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
def test_a_resumed_schedule_continues_with_its_numbers_of_numpy(scheduler, omitted, caplog):
    def rates(count, state=None):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = RunningSchedule(LRSchedule(scheduler), optimizer, 1.0)
        if state is not None:
            content = torch.load(io.BytesIO(state), weights_only=True)
            optimizer.load_state_dict(content[0])
            schedule.restore(content[1], 1.0)
        found = []
        for epoch in range(count):
            schedule.after_epoch(EpochRecord(epoch, {}))
            found.append(optimizer.param_groups[0]["lr"])
        buffer = io.BytesIO()
        torch.save([plain_numbers(optimizer.state_dict()), schedule.state()], buffer)
        schedule.state()
        return found, buffer.getvalue()

    wanted, _ = rates(5)
    assert len(set(wanted)) > 2
    caplog.clear()
    first, state = rates(2)
    assert [record.getMessage().split(": ")[1].split(". ")[0] for record in caplog.records] == omitted
    assert first + rates(3, state)[0] == wanted


class Noisy(torch.nn.Linear):
    """Draws from the generators of NumPy and Python."""

    def forward(self, x):
        return super().forward(x) * np.random.rand() + random.random()


def test_a_seed_makes_the_global_generators_of_numpy_and_python_repeat(alone):
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


class Growing(torch.nn.Module):
    """A loss whose weight grows with every step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, output, label):
        if torch.is_grad_enabled():
            self.steps += 1
        return functional.cross_entropy(output, label.long().reshape(-1)) * self.steps


def test_a_resumed_run_continues_with_the_buffers_of_its_loss(alone):
    def make(epochs):
        model = network()
        params = {"model": model, "optimizer": OPTIMIZERS["momentum"](model), "loss": Growing(), "label_cols": ("y",)}
        return PLUGIN.trainer(PLUGIN.pack({**params, "schema": DATA}), spec(DATA, epochs=epochs), World())

    undisturbed, first, second = make(2), make(1), make(2)
    undisturbed.fit(as_one([(8,)] * 3), None, Hooks())
    first.fit(as_one([(8,)] * 3), None, Hooks())
    second.restore(first.state())
    second.fit(as_one([(8,)] * 3), None, Hooks(first_epoch=1))
    assert np.array_equal(flat(second._model), flat(undisturbed._model))


def test_the_learning_rate_survives_a_resume_and_comes_back_unscaled(alone, tmp_path):
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


def normalizing():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3), torch.nn.Dropout(0.3))
    model.register_buffer("kept_beside", torch.zeros(6), persistent=False)
    model.register_forward_pre_hook(keep_mean)
    return model


def keep_mean(model, inputs):
    if model.training:
        model.kept_beside += inputs[0].mean(dim=0)


class AtStep(Hooks):
    """Keeps the state of a checkpoint after the seventh step."""

    def on_step_end(self, report, trainer):
        if report.step == 7:
            report.synchronize()
            self.kept = (hvd.broadcast_object(trainer.state()), report.rank_state())


def normalized_trainer(**more):
    model = normalizing()
    params = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "loss": functional.cross_entropy}
    payload = PLUGIN.pack({**params, "label_cols": ("y",), "schema": DATA})
    return PLUGIN.trainer(payload, spec(DATA, **more), session.current().world)


def train_with_buffers(sizes):
    """Return the loss of a validation, the loss of rank 0's model after it, and the states of both runs."""
    world = session.current().world
    rows_of_rank = source(sizes, world.rank, world.size)
    trainer, hooks = normalized_trainer(), AtStep()
    trainer.fit(rows_of_rank, rows_of_rank, hooks)
    loss = average_over_ranks(hooks.reports[-1], session.current()).validation["loss"]
    kept, rank_state = hooks.kept
    again = normalized_trainer()
    again.restore(kept)
    again.fit(rows_of_rank, None, Hooks(first_step=7, rank_state=rank_state))
    model = hvd.broadcast_object(trainer._model).eval()
    data = rows_of_rank.columns
    with torch.no_grad():
        wanted = functional.cross_entropy(model(torch.from_numpy(data["x"]).float()), torch.from_numpy(data["y"]))
    states = [
        {**dict(each._model.named_parameters()), **dict(each._model.named_buffers())} for each in (trainer, again)
    ]
    return loss, wanted.item(), [{name: value.detach().numpy() for name, value in each.items()} for each in states]


@pytest.mark.parametrize("sizes", [[(5, 3, 2), (2, 7, 0)] * 5, [(0, 4, 4)] * 9], ids=["uneven", "no rows on rank 0"])
def test_the_validation_measures_the_returned_model_and_resumes_bit_for_bit(group, sizes):
    found = group.run(train_with_buffers, sizes)
    for loss, wanted, states in found:
        assert loss == pytest.approx(wanted, rel=1e-6)
        for state in states:
            for name, value in state.items():
                assert np.array_equal(value, found[0][2][0][name]), name
    assert found[0][2][0]["0.num_batches_tracked"] > 0


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
    """Says that a class is impossible."""

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
    """Accepts only positive numbers."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = torch.nn.Linear(6, 4, bias=False), norm(4), torch.nn.Linear(4, 3)
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
    sample = {name: array[:2] for name, array in data.columns.items()}
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


def test_a_rank_without_any_rows_takes_part_in_synchronized_statistics_with_a_sample_row(group):
    sizes = [(0, 4, 4)] * 4
    steps = [sum(step[: group.size]) for step in sizes]
    expected = trained_alone(steps)
    for parameters in group.run(train_synchronized, sizes):
        assert relative_error(parameters, expected) < 1e-5


class KeptRows(torch.nn.Module):
    """The mean over the rows whose label is not 0, NaN if there are none; counts the rows."""

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
    sample = {"x": data.columns["x"][:2], "y": np.zeros(2, np.int64)}
    payload = PLUGIN.pack({**params, "label_cols": ("y",), "schema": DATA})
    trainer = PLUGIN.trainer(payload, spec(DATA, sample=sample), world)
    trainer.fit(data, None, Hooks())
    (loss,) = trainer._package.objective.losses
    return flat(trainer._model), loss.rows.item()


def test_the_placeholder_row_of_a_rank_without_rows_counts_in_no_gradient_and_no_buffer_of_a_loss(group):
    sizes = [(0, 4, 4)] * 4
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


def test_checking_a_model_with_synchronized_layers_waits_for_no_other_rank(group):
    assert group.run(try_on_one_rank) == [[(3,)]] * group.size
