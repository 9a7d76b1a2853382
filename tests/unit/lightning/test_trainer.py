"""An estimator's training with Lightning in real ranks, without Spark."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sparkhvd.comm import session
from sparkhvd.data import DataModule
from sparkhvd.estimators.history import averaged
from tests.ranks import RankGroup
from tests.unit.estimators.arrays import ArraySource, Hooks, schema, spec

SIZE = 2
DATA = schema(x=("feature", "float64", (6,), "array"), y=("label", "int64", (), "scalar"))

# Rows of every rank in the steps of an epoch.
EVEN = [(4, 4)] * 12
SOME_EMPTY = [(5, 0), (3, 7), (4, 4), (3, 2), (1, 6), (6, 1), (4, 0)]


@pytest.fixture(scope="module")
def group():
    with RankGroup(
        SIZE, imports=("torch._dynamo", "lightning.pytorch", "sparkhvd.estimators.lightning.plugin")
    ) as started:
        yield started


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def normalizing():
    torch.manual_seed(3)
    # With a bias the gradient would be rounding alone, which Adam makes large.
    layers = [torch.nn.Linear(6, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).double()


def rows(count):
    random = np.random.default_rng(5)
    x = random.normal(size=(count, 6))
    return {"x": x, "y": (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)}


def source(sizes, rank):
    """The rows that ``rank`` has when rows are dealt out in order, step by step and rank by rank."""
    mine, start = [], 0
    for step in sizes:
        first = start + sum(step[:rank])
        mine.append(list(range(first, first + step[rank])))
        start += sum(step)
    return ArraySource(DATA, rows(start), mine, [sum(step) for step in sizes])


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def scheduled(optimizer, kind):
    if not kind.startswith("plateau"):
        return optimizer
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5, factor=0.3)
    monitor = "twice" if kind.endswith("on twice") else "val_loss"
    by_step = {"interval": "step", "frequency": 3, "strict": False} if "by step" in kind else {}
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": monitor, **by_step}}


def disturbed(trained, output):
    """With what hooks made before the step."""
    if trained.hparams["kind"] != "dropping":
        return output
    return torch.nn.functional.dropout(output, trained.dropped) + trained.average


def step_by_hand(trained, loss, index):
    trained.manual_backward(loss)
    if trained.hparams["kind"] == "by hand" or index % 3 == 2:
        trained.optimizers().step()
        trained.optimizers().zero_grad()


def module(kind="simple"):
    import lightning.pytorch as lightning  # noqa: PLC0415
    from torchmetrics.classification import MulticlassAccuracy  # noqa: PLC0415

    class Simple(lightning.LightningModule):
        def __init__(self, kind="simple"):
            super().__init__()
            self.save_hyperparameters()
            self.layers = normalizing() if kind == "normalizing" else network()
            self.register_buffer("average", torch.zeros(3))
            self.accuracy = MulticlassAccuracy(3, average="micro")
            self.automatic_optimization = not kind.startswith("by hand")

        def forward(self, x):
            return self.layers(x)

        def on_train_start(self):
            self.dropped = None

        def on_train_epoch_start(self):
            self.dropped = 0.2

        def on_train_batch_end(self, *_):
            self.average = 0.9 * self.average + 0.1 * self.layers[-1].bias.detach()

        def training_step(self, batch, index):
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            output = self(x)
            loss = torch.nn.functional.cross_entropy(disturbed(self, output), y)
            self.accuracy(output, y)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            self.log("twice", 2 * loss, on_step=True, on_epoch=True)
            if not self.automatic_optimization:
                step_by_hand(self, loss, index)
            return loss

        def validation_step(self, batch, _index):
            loss = torch.nn.functional.cross_entropy(self(batch["x"]), batch["y"])
            self.log("val_loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
            return scheduled(optimizer, self.hparams["kind"])

    return Simple(kind)


def trainer_of(model, epochs=1, **more):
    from sparkhvd.estimators.lightning.plugin import PLUGIN  # noqa: PLC0415

    names = ("optimizer", "input_shapes", "label_shapes", "trainer_args", "logger", "data_module", "loss", "callbacks")
    params = {**dict.fromkeys(names), "model": model, "batch_format": "dict", "label_cols": ("y",), "schema": DATA}
    return PLUGIN.trainer(PLUGIN.pack({**params, **more}), spec(DATA, epochs), session.current().world)


def trained(sizes, kind, epochs, more):
    """Parameters, and the record of the last epoch over all ranks."""
    rank = session.current().world.rank
    trainer, hooks = trainer_of(module(kind), epochs, **more), Hooks()
    trainer.fit(source(sizes, rank), source(sizes, rank), hooks)
    assert [report.epoch for report in hooks.reports] == list(range(epochs))
    return flat(trainer._given.model), averaged(hooks.reports[-1], session.current())


def trained_plainly(steps, epochs=1, clip=None, model=None):
    """Plain PyTorch on the global batches; parameters, and loss and accuracy of the last epoch."""
    model = model or network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = rows(sum(steps))
    for _ in range(epochs):
        start, losses, right = 0, 0.0, 0
        for size in steps:
            x = torch.from_numpy(data["x"][start : start + size]).to(next(model.parameters()).dtype)
            y = torch.from_numpy(data["y"][start : start + size])
            start += size
            optimizer.zero_grad()
            output = model(x)
            loss = torch.nn.functional.cross_entropy(output, y)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses += loss.item() * size
            right += int((output.argmax(dim=1) == y).sum())
    return flat(model), losses / sum(steps), right / sum(steps)


def relative_error(found, wanted):
    assert np.linalg.norm(wanted - flat(network())) > 0.05 * np.linalg.norm(wanted)  # it has learned something
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("sizes", [EVEN, SOME_EMPTY], ids=["even", "some empty"])
def test_all_ranks_together_are_one_big_batch_and_what_they_log_is_over_all_rows(group, sizes):
    wanted, loss, accuracy = trained_plainly([sum(step) for step in sizes], epochs=2)
    found = group.run(trained, sizes, "simple", 2, {})
    for parameters, record in found:
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)
        assert record.train["accuracy"] == pytest.approx(accuracy)
        assert record.train["twice"] == pytest.approx(2 * loss, rel=1e-5)
        assert math.isfinite(record.validation["loss"])
    assert np.array_equal(found[0][0], found[1][0])


def test_batch_normalization_over_all_ranks_is_that_of_the_big_batch_also_where_a_rank_has_no_rows(group):
    wanted, loss, _ = trained_plainly([sum(step) for step in SOME_EMPTY], epochs=2, model=normalizing())
    found = group.run(trained, SOME_EMPTY, "normalizing", 2, {"trainer_args": {"sync_batchnorm": True}})
    for parameters, record in found:
        assert np.allclose(parameters, wanted, rtol=1e-9, atol=1e-10)
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)


def test_accumulated_and_clipped_batches_make_one_bigger_batch_also_at_the_end_of_the_epoch(group):
    """Seven steps are no multiple of three: the last one makes a step of its own."""
    each = [sum(step) for step in SOME_EMPTY]
    wanted, *_ = trained_plainly([sum(each[i : i + 3]) for i in range(0, 7, 3)], clip=0.2)
    arguments = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}
    for parameters, _ in group.run(trained, SOME_EMPTY, "simple", 1, {"trainer_args": arguments}):
        assert relative_error(parameters, wanted) < 1e-5


def test_an_optimizer_by_hand_gets_the_gradient_of_the_big_batch_too(group):
    wanted, loss, _ = trained_plainly([sum(step) for step in SOME_EMPTY])
    for parameters, record in group.run(trained, SOME_EMPTY, "by hand", 1, {}):
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)


def plain_module(sizes):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss = torch.nn.functional.cross_entropy
    rank, hooks = session.current().world.rank, Hooks()
    accuracy = {"accuracy": lambda output, label: (output.argmax(dim=1) == label).float().mean()}
    trainer = trainer_of(model, optimizer=optimizer, loss=loss, metrics=accuracy)
    trainer.fit(source(sizes, rank), None, hooks)
    return flat(trainer._given.model), averaged(hooks.reports[-1], session.current())


def test_a_plain_module_trains_towards_its_loss(group):
    wanted, loss, accuracy = trained_plainly([sum(step) for step in SOME_EMPTY])
    for parameters, record in group.run(plain_module, SOME_EMPTY):
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train == pytest.approx({"loss": loss, "accuracy": accuracy}, rel=1e-5)


class Keeping(Hooks):
    """Takes the state as a checkpoint does: on rank 0 alone, at the end of an epoch."""

    def on_epoch_end(self, report, trainer):
        self.state = trainer.state() if session.current().world.rank == 0 else None
        return super().on_epoch_end(report, trainer)


def continued(kind, keeps_best=False):
    """The parameters of an undisturbed run of four epochs, and those of one that stops after two and goes on."""
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    rank, found = session.current().world.rank, []
    for stops in ((1,), (4,), (2, 3, 4)) if keeps_best else ((4,), (2, 4)):
        state, first = None, 0
        for epochs in stops:
            # The loss falls: by the highest one, the first epoch is the best.
            best = [ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=2)] if keeps_best else []
            trainer, hooks = trainer_of(module(kind), epochs, callbacks=best), Keeping(first_epoch=first)
            if state is not None:
                trainer.restore(state)
            trainer.fit(source(EVEN, rank), source(EVEN, rank), hooks)
            assert [report.epoch for report in hooks.reports] == list(range(first, epochs))
            state, first = hvd.broadcast_object(hooks.state, 0), epochs  # as all ranks read it from the Store
        found.append(flat(trainer._given.model) if rank == 0 or not keeps_best else None)
    return found


def test_a_resumed_run_returns_the_best_epoch_of_all(group):
    first, undisturbed, resumed = group.run(continued, "simple", True)[0]
    assert np.array_equal(first, undisturbed)
    assert np.array_equal(first, resumed)


@pytest.mark.parametrize("kind", ["simple", "plateau"])
def test_a_resumed_run_equals_an_undisturbed_one(group, kind):
    for undisturbed, resumed in group.run(continued, kind):
        assert np.array_equal(undisturbed, resumed)


class Interrupting(Hooks):
    """Takes the state within an epoch, as a checkpoint does, and ends the process' training there."""

    def on_step_end(self, report, trainer):
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == (1, 6):
            assert report.whole
            state = trainer.state() if session.current().world.rank == 0 else None
            self.found = state, report.rank_state()
            raise InterruptedError


@dataclass
class Begun(ArraySource):
    """Gives the rest of the second epoch as if other ranks had begun it."""

    done: int = 6

    def epoch(self, number, first_step=0):
        assert first_step == 0
        return super().epoch(number, self.done if number == 1 else 0)


LONGER = [*SOME_EMPTY, *SOME_EMPTY]


def fitted(kind, hooks, rows_left=None, state=None, epochs=3, **more):
    """The trainer of a fit, from ``state`` on."""
    whole = source(LONGER, session.current().world.rank)
    trainer = trainer_of(module(kind), epochs, **more)
    if state is not None:
        trainer.restore(state)
    trainer.fit(rows_left or whole, whole, hooks)
    return trainer


def broken_off(kind, **more):
    """The state after six batches of the second epoch, and this rank's own."""
    import sparkhvd.torch as hvd  # noqa: PLC0415

    hooks = Interrupting()
    with pytest.raises(InterruptedError):
        fitted(kind, hooks, **more)
    return hvd.broadcast_object(hooks.found[0], 0), hooks.found[1]


def begun_by_others(done):
    """What the second epoch has left, and the hooks to go on with."""
    whole = source(LONGER, session.current().world.rank)
    rows_left = Begun(whole.schema, whole.columns, whole.mine, whole.everyones, done)
    return rows_left, Hooks(first_epoch=1, first_epoch_batches=len(LONGER) - done)


def interrupted(kind, passes, by_others):
    """The parameters and the last loss of an undisturbed run of three epochs, and of one that was interrupted."""
    from lightning.pytorch.callbacks import GradientAccumulationScheduler  # noqa: PLC0415

    scheduled = {"callbacks": [GradientAccumulationScheduler({0: passes})]}
    more = {"trainer_args": {"accumulate_grad_batches": passes}} if by_others else scheduled
    undisturbed = Hooks()
    wanted = flat(fitted(kind, undisturbed, **more)._given.model)
    state, own = broken_off(kind, **more)
    rows_left, hooks = None, Hooks(first_epoch=1, first_step=6, rank_state=own)
    if by_others:
        rows_left, hooks = begun_by_others(6)
    found = flat(fitted(kind, hooks, rows_left, state, **more)._given.model)
    steps = [(report.epoch, report.step, report.whole) for report in hooks.steps]
    assert steps == [(r.epoch, r.step, r.whole) for r in undisturbed.steps if (r.epoch, r.step) > (1, 6)]
    one, other = (averaged(each.reports[-1], session.current()) for each in (hooks, undisturbed))
    assert (one.train, one.validation) == (other.train, other.validation)
    return wanted, found


@pytest.mark.parametrize(
    ("kind", "passes", "by_others"),
    [
        ("dropping", 1, False),
        ("dropping", 3, False),
        ("plateau by step on twice", 1, False),
        ("plateau by step on val_loss", 1, False),
        ("simple", 2, True),
    ],
)
def test_a_run_that_was_interrupted_within_an_epoch_ends_like_one_that_was_not(group, kind, passes, by_others):
    """Also with dropout, with what hooks make after each batch or set when an epoch starts, and with other ranks."""
    for wanted, found in group.run(interrupted, kind, passes, by_others):
        assert np.array_equal(wanted, found)


def continued_where_lightning_would_validate(done):
    """When the second epoch was validated after other ranks began it, and how many batches loggers were told of."""
    import lightning.pytorch as lightning  # noqa: PLC0415

    class Validations(lightning.Callback):
        def __init__(self):
            self.after = []

        def on_validation_end(self, trainer, _module):
            self.after.append((trainer.current_epoch, trainer.fit_loop.batch_idx + 1))

    state, _ = broken_off("plateau by step on twice")
    rows_left, hooks = begun_by_others(done)
    more = {"trainer_args": {"val_check_interval": 7}, "callbacks": [Validations()]}
    trainer = fitted("plateau by step on twice", hooks, rows_left, state, 2, **more)
    assert [report.step for report in hooks.steps] == list(range(done + 1, 15))
    return trainer._given.callbacks[0].after, trainer._trainer.fit_loop.epoch_loop._batches_that_stepped


@pytest.mark.parametrize(("done", "after"), [(0, [7, 14]), (7, [14])])
def test_other_ranks_may_go_on_where_lightning_would_validate(group, done, after):
    """It takes the batch that it validates after for one that is to be finished, and has no metrics of it."""
    wanted = [(1, batch) for batch in after], len(LONGER) + 6 + len(LONGER) - done
    assert group.run(continued_where_lightning_would_validate, done) == [wanted] * SIZE


def whole_steps(kind, arguments):
    """After which steps of two epochs of seven the state is all there is."""
    rank, hooks = session.current().world.rank, Hooks()
    trainer_of(module(kind), 2, trainer_args=arguments).fit(source(SOME_EMPTY, rank), source(SOME_EMPTY, rank), hooks)
    return [(report.epoch, report.step) for report in hooks.steps if report.whole]


@pytest.mark.parametrize(
    ("kind", "arguments", "first", "second"),
    [
        ("simple", {"val_check_interval": 3}, [1, 2, 4, 5, 7], [1, 2, 4, 5, 7]),
        ("simple", {"val_check_interval": 3, "check_val_every_n_epoch": 2}, [1, 2, 3, 4, 5, 6, 7], [1, 2, 4, 5, 7]),
        ("simple", {"val_check_interval": 5, "check_val_every_n_epoch": None}, [1, 2, 3, 4, 6, 7], [1, 2, 4, 5, 6, 7]),
        ("by hand in threes", {}, [3, 6], [3, 6]),
    ],
)
def test_no_checkpoint_is_made_before_a_validation_or_between_optimizer_steps(group, kind, arguments, first, second):
    wanted = [*((0, step) for step in first), *((1, step) for step in second)]
    assert group.run(whole_steps, kind, arguments) == [wanted] * SIZE


def exported(folder):
    """With a logger, a checkpoint of the best epoch, early stopping and a data module of the user's."""
    import lightning.pytorch as lightning  # noqa: PLC0415
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: PLC0415
    from lightning.pytorch.loggers import CSVLogger  # noqa: PLC0415

    class Data(lightning.LightningDataModule):
        def __init__(self, train, validation):
            super().__init__()
            self.train, self.validation = train, validation

        def train_dataloader(self):
            return self.train

        def val_dataloader(self):
            return self.validation

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return {**batch, "x": batch["x"] * 1.5}

    rank = session.current().world.rank
    best = ModelCheckpoint(monitor="val_loss", mode="max", filename="best")
    stop = EarlyStopping("val_loss", mode="max", patience=1)
    more = {"callbacks": [best, stop], "logger": CSVLogger("written"), "data_module": Data}
    trainer, hooks = trainer_of(module(), 6, trainer_args={"log_every_n_steps": 1}, **more), Hooks()
    trainer.fit(source(SOME_EMPTY, rank), source(SOME_EMPTY, rank), hooks)
    if rank == 0:
        trainer.export(Path(folder))
    return len(hooks.reports), flat(trainer._given.model) if rank == 0 else None


def kept_data_module(given):
    return trainer_of(module(), data_module=given)._given.data_module


def test_a_module_that_loads_rows_is_not_asked_for_a_lightning_data_module(group):
    assert group.run(kept_data_module, DataModule) == [None] * SIZE
    assert group.run(kept_data_module, dict) == [dict] * SIZE


def opened(folder):
    """What Lightning itself, and a transform, make of the files."""
    from sparkhvd.estimators.lightning.plugin import PLUGIN  # noqa: PLC0415

    again = type(module()).load_from_checkpoint(Path(folder) / "lightning.ckpt", weights_only=False)
    predicted = PLUGIN.predictor(Path(folder)).predict({"x": rows(5)["x"]})
    with torch.no_grad():
        wanted = again.eval()(torch.from_numpy(rows(5)["x"]).float()).numpy()
    return flat(again), np.array_equal(predicted[0], wanted)


def test_callbacks_agree_loggers_write_and_the_files_open_without_spark(group, tmp_path):
    (epochs, parameters), (others_epochs, _) = group.run(exported, str(tmp_path))
    assert epochs == others_epochs == 2, "the loss falls, so a fit for the highest one ends after the second epoch"
    again, same = group.run(opened, str(tmp_path))[0]
    assert np.array_equal(again, parameters)
    assert same, "a transform predicts something else than the checkpoint's module"
    names = zipfile.ZipFile(tmp_path / "logs.zip").namelist()
    assert any(name.endswith("metrics.csv") for name in names), names


def losses_by_step():
    trainer, hooks = trainer_of(module()), Hooks()
    trainer.fit(source(SOME_EMPTY, session.current().world.rank), None, hooks)
    return [(report.step, report.steps, report.loss is None) for report in hooks.steps]


def test_every_step_is_reported_with_its_loss_where_the_rank_has_rows(group):
    found = group.run(losses_by_step)
    for rank in range(SIZE):
        assert found[rank] == [(step + 1, 7, sizes[rank] == 0) for step, sizes in enumerate(SOME_EMPTY)]


def refused(more):
    from sparkhvd.errors import SparkHvdError  # noqa: PLC0415
    from sparkhvd.estimators.lightning.plugin import PLUGIN  # noqa: PLC0415

    names = ("optimizer", "input_shapes", "label_shapes", "trainer_args", "logger", "data_module", "loss", "callbacks")
    params = {**dict.fromkeys(names), "model": module(), "batch_format": "dict", "label_cols": ("y",)}
    try:
        return PLUGIN.check({**params, **more}, DATA, None)
    except SparkHvdError as error:
        return str(error)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"loss": torch.nn.functional.cross_entropy}, "loss belongs to plain modules"),
        ({"model": torch.nn.Linear(6, 3)}, "plain Linear, which needs optimizer="),
        ({"trainer_args": {"max_epochs": 3}}, "see its parameter epochs"),
        ({"trainer_args": {"max_epoch": 3}}, "'max_epoch', which Lightning's Trainer does not take"),
        ({"callbacks": [print]}, "is no callback"),
        ({"inputs": {"x": ["x"]}}, "a LightningModule gets columns as batch_format says"),
        ({"input_shapes": [(2, 3)]}, "called with [2, 2, 3] from x"),
        ({"label_cols": ("y",)}, [(3,)]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_trained_is_said_on_the_driver(group, more, said):
    found = group.run(refused, more)[0]
    assert said == found or (isinstance(said, str) and said in found)
