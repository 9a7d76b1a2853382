"""The training of LightningEstimator in real ranks, without Spark."""

from __future__ import annotations

import math
import os
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import sparkhvd.torch as hvd
from sparkhvd.comm import session
from sparkhvd.data import DataModule
from sparkhvd.estimators.training.logs.history import average_over_ranks, to_history
from tests.unit.estimators.arrays import Hooks
from tests.unit.estimators.lightning.networks import (
    EVEN,
    SIZE,
    SOME_EMPTY,
    WEIGHTED,
    flat,
    module,
    network,
    normalizing,
    rated,
    rows,
    source,
    trainer_of,
)


def trained(sizes, kind, epochs, more):
    """Return the parameters and the record of the last epoch over all ranks."""
    rank = session.current().world.rank
    trainer, hooks = trainer_of(module(kind), epochs, **more), Hooks()
    trainer.fit(source(sizes, rank), source(sizes, rank), hooks)
    assert [report.epoch for report in hooks.reports] == list(range(epochs))
    return flat(trainer._package.model), average_over_ranks(hooks.reports[-1], session.current())


def trained_plainly(steps, epochs=1, clip=None, model=None, *, weighted=False):
    """Train with plain PyTorch on the global batches; return parameters, and loss and accuracy of the last epoch."""
    model = model or network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = rows(sum(steps))
    for _ in range(epochs):
        start, losses, right = 0, 0.0, 0
        for size in steps:
            x = torch.from_numpy(data["x"][start : start + size]).to(next(model.parameters()).dtype)
            y = torch.from_numpy(data["y"][start : start + size])
            weights = torch.from_numpy(data["w"][start : start + size]).float() if weighted else torch.ones(size)
            start += size
            optimizer.zero_grad()
            output = model(x)
            loss = (torch.nn.functional.cross_entropy(output, y, reduction="none") * weights).mean()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses += loss.item() * size
            right += int((output.argmax(dim=1) == y).sum())
    return flat(model), losses / sum(steps), right / sum(steps)


def relative_error(parameters, wanted):
    assert np.linalg.norm(wanted - flat(network())) > 0.05 * np.linalg.norm(wanted)  # it has learned something
    return np.linalg.norm(parameters - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("sizes", [EVEN, SOME_EMPTY], ids=["even", "some empty"])
def test_all_ranks_together_are_one_big_batch_and_logged_values_are_over_all_rows(group, sizes):
    wanted, loss, accuracy = trained_plainly([sum(step) for step in sizes], epochs=2)
    results = group.run(trained, sizes, "simple", 2, {})
    for parameters, record in results:
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)
        assert record.train["accuracy"] == pytest.approx(accuracy)
        assert record.train["twice"] == pytest.approx(2 * loss, rel=1e-5)
        assert math.isfinite(record.validation["loss"])
    assert np.array_equal(results[0][0], results[1][0])


@pytest.mark.parametrize("sizes", [SOME_EMPTY, [(5, 0), (7, 0), (4, 0)]])
def test_synchronized_batch_normalization_equals_the_big_batch_even_without_rows_on_a_rank(group, sizes):
    wanted, loss, _ = trained_plainly([sum(step) for step in sizes], epochs=2, model=normalizing())
    found = group.run(trained, sizes, "normalizing", 2, {"trainer_args": {"sync_batchnorm": True}})
    for parameters, record in found:
        assert np.allclose(parameters, wanted, rtol=1e-9, atol=1e-10)
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)


def terminated():
    """Return the exit code of a rank that gets a SIGTERM during the training."""

    class Terminated(type(module())):
        def on_train_batch_end(self, *arguments):
            super().on_train_batch_end(*arguments)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as raised:
        trainer_of(Terminated()).fit(source(EVEN, session.current().world.rank), None, Hooks())
    return raised.value.code


def test_a_sigterm_ends_a_rank_with_the_exit_code_of_this_signal(group):
    assert group.run(terminated) == [143, 143]


def train_in_double_precision(sizes, plain, folder):
    """Return the parameters, and on rank 0 the predictions of the exported model."""
    from sparkhvd.estimators.lightning.plugin import PLUGIN  # noqa: PLC0415

    rank, model = session.current().world.rank, network() if plain else module()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    own = {"optimizer": optimizer, "loss": torch.nn.CrossEntropyLoss()} if plain else {}
    trainer = trainer_of(model, 2, trainer_args={"precision": "64-true"}, **own)
    trainer.fit(source(sizes, rank), None, Hooks())
    if rank:
        return flat(model if plain else trainer._package.model), None
    trainer.export(Path(folder))
    return flat(trainer._package.model), PLUGIN.predictor(Path(folder)).predict({"x": rows(5)["x"]})[0]


@pytest.mark.parametrize("plain", [False, True], ids=["LightningModule", "plain module"])
def test_the_precision_of_the_trainer_applies_to_the_rows_and_to_predictions(group, plain, tmp_path):
    model = network().double()
    wanted, *_ = trained_plainly([sum(step) for step in SOME_EMPTY], epochs=2, model=model)
    (found, predicted), _ = group.run(train_in_double_precision, SOME_EMPTY, plain, str(tmp_path))
    assert found.dtype == predicted.dtype == np.float64
    assert np.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert np.allclose(predicted, model(torch.from_numpy(rows(5)["x"])), rtol=1e-9, atol=1e-11)


def keep_the_worst_epoch(sizes, kind):
    """Return the weights of a module whose checkpoints differ from its own state."""
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415

    simple = type(module())

    class Renamed(simple):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {f"saved.{name}": value for name, value in checkpoint["state_dict"].items()}

        def on_load_checkpoint(self, checkpoint):
            names = {name: name.removeprefix("saved.") for name in checkpoint["state_dict"]}
            checkpoint["state_dict"] = {names[name]: value for name, value in checkpoint["state_dict"].items()}

    class Partial(simple):
        strict_loading = False

        def state_dict(self, *arguments, **named):
            whole = super().state_dict(*arguments, **named)
            return {name: value for name, value in whole.items() if name != "scale"}

    rank = session.current().world.rank
    model = {"renamed": Renamed, "partial": Partial}[kind]()
    trainer = trainer_of(model, 2, callbacks=[ModelCheckpoint(monitor="val_loss", mode="max")])
    trainer.fit(source(sizes, rank), source(sizes, rank), Hooks())
    best = flat(trainer._package.model)
    if rank == 0:
        trainer.restore(trainer.state())
    return best, flat(trainer._package.model)


@pytest.mark.parametrize("kind", ["renamed", "partial"])
def test_weights_are_loaded_in_the_form_in_which_the_module_saves_them(group, kind):
    wanted, *_ = trained_plainly([8] * 12, epochs=1)
    (best, restored), _ = group.run(keep_the_worst_epoch, EVEN, kind)
    assert relative_error(best, wanted) < 1e-5
    assert np.array_equal(best, restored)


def validated_twice_an_epoch(sizes):
    """Return the last validation loss, and the loss of rank 0's model after it."""
    from lightning.pytorch.callbacks import EMAWeightAveraging  # noqa: PLC0415

    rank, hooks = session.current().world.rank, Hooks()
    own = {"callbacks": [EMAWeightAveraging(decay=0.5)], "trainer_args": {"val_check_interval": 0.5}}
    trainer = trainer_of(module("normalizing"), 2, **own)
    trainer.fit(source(sizes, rank), source(sizes, rank), hooks)
    loss = average_over_ranks(hooks.reports[-1], session.current()).validation["loss"]
    model = trainer._package.model
    model.load_state_dict(hvd.broadcast_object(model.state_dict()))
    model.eval()
    data = rows(sum(map(sum, sizes)))
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model(torch.from_numpy(data["x"])), torch.from_numpy(data["y"]))
    return loss, wanted.item()


def test_a_validation_measures_the_returned_model_even_if_a_callback_replaces_its_weights(group):
    found = group.run(validated_twice_an_epoch, [(5, 3), (2, 7), (4, 0), (3, 2)])
    for loss, wanted in found:
        assert loss == pytest.approx(wanted, rel=1e-6)


def averaged_statistics(sizes):
    """Return the state of the model that a callback has averaged, without and with validations."""
    from lightning.pytorch.callbacks import EMAWeightAveraging  # noqa: PLC0415

    rank, states = session.current().world.rank, []
    for validation in (None, source(sizes, rank)):
        trainer = trainer_of(module("normalizing"), 2, callbacks=[EMAWeightAveraging(decay=0.9)])
        trainer.fit(source(sizes, rank), validation, Hooks())
        states.append({name: value.numpy() for name, value in trainer._package.model.state_dict().items()})
    return states


def test_a_validation_leaves_averages_of_running_statistics_alone_if_only_one_rank_has_rows(group):
    for alone, validated in group.run(averaged_statistics, [(4, 0)] * 6):
        for name, value in alone.items():
            assert np.allclose(value, validated[name], rtol=1e-6), name


def frequently_saved_and_validated(folder, saves):
    """Return the state of the trained model and its moving average, with and without checkpoints within epochs."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint  # noqa: PLC0415

    rank = session.current().world.rank
    whole, averaging = source([(5, 3), (2, 7), (4, 0), (3, 2)] * 2, rank), EMAWeightAveraging(decay=0.9)
    kept = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    more = {"callbacks": [averaging, kept], "trainer_args": {"val_check_interval": 2}} if saves else {}
    trainer = trainer_of(module("normalizing"), 2, **{"callbacks": [averaging], **more})
    trainer.fit(whole, whole if saves else None, Hooks())
    return {name: value.numpy() for name, value in trainer._package.model.state_dict().items()}


def test_checkpoints_and_validations_within_an_epoch_do_not_change_running_statistics_or_their_averages(
    group, tmp_path
):
    alone = group.run(frequently_saved_and_validated, str(tmp_path), False)
    for state in group.run(frequently_saved_and_validated, str(tmp_path), True):
        for name, value in alone[0].items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert len(list(tmp_path.glob("*.ckpt"))) == 5


def kept_by_callbacks(sizes):
    """Return the statistics of the rows in modules that a callback keeps."""
    from lightning.pytorch import Callback  # noqa: PLC0415

    class Keeping(Callback):
        def setup(self, trainer, module, stage):
            self.kept = {"norm": torch.nn.BatchNorm1d(6, momentum=1.0, dtype=torch.float64)}
            if trainer.is_global_zero:
                self.alone = torch.nn.Linear(2, 2)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if sizes[batch_idx][rank]:
                self.kept["norm"](batch["x"].double())

    rank = session.current().world.rank
    trainer = trainer_of(module(), callbacks=[Keeping()])
    trainer.fit(source(sizes, rank), None, Hooks())
    return trainer._package.callbacks[0].kept["norm"].running_mean.numpy()


def test_the_buffers_of_modules_that_callbacks_keep_are_averaged_although_one_rank_keeps_another_module(group):
    wanted = rows(8)["x"].mean(axis=0)
    for mean in group.run(kept_by_callbacks, [(6, 2)]):
        assert mean == pytest.approx(wanted, abs=1e-6)


def changed_in_a_validation(sizes):
    """Return statistics that a callback resets in the validation after the second batch, where it drops others."""
    from lightning.pytorch import Callback  # noqa: PLC0415

    class Resetting(Callback):
        def setup(self, trainer, module, stage):
            self.kept = {name: torch.nn.BatchNorm1d(6, momentum=0.5, dtype=torch.float64) for name in ("norm", "more")}

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            for norm in self.kept.values():
                norm(batch["x"].double())

        def on_validation_end(self, trainer, module):
            self.kept.pop("more")
            self.kept["norm"].reset_running_stats()

    rows_of_rank = source(sizes, session.current().world.rank)
    trainer = trainer_of(module(), callbacks=[Resetting()], trainer_args={"val_check_interval": 2})
    trainer.fit(rows_of_rank, rows_of_rank, Hooks())
    return trainer._package.callbacks[0].kept["norm"].running_mean.numpy()


def test_buffers_that_a_callback_changes_in_a_validation_within_an_epoch_keep_their_new_values(group):
    wanted = 0.5 * rows(24)["x"][16:].mean(axis=0)
    for mean in group.run(changed_in_a_validation, [(4, 4)] * 3):
        assert mean == pytest.approx(wanted, abs=1e-6)


def test_accumulated_and_clipped_batches_make_one_larger_batch_even_at_the_end_of_the_epoch(group):
    """Seven is not a multiple of three, so the last batch is a step of its own."""
    each = [sum(step) for step in SOME_EMPTY]
    wanted, *_ = trained_plainly([sum(each[i : i + 3]) for i in range(0, 7, 3)], clip=0.2)
    arguments = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}
    for parameters, _ in group.run(trained, SOME_EMPTY, "simple", 1, {"trainer_args": arguments}):
        assert relative_error(parameters, wanted) < 1e-5


def test_the_last_step_of_an_epoch_with_a_limit_is_the_mean_over_its_own_rows(group):
    each = [sum(step) for step in SOME_EMPTY]
    wanted, *_ = trained_plainly([sum(each[:3]), sum(each[3:5])])
    arguments = {"accumulate_grad_batches": 3, "limit_train_batches": 5}
    for parameters, _ in group.run(trained, SOME_EMPTY, "simple", 1, {"trainer_args": arguments}):
        assert relative_error(parameters, wanted) < 1e-5


def test_manual_optimization_gets_the_gradient_of_the_big_batch(group):
    wanted, loss, _ = trained_plainly([sum(step) for step in SOME_EMPTY])
    for parameters, record in group.run(trained, SOME_EMPTY, "by hand", 1, {}):
        assert relative_error(parameters, wanted) < 1e-5
        assert record.train["loss"] == pytest.approx(loss, rel=1e-5)


def plain_module(sizes):
    from torchmetrics.classification import MulticlassF1Score  # noqa: PLC0415

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loss = torch.nn.functional.cross_entropy
    rank, hooks = session.current().world.rank, Hooks()
    accuracy = lambda output, label: (output.argmax(dim=1) == label).float().mean()  # noqa: E731
    metrics = {"accuracy": accuracy, "f1.macro": MulticlassF1Score(3, average="macro")}
    trainer = trainer_of(model, optimizer=optimizer, loss=loss, metrics=metrics)
    trainer.fit(source(sizes, rank), source(sizes, rank), hooks)
    return flat(trainer._package.model), average_over_ranks(hooks.reports[-1], session.current())


def test_a_plain_module_trains_towards_its_loss_and_its_metrics_are_those_of_all_rows(group):
    from torchmetrics.functional.classification import multiclass_f1_score  # noqa: PLC0415

    wanted, loss, accuracy = trained_plainly([sum(step) for step in SOME_EMPTY])
    model, data = network(), rows(sum(map(sum, SOME_EMPTY)))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(wanted), model.parameters())
    output, label = model(torch.from_numpy(data["x"]).float()).detach(), torch.from_numpy(data["y"])
    after = {
        "loss": float(torch.nn.functional.cross_entropy(output, label)),
        "accuracy": float((output.argmax(dim=1) == label).float().mean()),
        "f1.macro": float(multiclass_f1_score(output, label, 3, average="macro")),
    }
    for parameters, record in group.run(plain_module, SOME_EMPTY):
        assert relative_error(parameters, wanted) < 1e-5
        assert 0 < record.train.pop("f1.macro") < after["f1.macro"]  # the model improved during the epoch
        assert record.train == pytest.approx({"loss": loss, "accuracy": accuracy}, rel=1e-5)
        assert record.validation == pytest.approx(after, rel=1e-4)


def ignoring(sizes):
    """Train a plain module that ignores rank 0's labels in some steps; return the last record and the wanted loss."""
    rank, hooks, loss = session.current().world.rank, Hooks(), torch.nn.CrossEntropyLoss(ignore_index=1)
    model = network()
    trainer = trainer_of(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.02), loss=loss)
    data = source(sizes, rank)
    data.columns["y"] = np.where(np.arange(data.rows()) % 8 < 5, 1, data.columns["y"])
    trainer.fit(data, data, hooks)
    with torch.no_grad():
        output = trainer._package.model(torch.from_numpy(data.columns["x"]).float())
        wanted = loss(output, torch.from_numpy(data.columns["y"])).item()
    return average_over_ranks(hooks.reports[-1], session.current()), wanted


def test_labels_that_a_plain_modules_loss_ignores_are_handled_equally_in_training_and_validation(group):
    for record, wanted in group.run(ignoring, [(4, 4), (4, 4), (4, 0), (4, 4)]):
        assert math.isfinite(record.train["loss"])
        assert record.validation == pytest.approx({"loss": wanted}, rel=1e-5)


def only_logged():
    """Return the record of an epoch whose validation_step only logs a mean, and has batches without rows."""

    class OnlyLogs(type(module())):
        def validation_step(self, batch, index):
            counted = batch["y"] == (2 if index % 2 else 0)
            share = (self(batch["x"]).argmax(dim=1)[counted] == 0).float().mean()
            self.log("val_zeros", share, batch_size=int(counted.sum()))

    trainer, hooks = trainer_of(OnlyLogs()), Hooks()
    rows_of_rank = source(EVEN, session.current().world.rank)
    trainer.fit(rows_of_rank, rows_of_rank, hooks)
    return average_over_ranks(hooks.reports[-1], session.current())


def test_a_validation_step_that_only_logs_adds_its_values_to_the_history_and_no_loss(group):
    for record in group.run(only_logged):
        assert list(record.validation) == ["zeros"]
        assert 0 <= record.validation["zeros"] <= 1
        (entry,) = to_history([record])
        assert entry["validation"] == {"all_metrics": [{"zeros": record.validation["zeros"]}]}
        assert "val_loss" not in to_history([record]).to_pandas()


def weighted(kind):
    """Train with row weights that the module or the loss applies."""
    rank = session.current().world.rank
    model = network() if kind == "plain" else module("weighted")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    of_plain = {"optimizer": optimizer, "loss": torch.nn.functional.cross_entropy, "sample_weight_col": "w"}
    trainer = trainer_of(model, data=WEIGHTED, **(of_plain if kind == "plain" else {}))
    hooks, rows_of_rank = Hooks(), source(SOME_EMPTY, rank, WEIGHTED)
    trainer.fit(rows_of_rank, rows_of_rank if kind == "plain" else None, hooks)
    record = average_over_ranks(hooks.reports[-1], session.current())
    if kind == "plain":
        x, y, w = (torch.from_numpy(rows_of_rank.columns[name]) for name in "xyw")
        losses = torch.nn.functional.cross_entropy(trainer._package.model(x.float()), y, reduction="none")
        assert record.validation["loss"] == pytest.approx((losses * w).mean().item(), rel=1e-5)
    return flat(trainer._package.model), record.train["loss"]


@pytest.mark.parametrize("kind", ["plain", "module"])
def test_weighted_rows_count_as_in_one_big_batch(group, kind):
    wanted, loss, _ = trained_plainly([sum(step) for step in SOME_EMPTY], weighted=True)
    unweighted, *_ = trained_plainly([sum(step) for step in SOME_EMPTY])
    assert not np.allclose(wanted, unweighted, rtol=1e-2)
    for parameters, found in group.run(weighted, kind):
        assert relative_error(parameters, wanted) < 1e-5
        assert found == pytest.approx(loss, rel=1e-5)


def trained_by(flavour):
    rank, hooks = session.current().world.rank, Hooks()
    trainer = trainer_of(module(flavour=flavour))
    trainer.fit(source(SOME_EMPTY, rank), None, hooks)
    assert type(trainer._trainer).__module__.startswith(flavour)
    return flat(trainer._package.model), average_over_ranks(hooks.reports[-1], session.current()).train["accuracy"]


@pytest.mark.filterwarnings("ignore")
def test_the_older_name_of_lightning_trains_the_same(group):
    pytest.importorskip("pytorch_lightning")
    wanted, _, accuracy = trained_plainly([sum(step) for step in SOME_EMPTY])
    for parameters, found in group.run(trained_by, "pytorch_lightning"):
        assert relative_error(parameters, wanted) < 1e-5
        assert found == pytest.approx(accuracy)


def hot_start(folder):
    """Return the optimizer of a plain module after training with a scaled learning rate."""
    from sparkhvd.estimators.torch.serialization import artifact  # noqa: PLC0415

    model, rank = network(), session.current().world.rank
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    trainer = trainer_of(model, 1, {"scale_lr": True}, optimizer=adam, loss=torch.nn.functional.cross_entropy)
    trainer.fit(source(EVEN, rank), None, Hooks())
    own = Path(folder) / str(rank)
    own.mkdir()
    trainer.export(own)
    loaded = artifact.load_model(own)
    optimizer = artifact.load_optimizer(own, loaded)
    moments = optimizer.state[next(loaded.parameters())]["exp_avg"]
    wanted = trainer._package.optimizers[0].state[next(trainer._package.model.parameters())]["exp_avg"]
    assert torch.equal(moments, wanted)
    return optimizer.param_groups[0]["lr"], float(moments.abs().sum())


def test_a_plain_modules_optimizer_is_returned_with_its_state_and_unscaled_learning_rate(group, tmp_path):
    for rate, moments in group.run(hot_start, str(tmp_path)):
        assert rate == pytest.approx(0.02)
        assert moments > 0


def exported(folder):
    """Train with a logger, a checkpoint of the best epoch, early stopping and the user's data module."""
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
    return len(hooks.reports), flat(trainer._package.model) if rank == 0 else None


def kept_data_module(given):
    return trainer_of(module(), data_module=given)._package.data_module


def test_a_data_module_that_loads_rows_is_not_called_for_a_lightning_data_module(group):
    assert group.run(kept_data_module, DataModule) == [None] * SIZE
    assert group.run(kept_data_module, dict) == [dict] * SIZE


def opened(folder):
    """Open the files with Lightning itself and with a predictor."""
    from sparkhvd.estimators.lightning.plugin import PLUGIN  # noqa: PLC0415

    again = type(module()).load_from_checkpoint(Path(folder) / "lightning.ckpt", weights_only=False)
    predicted = PLUGIN.predictor(Path(folder)).predict({"x": rows(5)["x"]})
    with torch.no_grad():
        wanted = again.eval()(torch.from_numpy(rows(5)["x"]).float()).numpy()
    return flat(again), np.array_equal(predicted[0], wanted)


def test_callbacks_agree_loggers_write_and_the_files_open_without_spark(group, tmp_path):
    (epochs, parameters), (others_epochs, _) = group.run(exported, str(tmp_path))
    assert epochs == others_epochs == 2, "stopping by the highest loss ends the fit after the second epoch"
    again, same = group.run(opened, str(tmp_path))[0]
    assert np.array_equal(again, parameters)
    assert same, "the predictor and the module of the checkpoint differ"
    names = zipfile.ZipFile(tmp_path / "logs.zip").namelist()
    assert any(name.endswith("metrics.csv") for name in names), names


def rate_found_without_a_shared_folder():
    """Find a learning rate where Lightning's path of the saved weights leads to a file on rank 0 only."""
    from lightning.pytorch.callbacks import LearningRateFinder  # noqa: PLC0415

    from sparkhvd.lightning.strategy import RankStrategy  # noqa: PLC0415

    def broadcast_as_to_another_host(strategy, value, src=0):
        result = broadcast(strategy, value, src)
        is_elsewhere = strategy.global_rank > 0 and str(result).endswith(".ckpt")
        return f"/nonexistent/{Path(result).name}" if is_elsewhere else result

    broadcast, rank = RankStrategy.broadcast, session.current().world.rank
    trainer = trainer_of(rated(LearningRateFinder(1e-3, 0.1, num_training_steps=20, early_stop_threshold=None)), 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RankStrategy, "broadcast", broadcast_as_to_another_host)
        trainer.fit(source(EVEN, rank), None, Hooks())
    return trainer._trainer.optimizers[0].param_groups[0]["lr"], flat(trainer._package.model)


def test_a_learning_rate_is_found_although_the_ranks_share_no_folder(group):
    """Lightning saves the weights before its trial only on rank 0."""
    (rate, weights), (other_rate, other_weights) = group.run(rate_found_without_a_shared_folder)
    assert rate == other_rate != 0.02
    assert np.array_equal(weights, other_weights)


def averaged(folder):
    """Return the parameters of the best epoch of a training with moving averages, and those in the exported file."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint  # noqa: PLC0415

    # The loss falls, so the first epoch has the highest loss, which counts as the best.
    callbacks = [EMAWeightAveraging(decay=0.5), ModelCheckpoint(monitor="val_loss", mode="max")]
    rank, trainer = session.current().world.rank, trainer_of(module(), 3, callbacks=callbacks)
    trainer.fit(source(EVEN, rank), source(EVEN, rank), Hooks())
    if rank != 0:
        return None
    trainer.export(Path(folder))
    return flat(trainer._package.model), opened(folder)[0]


def test_the_exported_checkpoint_has_the_best_weights_although_a_callback_averages_weights(group, tmp_path):
    best, loaded = group.run(averaged, str(tmp_path))[0]
    assert np.array_equal(loaded, best)


def losses_by_step():
    trainer, hooks = trainer_of(module()), Hooks()
    trainer.fit(source(SOME_EMPTY, session.current().world.rank), None, hooks)
    return [(report.step, report.steps, report.loss is None) for report in hooks.steps]


def test_every_step_with_rows_on_the_rank_is_reported_with_its_loss(group):
    reported = group.run(losses_by_step)
    for rank in range(SIZE):
        assert reported[rank] == [(step + 1, 7, sizes[rank] == 0) for step, sizes in enumerate(SOME_EMPTY)]


def gathering(sizes):
    """Train a module whose loss depends on the outputs of all ranks; return its weights."""

    class Gathering(type(module())):
        def training_step(self, batch, index):
            centers = self.all_gather(self(batch["x"]).mean(dim=0), sync_grads=True)
            return super().training_step(batch, index) + centers.square().mean()

    rank = session.current().world.rank
    model = Gathering()
    trainer = trainer_of(model)
    trainer.fit(source(sizes, rank), None, Hooks())
    return flat(trainer._module)


def test_a_rank_without_rows_takes_part_in_the_gradients_of_gathered_tensors(group):
    first, second = group.run(gathering, SOME_EMPTY)
    assert np.array_equal(first, second)


class Shortening(torch.nn.Module):
    """A model whose forward pass shortens the embeddings that it looks up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(12, 4, max_norm=0.3)
        self.last = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.words((x.abs() * 4).long().clamp(max=11)).mean(dim=1))


def shortening(sizes, automatic):
    """Train a module with ``Shortening``, with automatic or manual optimization; return its weights."""

    class Lookup(type(module())):
        def __init__(self):
            super().__init__("simple")
            self.layers, self.automatic_optimization = Shortening(), automatic

        def on_train_batch_end(self, *_):
            """Skip the averages of the base class."""

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self(batch["x"]), batch["y"])
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    rank = session.current().world.rank
    trainer = trainer_of(Lookup(), 2)
    trainer.fit(source(sizes, rank), source(sizes, rank), Hooks())
    model = trainer._module
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert model.layers.words.max_norm == 0.3
    return flat(model.layers)


@pytest.mark.parametrize("automatic", [True, False])
def test_embeddings_with_max_norm_shorten_the_rows_of_all_ranks(group, automatic):
    first, second = group.run(shortening, SOME_EMPTY, automatic)
    assert np.allclose(first, second, atol=1e-7)
    model, sizes = Shortening(), [sum(step) for step in SOME_EMPTY]
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.5), rows(sum(sizes))
    for _ in range(2):
        for x, y in zip(
            torch.from_numpy(data["x"]).float().split(sizes), torch.from_numpy(data["y"]).split(sizes), strict=True
        ):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.from_numpy(data["x"]).float())  # the validation
    assert np.allclose(first, flat(model), atol=1e-5)


def orders_read(trainer_args):
    """Return the epochs in whose order the rows are read."""
    rows = source(EVEN, session.current().world.rank)
    read, epoch = [], rows.epoch

    def recorded(number, first_step=0):
        read.append(number)
        return epoch(number, first_step)

    rows.epoch = recorded
    trainer_of(module(), 3, trainer_args=trainer_args).fit(rows, None, Hooks())
    return read


def test_overfit_batches_trains_on_the_same_batches_in_every_epoch(group):
    assert group.run(orders_read, {}) == [[0, 1, 2]] * SIZE
    assert group.run(orders_read, {"overfit_batches": 2}) == [[0, 0, 0]] * SIZE


def after_a_trial(sizes):
    """Train with a LearningRateFinder that can only find the rate of the module."""
    from lightning.pytorch.callbacks import LearningRateFinder  # noqa: PLC0415

    rank = session.current().world.rank
    finder = LearningRateFinder(min_lr=0.02, max_lr=0.02, num_training_steps=7, early_stop_threshold=None)
    trainer, hooks = trainer_of(rated(), 2, callbacks=[finder]), Hooks()
    trainer.fit(source(sizes, rank), None, hooks)
    (used,) = [callback for callback in trainer._trainer.callbacks if isinstance(callback, LearningRateFinder)]
    assert len(used.optimal_lr.results["loss"]) == 7
    records = [average_over_ranks(report, session.current()).train["loss"] for report in hooks.reports]
    return flat(trainer._module), records, [(step.epoch, step.step) for step in hooks.steps]


def test_the_trial_of_a_learning_rate_finder_counts_neither_in_the_history_nor_as_steps(group):
    expected = [trained_plainly([sum(step) for step in EVEN], epochs) for epochs in (1, 2)]
    steps = [(epoch, step + 1) for epoch in range(2) for step in range(len(EVEN))]
    for parameters, losses, reported in group.run(after_a_trial, EVEN):
        assert relative_error(parameters, expected[-1][0]) < 1e-5
        assert losses == pytest.approx([loss for _, loss, _ in expected], rel=1e-5)
        assert reported == steps


def synchronized_with_masked_rows(sizes):
    """Train with a loss over rows of other labels than the placeholder's, which is NaN on a rank without rows."""

    class Masked(type(module())):
        def training_step(self, batch, _index):
            kept = batch["y"] != 0
            losses = torch.nn.functional.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
            return (losses * kept).sum() / kept.sum()

    model, rank = Masked("normalizing"), session.current().world.rank
    data = source(sizes, rank)
    data.columns["y"] = np.maximum(data.columns["y"], 1)
    sample = {"x": data.columns["x"][:2], "y": np.zeros(2, np.int64)}
    trainer = trainer_of(model, how={"sample": sample}, trainer_args={"sync_batchnorm": True})
    trainer.fit(data, None, Hooks())
    return flat(trainer._module)


def test_the_loss_of_the_placeholder_row_of_a_rank_without_rows_may_be_nan(group):
    sizes = [(0, 5), (0, 4), (0, 7)]
    model, data = normalizing(), rows(16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    labels = torch.from_numpy(np.maximum(data["y"], 1))
    for x, y in zip(*(torch.split(part, [5, 4, 7]) for part in (torch.from_numpy(data["x"]), labels)), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for parameters in group.run(synchronized_with_masked_rows, sizes):
        assert np.allclose(parameters, flat(model), rtol=1e-9, atol=1e-10)


def numbers_of_an_epoch_and_of_its_rest():
    """Return the random numbers of a whole epoch of six steps, and of its last three steps after other ranks."""

    class Drawing(type(module())):
        def __init__(self):
            super().__init__()
            self.numbers = []

        def training_step(self, batch, index):
            self.numbers.append(float(torch.rand(())))
            return super().training_step(batch, index)

    numbers, rank = [], session.current().world.rank
    for steps, hooks in ((6, Hooks()), (3, Hooks(first_epoch_batches=3, steps_done=3))):
        trainer = trainer_of(Drawing())
        trainer.fit(source(EVEN[:steps], rank), None, hooks)
        numbers.append(trainer._package.model.numbers)
    return numbers


def test_ranks_that_resume_an_epoch_of_others_do_not_draw_their_numbers_again(group):
    drawn = [numbers for of_rank in group.run(numbers_of_an_epoch_and_of_its_rest) for numbers in of_rank]
    assert [len(numbers) for numbers in drawn] == [6, 3, 6, 3]
    assert len({number for numbers in drawn for number in numbers}) == 18


def trained_further(folder):
    """Return the running means of a layer in evaluation mode, after a fit and after another fit of its result."""
    from sparkhvd.estimators.torch.serialization import artifact  # noqa: PLC0415

    model = module("normalizing")
    model.layers[1].eval()
    means, own = [], Path(folder, str(session.current().world.rank))
    own.mkdir()
    for _ in range(2):
        trainer = trainer_of(model)
        trainer.fit(source(EVEN[:2], session.current().world.rank), None, Hooks())
        means.append(trainer._package.model.layers[1].running_mean.tolist())
        trainer.export(own)
        model = artifact.load_model(own)
        assert not model.training
    return means


def test_layers_in_evaluation_mode_stay_so_when_a_trained_model_is_trained_further(group, tmp_path):
    assert group.run(trained_further, str(tmp_path)) == [[[0.0] * 16] * 2] * 2
