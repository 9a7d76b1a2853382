"""Options of ``TorchEstimator``'s steps: two ranks train like plain PyTorch on the global batches."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings

import numpy as np
import pytest
import torch
import torchmetrics
from torch.nn import functional

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.data.read.batches import Batch
from sparkhvd.errors import ModelOutputError, ParamError
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.torch import LRSchedule, TorchCallback
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.estimators.torch.serialization import artifact
from sparkhvd.estimators.torch.serialization.package import loads
from sparkhvd.torch import SyncBatchNorm
from sparkhvd.world import World
from tests.ranks import RankGroup
from tests.unit.estimators.arrays import Hooks, spec
from tests.unit.estimators.torch.networks import DATA, flat, network, rows
from tests.unit.estimators.torch.networks import source as uneven_source

SIZES = [(5, 3), (4, 4), (0, 7), (6, 1), (3, 0)] * 2
StepLR = torch.optim.lr_scheduler.StepLR


@pytest.fixture(scope="module")
def group():
    with RankGroup(2, imports=("torch._dynamo", "torchmetrics", "sparkhvd.estimators.torch.plugin")) as started:
        yield started


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(network())


def source(rank, size=2):
    return uneven_source(SIZES if size == 2 else [(sum(step),) for step in SIZES], rank, size)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make(world, model=None, how=None, **params):
    model = network() if model is None else model
    given = {"model": model, "optimizer": sgd(model), "loss": functional.cross_entropy, "label_cols": ("y",)}
    return PLUGIN.trainer(PLUGIN.pack({**given, "schema": DATA, **params}), spec(DATA, **(how or {})), world)


def train(params, how):
    world = session.current().world
    trainer = make(world, how=how, **{name: value() if name == "model" else value for name, value in params.items()})
    hooks = Hooks()
    trainer.fit(source(world.rank), source(world.rank), hooks)
    rates = [group["lr"] for group in trainer._plain_optimizer.param_groups]
    return flat(trainer._model), rates, hooks.reports[-1].train, hooks.reports[-1].validation


def train_plainly(epochs=1, after_backward=None, after_step=None, after_epoch=None, optimized=lambda model: model):
    model = network()
    optimizer = sgd(optimized(model))
    data = rows(sum(map(sum, SIZES)))
    for _ in range(epochs):
        start = 0
        for size in map(sum, SIZES):
            part = slice(start, start + size)
            start += size
            optimizer.zero_grad()
            output = model(torch.from_numpy(data["x"][part]).float())
            functional.cross_entropy(output, torch.from_numpy(data["y"][part])).backward()
            if after_backward is not None:
                after_backward(model)
            optimizer.step()
            if after_step is not None:
                after_step(optimizer)
        if after_epoch is not None:
            after_epoch(optimizer)
    return flat(model), optimizer


def differs(parameters, wanted):
    return np.linalg.norm(parameters - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_the_averaged_gradient_is_clipped_not_the_gradient_of_each_rank(group, kind):
    def clip(model):
        if kind == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)

    wanted, _ = train_plainly(after_backward=clip)
    assert differs(train_plainly()[0], wanted) > 0.01, "clipping has an effect"
    params = {"clip_grad_norm": 0.2} if kind == "norm" else {"clip_grad_value": 0.02}
    for found, *_ in group.run(train, params, {}):
        assert differs(found, wanted) < 1e-5


def train_head(limit):
    world, model = session.current().world, network()
    trainer = make(world, model, optimizer=sgd(model[2]), clip_grad_norm=limit)
    trainer.fit(source(world.rank), source(world.rank), Hooks())
    return flat(trainer._model)


def test_parameters_that_the_optimizer_lacks_do_not_count_when_gradients_are_clipped(group):
    """The gradients of these parameters are not averaged, and accumulate on each rank."""
    wanted, _ = train_plainly(
        optimized=lambda model: model[2],
        after_backward=lambda model: torch.nn.utils.clip_grad_norm_(model[2].parameters(), 0.2),
    )
    first, second = group.run(train_head, 0.2)
    assert np.array_equal(first, second)
    assert differs(first, wanted) < 1e-5


def halving(optimizer):
    return StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("every", ["epoch", "step"])
def test_a_schedule_changes_the_rate_like_in_plain_torch(group, every):
    def halve(optimizer):
        for one in optimizer.param_groups:
            one["lr"] *= 0.5

    hook = {"after_step": halve} if every == "step" else {"after_epoch": halve}
    wanted, optimizer = train_plainly(epochs=2, **hook)
    for found, rates, *_ in group.run(train, {"lr_scheduler": LRSchedule(halving, every)}, {"epochs": 2}):
        assert rates == pytest.approx([optimizer.param_groups[0]["lr"]])
        assert differs(found, wanted) < 1e-5


def test_a_scheduler_of_the_users_optimizer_follows_its_copy_and_the_scale():
    model = network()
    optimizer = sgd(model)
    params = {"model": model, "optimizer": optimizer, "lr_scheduler": LRSchedule(StepLR(optimizer, 2, 0.1))}
    trainer = make(World(rank=0, size=4), how={"scale_lr": True}, **params)
    rates = []
    for _ in range(5):
        trainer._schedule.after_epoch(None)
        rates.append(trainer._plain_optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.4, 0.04, 0.04, 0.004, 0.004])
    other = make(World(rank=0, size=2), how={"scale_lr": True}, lr_scheduler=LRSchedule(halving))
    assert other._plain_optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def composed(optimizer):
    parts = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for rate in (lambda _: 1.0, lambda _: 0.5)]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer):
    return torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 2 else 0.5)], optimizer
    )


def annealed(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=0.05)


@pytest.mark.parametrize("made", [composed, chained, annealed])
def test_schedulers_follow_the_scale_even_if_a_run_resumes_at_another_size(made):
    def trainer(size):
        model = network()
        optimizer = sgd(model)
        params = {"model": model, "optimizer": optimizer, "lr_scheduler": LRSchedule(made(optimizer))}
        return make(World(rank=0, size=size), how={"scale_lr": True}, **params)

    def rates(trainer, epochs):
        for _ in range(epochs):
            trainer._schedule.after_epoch(None)
            yield trainer._plain_optimizer.param_groups[0]["lr"]

    alone, wanted = sgd(network()), []
    schedule = made(alone)
    for _ in range(3):
        alone.step()
        schedule.step()
        wanted.append(4 * alone.param_groups[0]["lr"])
    whole = trainer(4)
    assert list(rates(whole, 3)) == pytest.approx(wanted)
    first, second = trainer(2), trainer(4)
    assert list(rates(first, 1)) == pytest.approx([wanted[0] / 2])
    second.restore(first.state())
    assert list(rates(second, 2)) == pytest.approx(wanted[1:])


def test_the_least_rate_of_a_plateau_follows_the_scale_also_in_a_group_that_is_added():
    model = network()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=0.04)
    params = {"model": model, "optimizer": optimizer, "lr_scheduler": LRSchedule(schedule, monitor="loss")}
    trainer = make(World(rank=0, size=4), how={"scale_lr": True}, **params)
    scaled = trainer._plain_optimizer
    if hasattr(schedule, "default_min_lr"):  # older versions of PyTorch take no new groups
        scaled.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 2.0})
    for epoch in range(3):
        trainer._schedule.after_epoch(EpochRecord(epoch, {"loss": 1.0}))
    assert [one["lr"] for one in scaled.param_groups] == pytest.approx([0.16] * len(scaled.param_groups))


def own_step(model, optimizer, transform_outputs, loss_fn, inputs, labels, weights, passes, index):  # noqa: PLR0917
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, weights)
    loss.backward()
    if (index + 1) % passes == 0:
        optimizer.step()
    return outputs, loss


def clearing_step(model, optimizer, *others):
    if others[-1] % others[-2] == 0:  # the first pass of a step
        optimizer.zero_grad()
    return own_step(model, optimizer, *others)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("function", [own_step, clearing_step])
def test_a_step_function_takes_the_same_steps_even_if_it_clears_gradients_as_for_horovod(group, function, passes):
    how = {"backward_passes_per_step": passes}
    for mine, plain in zip(
        group.run(train, {"train_minibatch_fn": function}, how), group.run(train, {}, how), strict=True
    ):
        assert np.array_equal(mine[0], plain[0])
        assert mine[2]["loss"] == pytest.approx(plain[2]["loss"])


def two_steps(model, optimizer, *others):
    optimizer.zero_grad()
    own_step(model, optimizer, *others)
    optimizer.zero_grad()
    return own_step(model, optimizer, *others)


def train_with_two_steps(sizes):
    world = session.current().world
    trainer = make(world, train_minibatch_fn=two_steps)
    trainer.fit(uneven_source(sizes, world.rank, world.size), None, Hooks())
    return flat(trainer._model)


def test_several_steps_of_a_step_function_equal_those_of_one_big_batch(group):
    sizes = [(5, 2, 1), (1, 4, 3), (3, 3, 2)]
    parameters = group.run(train_with_two_steps, sizes)
    model = network()
    optimizer = sgd(model)
    for batch in uneven_source([(sum(step[: group.size]),) for step in sizes], 0, 1).epoch(0):
        for _ in range(2):
            optimizer.zero_grad()
            output = model(torch.from_numpy(batch.columns["x"]).float())
            functional.cross_entropy(output, torch.from_numpy(batch.columns["y"])).backward()
            optimizer.step()
    assert all(differs(each, flat(model)) < 1e-6 for each in parameters)


def weighing_step(model, optimizer, transform_outputs, loss_fn, inputs, labels, *others):  # noqa: PLR0917
    assert model._orig_mod is not model  # a model of torch.compile
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, torch.full((len(outputs[0]),), 2.0, dtype=torch.float64)) / 2
    assert loss.item() == pytest.approx(loss_fn(outputs, labels).item())
    loss.backward()
    optimizer.step()
    return outputs, loss


def test_a_step_function_gets_the_compiled_model_and_may_weigh_rows_itself(group):
    own = group.run(train, {"train_minibatch_fn": weighing_step, "torch_compile": {"backend": "eager"}}, {})
    plain = group.run(train, {}, {})
    assert differs(own[0][0], plain[0][0]) < 1e-6


class TakingColumns(torch.nn.Module):
    """A model that takes the columns by name."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.calls = 0

    def forward(self, **columns):
        self.calls += 1
        return self.network(columns["x"])


def counting_step(model, optimizer, transform_outputs, loss_fn, inputs, labels, *others):  # noqa: PLR0917
    module = getattr(model, "_orig_mod", model)
    assert isinstance(model, torch.nn.Module)
    assert isinstance(module, TakingColumns)
    assert torch.equal(model(*inputs), model(x=inputs[0]))
    before = model.calls
    result = own_step(model, optimizer, transform_outputs, loss_fn, inputs, labels, *others)
    assert model.calls == before + 1
    return result


def train_taking_columns(params, function):
    world = session.current().world
    trainer = make(world, TakingColumns(), train_minibatch_fn=function, **params)
    trainer.fit(source(world.rank), source(world.rank), Hooks())
    assert not trainer._model._forward_pre_hooks
    return flat(trainer._model)


@pytest.mark.parametrize("params", [{}, {"torch_compile": {"backend": "eager"}}])
def test_a_step_function_gets_the_module_that_takes_columns_by_name(group, params):
    own, plain = (group.run(train_taking_columns, params, function) for function in (counting_step, None))
    assert np.array_equal(own[0], plain[0])


class Shortening(torch.nn.Module):
    """A model whose forward pass shortens the embeddings that it looks up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(12, 4, max_norm=0.3)
        self.bag = torch.nn.EmbeddingBag(12, 4, max_norm=0.2, norm_type=1.0)
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x):
        words = (x.abs() * 4).long().clamp(max=11)
        return self.last(torch.cat([self.words(words).mean(dim=1), self.bag(input=words)], dim=1))


def train_shortening(how, own_steps=None):
    world = session.current().world
    trainer = make(world, Shortening(), how, train_minibatch_fn=own_steps)
    trainer.fit(source(world.rank), source(world.rank), Hooks())
    assert not any(part._forward_pre_hooks for part in trainer._model.modules())
    return flat(trainer._model)


@pytest.mark.parametrize("own_steps", [None, own_step])
def test_embeddings_with_max_norm_shorten_the_rows_of_all_ranks(group, own_steps):
    ours = group.run(train_shortening, {"epochs": 2}, own_steps)
    assert differs(ours[0], ours[1]) < 1e-6
    model, data = Shortening(), rows(sum(map(sum, SIZES)))
    optimizer = sgd(model)
    for _ in range(2):
        start = 0
        for size in map(sum, SIZES):
            part = slice(start, start + size)
            start += size
            optimizer.zero_grad()
            output = model(torch.from_numpy(data["x"][part]).float())
            functional.cross_entropy(output, torch.from_numpy(data["y"][part])).backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.from_numpy(data["x"]).float())  # the validation
    assert differs(ours[0], flat(model)) < 1e-5


def normalizing(layer=torch.nn.BatchNorm1d):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), layer(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()


def synchronized():
    return normalizing(SyncBatchNorm)


def train_synchronized(how):
    world = session.current().world
    trainer = make(world, synchronized(), how)
    trainer.fit(source(world.rank), None, Hooks())
    return {name: value.numpy() for name, value in trainer._model.state_dict().items()}


@pytest.mark.parametrize("passes", [1, 2])
def test_synchronized_batch_normalization_equals_one_big_batch_even_without_rows_on_a_rank(group, passes):
    model = normalizing()
    optimizer, data, start = sgd(model), rows(sum(map(sum, SIZES))), 0
    for index in range(0, len(SIZES), passes):
        sizes = [sum(step) for step in SIZES[index : index + passes]]
        optimizer.zero_grad()
        for size in sizes:
            part = slice(start, start + size)
            start += size
            output = model(torch.from_numpy(data["x"][part]))
            loss = functional.cross_entropy(output, torch.from_numpy(data["y"][part]))
            (loss * (size / sum(sizes))).backward()
        optimizer.step()
    for found in group.run(train_synchronized, {"backward_passes_per_step": passes}):
        for name, wanted in model.state_dict().items():
            assert np.allclose(found[name], wanted.numpy(), rtol=1e-9, atol=1e-12), name


def test_losses_are_created_on_the_ranks(group):
    def smooth(model, label_cols):
        assert isinstance(model, torch.nn.Module)
        assert label_cols == ("y",)
        return torch.nn.CrossEntropyLoss()

    plain = group.run(train, {}, {})
    for made in (smooth, lambda **known: functional.cross_entropy):
        found = group.run(train, {"loss": None, "loss_constructors": [made]}, {})
        assert np.array_equal(found[0][0], plain[0][0])


class Tempered(torch.nn.Module):
    """A loss with a weight that the optimizer trains and a buffer, whose first values differ between ranks."""

    def __init__(self, optimizer):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((1,), 2.0 + hvd.rank()))
        self.register_buffer("shift", torch.full((3,), 0.5 * hvd.rank()), persistent=False)
        optimizer.add_param_group({"params": [self.scale]})

    def forward(self, output, label):
        return functional.cross_entropy((output + self.shift * output.square()) * self.scale, label)


@pytest.mark.usefixtures("alone")
def test_all_ranks_train_with_the_values_that_rank_0_gave_its_loss(group):
    losses = {"loss": None, "loss_constructors": [Tempered]}
    one_process = make(World(), **losses)
    one_process.fit(source(0, size=1), None, Hooks())
    for parameters, *_ in group.run(train, losses, {}):
        assert differs(parameters, flat(one_process._model)) < 1e-5


class ByName(torchmetrics.MinMaxMetric):
    def __init__(self):
        super().__init__(torchmetrics.classification.MulticlassAccuracy(3))

    def forward(self, output, label):
        return {name: super(ByName, self).forward(output, label)[name] for name in ("min", "max")}


class Halved(torchmetrics.wrappers.abstract.WrapperMetric):
    def __init__(self, metric):
        super().__init__()
        self.metric = copy.deepcopy(metric)

    def update(self, output, label):
        self.metric.update(output, label)

    def compute(self):
        return self.metric.compute() / 2

    def forward(self, output, label):
        return self.metric(output, label) / 2


def test_torchmetrics_are_computed_over_the_rows_of_all_ranks(group):
    macro = torchmetrics.classification.MulticlassF1Score(3, average="macro")
    auroc = torchmetrics.classification.MulticlassAUROC(3)  # its state has all predictions
    doubled = torchmetrics.classification.MulticlassAccuracy(3) * 2  # its state is in the wrapped metric
    metrics = {"f1": macro, "auroc": auroc, "doubled": doubled, "wrapped": Halved(auroc)}
    results = group.run(train, {"metrics": metrics}, {})
    model, data = network(), rows(sum(map(sum, SIZES)))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(results[0][0]), model.parameters())
    output, label = model(torch.from_numpy(data["x"]).float()), torch.from_numpy(data["y"])
    for name, metric in metrics.items():
        (total, count), (nothing, none) = results[0][3][name], results[1][3][name]
        assert (count, nothing, none) == (1, 0.0, 0)
        assert total == pytest.approx(float(copy.deepcopy(metric)(output, label)), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_gives_similar_parameters_and_all_ranks_agree(group, precision):
    wanted, _ = train_plainly(epochs=2)
    first, second = group.run(train, {"mixed_precision": precision}, {"epochs": 2})
    assert np.array_equal(first[0], second[0])
    assert 0 < differs(first[0], wanted) < 0.05


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_labels_that_16_bits_cannot_hold_keep_their_values_in_lower_precision(precision):
    trainer = make(World(), torch.nn.Linear(6, 1), loss=functional.mse_loss, mixed_precision=precision)
    columns = {"x": np.zeros((2, 6)), "y": np.array([250_375, 1])}
    loss, (output,), (label,) = trainer._forward(Batch(columns, 2, 2))
    assert label.flatten().tolist() == [250_375.0, 1.0]
    assert output.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(250_375**2 / 2, rel=1e-3)


def test_gradients_may_be_compressed(group):
    wanted, _ = train_plainly()
    first, second = group.run(train, {"gradient_compression": "bf16"}, {})
    assert np.array_equal(first[0], second[0])
    assert 1e-6 < differs(first[0], wanted) < 0.05


def test_compiled_models_train_the_same(group):
    plain = group.run(train, {}, {})
    found = group.run(train, {"torch_compile": {"backend": "eager"}}, {})
    assert differs(found[0][0], plain[0][0]) < 1e-6


def test_scripted_modules_train_the_same_and_are_returned(group, tmp_path):
    plain = group.run(train, {}, {})
    assert differs(group.run(train_scripted, str(tmp_path))[0], plain[0][0]) < 1e-6
    model = artifact.load_model(tmp_path)
    assert isinstance(model, torch.jit.ScriptModule)
    optimizer = artifact.load_optimizer(tmp_path, model)
    assert set(map(id, optimizer.param_groups[0]["params"])) == set(map(id, model.parameters()))
    assert differs(flat(model), plain[0][0]) < 1e-6
    with torch.no_grad():
        (output,) = PLUGIN.predictor(tmp_path).predict({"x": rows(5)["x"]})
    assert output.shape == (5, 3)


def train_scripted(folder):
    world = session.current().world
    trainer = make(world, scripted())
    trainer.fit(source(world.rank), None, Hooks())
    if world.rank == 0:
        from pathlib import Path  # noqa: PLC0415

        trainer.export(Path(folder))
    return flat(trainer._model)


class Recorder(TorchCallback):
    def __init__(self):
        self.seen = []

    def on_train_begin(self, run):
        self.seen.append(("begin", run.size))

    def on_epoch_begin(self, run, epoch):
        self.seen.append(("epoch", epoch))

    def on_step_end(self, run, epoch, step, loss):
        if step == 2:
            self.seen.append(("step", type(loss)))

    def on_epoch_end(self, run, epoch, logs):
        run.optimizer.param_groups[0]["lr"] *= 0.5
        run.stop = epoch == 1
        self.seen.append(("logs", sorted(logs)))

    def on_train_end(self, run):
        self.seen.append(("end", run.optimizer.param_groups[0]["lr"]))


def train_with_callback():
    world = session.current().world
    trainer = make(world, how={"epochs": 5}, callbacks=[Recorder()])
    trainer.fit(source(world.rank), None, Hooks())
    return trainer._package.callbacks[0].seen, trainer._plain_optimizer.param_groups[0]["lr"]


def test_callbacks_see_the_training_and_may_stop_it(group):
    for seen, rate in group.run(train_with_callback):
        each = [[("epoch", epoch), ("step", float), ("logs", ["loss"])] for epoch in (0, 1)]
        assert seen == [("begin", 2), *each[0], *each[1], ("end", 0.025)]
        assert rate == 0.025


class Dropping(torch.nn.Sequential):
    """Draws random numbers of PyTorch, NumPy and Python in every step."""

    def forward(self, inputs):
        noise = torch.from_numpy(np.random.normal(size=inputs.shape)).float()
        return super().forward(inputs + random.gauss(0.1, 0.05) * noise)


class Halving(TorchCallback):
    """Halves the learning rate before every epoch."""

    def on_epoch_begin(self, run, epoch):
        for group in run.optimizer.param_groups:
            group["lr"] *= 0.5


def train_in_two_parts(*callbacks):
    """Train without interruption; also train to the middle of the second epoch, and resume in another trainer."""
    world = session.current().world

    def trainer():
        torch.manual_seed(3)
        model = Dropping(torch.nn.Linear(6, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule = LRSchedule(lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9), "step")
        return make(world, model, {"epochs": 3}, optimizer=optimizer, lr_scheduler=schedule, callbacks=callbacks)

    class Interrupted(Hooks):
        def on_step_end(self, report, trainer):
            if (report.epoch, report.step) == (1, 4):
                self.kept = (trainer.state(), report.rank_state())
                raise InterruptedError

    undisturbed = trainer()
    undisturbed.fit(source(world.rank), None, Hooks())
    first, hooks = trainer(), Interrupted()
    with contextlib.suppress(InterruptedError):
        first.fit(source(world.rank), None, hooks)
    second = trainer()
    second.restore(hooks.kept[0])
    again = Hooks(first_epoch=1, first_step=4, rank_state=hooks.kept[1])
    second.fit(source(world.rank), None, again)
    rate = second._plain_optimizer.param_groups[0]["lr"]
    return flat(undisturbed._model), flat(second._model), again.steps[0].step, rate


@pytest.mark.parametrize(("callbacks", "factor"), [((), 1.0), ((Halving(),), 0.5**3)])
def test_a_run_resumed_within_an_epoch_equals_an_uninterrupted_one(group, callbacks, factor):
    for undisturbed, continued, step, rate in group.run(train_in_two_parts, *callbacks):
        assert np.array_equal(undisturbed, continued)
        assert step == 5
        assert rate == pytest.approx(0.05 * 0.9**30 * factor)


def test_a_fitted_model_and_its_optimizer_start_another_training():
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 6)).sum().backward()
    optimizer.step()
    packed = loads(
        PLUGIN.pack(
            {"model": model, "optimizer": optimizer, "loss": torch.nn.NLLLoss(), "label_cols": ("y",), "schema": DATA}
        )
    )
    kept = packed.optimizer.state[packed.model[0].weight]
    assert torch.equal(kept["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert kept["step"] == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"train_minibatch_fn": own_step, "clip_grad_norm": 1.0},
            "clip_grad_norm has no effect with train_min",
        ),
        ({"train_minibatch_fn": own_step, "mixed_precision": "fp16"}, "cannot scale losses"),
        ({"train_minibatch_fn": own_step, "model": synchronized()}, "and SyncBatchNorm would wait for that rank"),
        ({"train_minibatch_fn": lambda model: model}, r"train_minibatch_fn cannot be called with \(model, optimizer, "),
        ({"loss_constructors": [lambda other: other], "loss": None}, r"<lambda>\(other\) cannot be called: missing"),
        (
            {"model": torch.nn.Sequential(torch.nn.Embedding(4, 3, sparse=True)), "clip_grad_norm": 1.0},
            r"clip_grad_norm cannot clip the sparse gradients of embeddings \(0\)",
        ),
        ({"callbacks": [print]}, "callbacks holds a builtin_function_or_method"),
        ({"loss_constructors": [functional.mse_loss] * 2, "loss": None}, "loss_constructors has 2 entries, but"),
        ({"metrics": {"m": torchmetrics.classification.MulticlassF1Score(3, average=None)}}, "must return one number"),
        ({"metrics": {"m": ByName()}}, r"returns a dict with keys \['min', 'max'\].* must return one number"),
    ],
)
def test_unsupported_parameters_are_refused_on_the_driver(params, message):
    model = params.get("model", network())
    given = {"model": model, "optimizer": sgd(model), "loss": functional.cross_entropy, "label_cols": ("y",), **params}
    with pytest.raises((ParamError, ModelOutputError), match=message):
        PLUGIN.check(given, DATA, None)
