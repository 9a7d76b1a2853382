"""Estimators that lose and gain ranks while they train: every row still counts once per epoch."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torchmetrics

from sparkhvd import Checkpoints, KerasEstimator, LightningEstimator, SparkBackend, TorchEstimator
from sparkhvd.comm import session
from sparkhvd.errors import ConfigError, ParamError, RankFailedError
from sparkhvd.estimators.torch import TorchCallback
from sparkhvd.store import Store
from tests.scripts import results_of, run_script

pytestmark = pytest.mark.spark

ROWS, EPOCHS = 120, 3
OFTEN = Checkpoints(every_steps=2)
CHANGES = {"start_timeout": 120, "elastic_timeout": 120, "cooldown_range": (0.1, 0.5)}


class SignSGD(torch.optim.SGD):
    """Subtracts the learning rate from each parameter with a gradient, so that a weight counts the uses of its row."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(torch.sign(parameter.grad) * group["lr"])
        return loss


class Killer:
    """Kills one rank per entry of ``kills`` (epoch, step, rank) if at least ``least`` ranks train."""

    def __init__(self, folder: Path, kills: list[tuple[int, int, int]], least: int = 2) -> None:
        self.folder, self.kills, self.least = folder, kills, least

    def __call__(self, epoch: int, step: int) -> None:
        time.sleep(0.03)
        rank, size = (int(os.environ[f"SPARKHVD_{name}"]) for name in ("RANK", "SIZE"))
        done = len(list(self.folder.glob("killed-*")))
        if done < len(self.kills) and size >= self.least:
            at_epoch, at_step, of_rank = self.kills[done]
            if (epoch, rank) == (at_epoch, of_rank) and step >= at_step:
                (self.folder / f"killed-{done}").touch()
                os.kill(os.getpid(), signal.SIGKILL)


class KillTorch(TorchCallback):
    def __init__(self, killer):
        self.killer = killer

    def on_step_end(self, run, epoch, step, loss):
        self.killer(epoch, step)


def torch_network():
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 1), torch.nn.Flatten(0))
    torch.nn.init.zeros_(model[0].weight)
    return model


class Rows(torchmetrics.Metric):
    """Counts rows."""

    def __init__(self):
        super().__init__()
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, output, label):
        self.count += len(output)

    def compute(self):
        return self.count


def torch_estimator(killer, common):
    model = torch_network()
    training = {"optimizer": SignSGD(model.parameters(), lr=1.0), "loss": lambda output, label: output.mean()}
    return TorchEstimator(model=model, metrics={"rows": Rows()}, callbacks=[KillTorch(killer)], **training, **common)


def lightning_estimator(killer, common):
    import lightning.pytorch as lightning  # noqa: PLC0415

    class Kill(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            killer(trainer.current_epoch, batch_idx)

    class Counting(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = torch_network()
            self.rows = Rows()

        def forward(self, rows):
            return self.network(rows)

        def training_step(self, batch, batch_idx):
            output = self.network(batch["id"])
            self.rows.update(output, None)
            self.log("rows", self.rows, on_step=False, on_epoch=True)
            self.log("logged rows", float(len(output)), reduce_fx="sum", on_step=False, on_epoch=True)
            return output.mean()

        def configure_optimizers(self):
            return SignSGD(self.parameters(), lr=1.0)

    return LightningEstimator(model=Counting(), callbacks=[Kill()], **common)


def keras_estimator(killer, common):
    import keras  # noqa: PLC0415

    class Kill(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            killer(self.epoch, batch)

    def mean_output(label, output):
        return keras.ops.sum(output, axis=-1)

    class Counted(keras.metrics.Metric):
        def __init__(self, name="rows", **settings):
            super().__init__(name=name, **settings)
            self.count = self.add_variable((), "zeros", name="count")

        def update_state(self, label, output, sample_weight=None):
            self.count.assign_add(keras.ops.cast(keras.ops.shape(output)[0], "float32"))

        def result(self):
            return self.count

    table = keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((1,), dtype="int64"), table, keras.layers.Flatten()])
    # A nonzero gradient is at least 1/36, so clipping gives all of them the same value.
    optimizer = keras.optimizers.SGD(1024.0, clipvalue=1 / 1024)
    training = {"optimizer": optimizer, "loss": mean_output, "metrics": [Counted()], "callbacks": [Kill()]}
    return KerasEstimator(model=model, custom_objects={"Counted": Counted}, **training, **common)


ESTIMATORS = {"torch": torch_estimator, "lightning": lightning_estimator, "keras": keras_estimator}


def uses(fitted) -> list[int]:
    """Return how often each row was trained on."""
    model = fitted.getModel()
    weights = model.get_weights()[0] if hasattr(model, "get_weights") else next(model.parameters()).detach().numpy()
    assert len(weights) == ROWS
    return [round(-float(weight)) for weight in weights.ravel()]


@pytest.fixture
def fit(spark, tmp_path):
    def run(framework, kills, *, least=2, **params):
        common = {"feature_cols": ["id"], "label_cols": ["y"], "batch_size": 4, "epochs": EPOCHS, "random_seed": 3}
        common |= {"store": Store.create(str(tmp_path / "store")), "scale_lr": False, "verbose": 0, **params}
        df = spark.range(ROWS).selectExpr("id", "0.0D y")
        return ESTIMATORS[framework](Killer(tmp_path, kills, least), common).fit(df)

    return run


@pytest.mark.parametrize(
    ("framework", "batch"),
    [
        ("torch", "rank"),
        ("keras", "global"),
        pytest.param("torch", "global", marks=pytest.mark.soak),
        pytest.param("lightning", "global", marks=pytest.mark.soak),
    ],
)
def test_every_row_counts_once_per_epoch_although_ranks_are_lost_and_join(fit, framework, batch, tmp_path):
    """Lose two ranks in the first epoch, so that its remaining rows are usually divided twice."""
    backend = SparkBackend(3, min_num_proc=1, launcher="local", **CHANGES)
    fitted = fit(framework, [(0, 4, 1), (0, 3, 0)], checkpoints=OFTEN, backend=backend, elastic_batch=batch)
    assert uses(fitted) == [EPOCHS] * ROWS
    assert len(list(tmp_path.glob("killed-*"))) == 2
    sizes = [entry["sizes"] for entry in fitted.getHistory()]
    assert len(sizes) == EPOCHS
    assert sizes[0][0] == 3
    counted = [
        value for entry in fitted.getHistory() for metric in entry["train"]["all_metrics"] for value in metric.values()
    ]
    assert counted == [ROWS] * len(counted), "the metrics of an epoch do not cover each of its rows once"
    assert len(counted) == EPOCHS * (2 if framework == "lightning" else 1)


class LogSteps(TorchCallback):
    """Logs the epoch and the step of every step that a rank completes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, run, epoch, step, loss):
        with (self.folder / f"steps-{os.getpid()}").open("a", encoding="utf-8") as file:
            file.write(f"{epoch} {step}\n")


class SlowState(torch.nn.Module):
    """A model whose state takes so long that there is one commit, at the first step, and one per epoch."""

    def __init__(self):
        super().__init__()
        self.network = torch_network()

    def forward(self, rows):
        return self.network(rows)

    def state_dict(self, *args, **kwargs):
        time.sleep(0.2)
        return super().state_dict(*args, **kwargs)


@pytest.mark.parametrize("killed", ["in a step", "between steps"])
def test_survivors_continue_from_the_last_complete_step_between_commits(spark, tmp_path, killed):
    """Kill rank 0 at the twelfth step, either in the forward pass or after the update."""
    killer = Killer(tmp_path, [(1, 12, 0)])

    def loss(output, labels):
        if "SPARKHVD_RANK" in os.environ and killed == "in a step":
            done = sum(line.startswith("1 ") for line in own_steps(tmp_path))
            killer(min(done, 1), done)
        return output.mean()

    class Kill(TorchCallback):
        def on_step_end(self, run, epoch, step, loss):
            if killed == "between steps":
                killer(epoch, step)

    model = SlowState()
    estimator = TorchEstimator(
        backend=SparkBackend(2, min_num_proc=1, max_num_proc=2, launcher="local", **CHANGES),
        store=Store.create(str(tmp_path / "store")),
        model=model,
        optimizer=SignSGD(model.parameters(), lr=1.0),
        loss=loss,
        callbacks=[LogSteps(tmp_path), Kill()],
        feature_cols=["id"],
        label_cols=["y"],
        batch_size=2,
        epochs=2,
        random_seed=3,
        verbose=0,
    )
    fitted = estimator.fit(spark.range(ROWS).selectExpr("id", "0.0D y"))
    assert (tmp_path / "killed-0").exists()
    assert uses(fitted) == [2] * ROWS
    logs = [path.read_text().splitlines() for path in tmp_path.glob("steps-*")]
    survivor = max(logs, key=len)
    repeated = [step for step, count in Counter(survivor).items() if count > 1]
    assert not repeated, "the survivor has repeated steps"
    # Every row has lost 1 per epoch, so the mean over an epoch is exact only if each of its rows counts once.
    means = [entry["train"]["loss"] for entry in fitted.getHistory()]
    assert means == pytest.approx([-float(epoch) for epoch in range(2)])


def own_steps(folder: Path) -> list[str]:
    path = folder / f"steps-{os.getpid()}"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("framework", "batch"),
    [
        ("lightning", "rank"),
        pytest.param("keras", "rank", marks=pytest.mark.soak),
        pytest.param("torch", "rank", marks=pytest.mark.soak),
        pytest.param("lightning", "global", marks=pytest.mark.soak),
    ],
)
def test_a_shortened_epoch_trains_on_the_same_number_of_rows_after_losses(fit, framework, batch, tmp_path):
    """With ``elastic_batch="rank"``, fewer ranks need more steps for the rest of an epoch."""
    backend = SparkBackend(
        3, min_num_proc=1, max_num_proc=3, launcher="local", **CHANGES | {"cooldown_range": (60, 60)}
    )
    params = {"checkpoints": OFTEN, "backend": backend, "elastic_batch": batch, "train_steps_per_epoch": 8, "epochs": 1}
    fitted = fit(framework, [(0, 2, 1), (0, 2, 0)], **params)
    assert len(list(tmp_path.glob("killed-*"))) == 2
    sizes = [size for entry in fitted.getHistory() for size in entry["sizes"]]
    assert (sizes[0], sizes[-1]) == (3, 1)
    assert Counter(uses(fitted)) == {1: 8 * 3 * 4, 0: ROWS - 8 * 3 * 4}


def test_a_change_of_the_ranks_changes_neither_the_weights_nor_the_history(spark, tmp_path):
    df = spark.range(101).selectExpr("array(id / 101, cos(id), 1.0D) AS x", "sin(id) AS y")

    def trained(name, kills, **params):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1), torch.nn.Flatten(0))
        model.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        estimator = TorchEstimator(
            store=Store.create(str(tmp_path / name)),
            model=model,
            optimizer=optimizer,
            loss=torch.nn.functional.mse_loss,
            callbacks=[KillTorch(Killer(tmp_path, kills))],
            feature_cols=["x"],
            label_cols=["y"],
            batch_size=4,
            epochs=EPOCHS,
            random_seed=3,
            scale_lr=True,
            checkpoints=OFTEN,
            verbose=0,
            **params,
        )
        return estimator.fit(df)

    elastic = SparkBackend(3, min_num_proc=1, launcher="local", **CHANGES)
    fixed = trained("fixed", [], num_proc=3, backend="local")
    changed = trained("elastic", [(0, 4, 1), (1, 3, 0)], backend=elastic)
    assert len(list(tmp_path.glob("killed-*"))) == 2
    for one, other in zip(changed.getModel().parameters(), fixed.getModel().parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    losses = [[entry["train"]["loss"] for entry in fitted.getHistory()] for fitted in (changed, fixed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_ranks_in_spark_tasks_are_replaced(fit, spark, tmp_path):
    fitted = fit("torch", [(1, 4, 1)], checkpoints=OFTEN, num_proc=2, min_num_proc=1, elastic_timeout=120)
    assert uses(fitted) == [EPOCHS] * ROWS
    assert len(list(tmp_path.glob("killed-*"))) == 1
    assert [entry["sizes"][0] for entry in fitted.getHistory()][:2] == [2, 2]
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()


def lightning_estimator_that_loses_rank_1(folder: Path, common):
    import lightning.pytorch as lightning  # noqa: PLC0415

    class Losing(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = torch_network()

        def forward(self, rows):
            return self.network(rows)

        def training_step(self, batch, batch_idx):
            if (self.current_epoch, batch_idx, os.environ["SPARKHVD_RANK"]) == (1, 6, "1"):
                kill_once(folder)
            return self.network(batch["id"]).mean()

        def configure_optimizers(self):
            return SignSGD(self.parameters(), lr=1.0)

    class Log(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            log_step(folder, trainer.current_epoch, batch_idx)

    return LightningEstimator(model=Losing(), callbacks=[Log()], **common)


def keras_estimator_that_loses_rank_1(folder: Path, common):
    import keras  # noqa: PLC0415

    class Lose(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            log_step(folder, self.epoch, batch)
            if (self.epoch, batch, os.environ["SPARKHVD_RANK"]) == (1, 5, "1"):
                # The graph of TensorFlow calls this method in every step, before it updates the weights.
                session.current().allreduce_async = lambda *_, **__: kill_once(folder)

    def mean_output(label, output):
        return keras.ops.sum(output, axis=-1)

    table = keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((1,), dtype="int64"), table, keras.layers.Flatten()])
    optimizer = keras.optimizers.SGD(1024.0, clipvalue=1 / 1024)
    return KerasEstimator(model=model, optimizer=optimizer, loss=mean_output, callbacks=[Lose()], **common)


def kill_once(folder: Path) -> None:
    if not (folder / "killed-0").exists():
        (folder / "killed-0").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def log_step(folder: Path, epoch: int, step: int) -> None:
    """Log a step, and make it so long that the ranks exchange their metrics in every step."""
    time.sleep(0.06)
    with (folder / f"steps-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(f"{epoch} {step}\n")


@pytest.mark.soak
@pytest.mark.parametrize("make", [keras_estimator_that_loses_rank_1, lightning_estimator_that_loses_rank_1])
def test_survivors_in_spark_tasks_continue_from_the_last_complete_step(spark, tmp_path, make):
    common = {"feature_cols": ["id"], "label_cols": ["y"], "batch_size": 5, "epochs": 2, "random_seed": 3}
    common |= {"store": Store.create(str(tmp_path / "store")), "verbose": 0}
    common |= {"num_proc": 2, "min_num_proc": 1, "elastic_timeout": 120}
    fitted = make(tmp_path, common).fit(spark.range(ROWS).selectExpr("id", "0.0D y"))
    assert (tmp_path / "killed-0").exists()
    assert uses(fitted) == [2] * ROWS
    sizes = [entry["sizes"] for entry in fitted.getHistory()]
    assert (sizes[0], sizes[1][:2]) == ([2], [2, 1]), "the history shows the loss"
    logs = [path.read_text().splitlines() for path in tmp_path.glob("steps-*")]
    survivor = max(logs, key=len)
    assert survivor == [f"{epoch} {step}" for epoch in range(2) for step in range(ROWS // 10)], "no step is repeated"
    # Every row has lost 1 per epoch, as without the loss of a rank.
    means = [entry["train"]["loss"] for entry in fitted.getHistory()]
    assert means == pytest.approx([-float(epoch) for epoch in range(2)])


def test_a_fit_continues_from_its_store_after_all_ranks_were_lost(fit):
    backend = SparkBackend(1, min_num_proc=1, launcher="local", **CHANGES)
    fitted = fit("torch", [(1, 10, 0)], least=1, backend=backend)
    assert uses(fitted) == [EPOCHS] * ROWS
    assert len(fitted.getHistory()) == EPOCHS


def test_a_fit_that_loses_all_its_ranks_every_time_ends_with_the_reason(fit):
    backend = SparkBackend(1, min_num_proc=1, launcher="local", **CHANGES)
    kills = [(1, 10, 0)] * 9
    with pytest.raises(RankFailedError, match=r"lost 4 times, so it cannot continue(.|\n)*SIGKILL"):
        fit("torch", kills, least=1, backend=backend)


def loss_that_fails_from(folder: Path, label: float):
    """Return a loss that fails on a rank, but not on the driver, for rows with this label or a larger one."""

    def loss(output, labels):
        if "SPARKHVD_RANK" in os.environ and float(labels.max()) >= label:
            (folder / f"failed-{os.getpid()}").touch()
            raise ZeroDivisionError("bad row")
        return output.mean()

    return loss


@pytest.mark.parametrize(
    ("first_bad", "most_failures"),
    [pytest.param(0, 6, marks=pytest.mark.soak, id="all rows"), pytest.param(ROWS - 1, 12, id="one row")],
)
def test_a_loss_that_fails_every_time_ends_the_fit_with_its_error(spark, tmp_path, first_bad, most_failures):
    """With one bad row, the other rank survives the first failure and then reaches that row itself."""
    model = torch_network()
    estimator = TorchEstimator(
        backend=SparkBackend(2, min_num_proc=1, launcher="spark", **CHANGES),
        store=Store.create(str(tmp_path / "store")),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=loss_that_fails_from(tmp_path, first_bad),
        feature_cols=["id"],
        label_cols=["y"],
        batch_size=4,
        epochs=EPOCHS,
        random_seed=3,
        verbose=0,
    )
    with pytest.raises(RankFailedError) as caught:
        estimator.fit(spark.range(ROWS).selectExpr("id", "double(id) y"))
    assert re.match(
        rf"Rank {caught.value.rank} on host .* raised ZeroDivisionError: bad row \(in training\)\. Ranks have failed "
        "like this 3 times without a new commit in between",
        str(caught.value),
    )
    assert "in loss" in caught.value.remote_traceback
    # Both ranks may fail in a generation, and a commit before the one bad row resets the count.
    assert 3 <= len(list(tmp_path.glob("failed-*"))) <= most_failures


def test_a_loss_that_is_not_finite_ends_the_fit_at_its_first_report(spark, tmp_path):
    model = torch_network()
    estimator = TorchEstimator(
        backend=SparkBackend(2, min_num_proc=1, launcher="local", **CHANGES),
        store=Store.create(str(tmp_path / "store")),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda output, labels: (output * float("nan")).mean(),
        feature_cols=["id"],
        label_cols=["y"],
        batch_size=4,
        terminate_on_nan=True,
        verbose=0,
    )
    with pytest.raises(
        RankFailedError, match=r"DataError: The loss of epoch 1 of 1, step 1 .* Every attempt would raise"
    ):
        estimator.fit(spark.range(ROWS).selectExpr("id", "0.0D y"))


@pytest.mark.soak
def test_without_changes_an_elastic_fit_trains_the_weights_of_a_fixed_fit(fit, tmp_path):
    other = Store.create(str(tmp_path / "other"))
    elastic = fit("torch", [], num_proc=2, max_num_proc=2, backend="local")
    fixed = fit("torch", [], num_proc=2, backend="local", store=other)
    assert torch.equal(elastic.getModel()[0].weight, fixed.getModel()[0].weight)
    assert [entry["train"] for entry in elastic.getHistory()] == [entry["train"] for entry in fixed.getHistory()]
    assert [entry["sizes"] for entry in elastic.getHistory()] == [[2]] * EPOCHS


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"store": None}, ParamError, "keeps its rows and checkpoints in a Store"),
        ({"data": "direct"}, ParamError, "data='direct' cannot divide the rest of an epoch again"),
        ({"reader": "petastorm"}, ParamError, "reader='petastorm' cannot divide the rest of an epoch again"),
        ({"backend": "mpi"}, ConfigError, "The launcher 'mpi' cannot start elastic ranks"),
        ({"num_proc": 1}, ConfigError, "must not decrease in this order"),
        ({"min_num_proc": None, "elastic_timeout": 5.0}, ConfigError, "elastic_timeout is for elastic training"),
        ({"num_proc": None, "backend": SparkBackend(2)}, ParamError, '"backend" and "min_num_proc"'),
    ],
)
def test_parameters_without_elastic_support_are_refused_before_any_job(fit, params, error, message):
    with pytest.raises(error, match=message):
        fit("torch", [], **{"num_proc": 3, "min_num_proc": 2, **params})


def test_batches_that_a_joining_rank_could_leave_with_one_row_are_refused_for_batch_normalization(spark, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["id"],
        label_cols=["y"],
        store=Store.create(str(tmp_path)),
        backend=SparkBackend(3, min_num_proc=1, max_num_proc=4, launcher="local"),
        elastic_batch="rank",
        batch_size=2,
        verbose=0,
    )
    with pytest.raises(ParamError, match=r"elastic_batch='rank' with batch_size=2 .* \(1\) .* at least 3"):
        estimator.fit(spark.range(12).selectExpr("id", "0.0D y"))


@pytest.mark.cluster
@pytest.mark.soak  # such a job without an estimator, and fits in Spark tasks that are lost, are other tests
@pytest.mark.parametrize(
    ("framework", "ends"), [("torch", ["killed", "decommissioned"]), ("lightning", ["killed"]), ("keras", ["killed"])]
)
def test_a_fit_grows_and_shrinks_with_dynamic_allocation_and_counts_every_row_once_per_epoch(framework, ends, tmp_path):
    script = Path(__file__).with_name("elastic_fit_script.py")
    command = [sys.executable, script, tmp_path, framework, *ends]
    results = results_of(run_script(command, tmp_path, 900, SPARKHVD_WARM_SECONDS="0"))
    assert results["uses"] == [EPOCHS] * ROWS
    sizes = [size for size, previous in zip(results["sizes"], [0, *results["sizes"]], strict=False) if size != previous]
    assert results["pairs"] == 1 + len(ends), "the fit grows again after each loss"
    # The steps of a generation whose rank is killed before its first commit do not count.
    assert sizes in [[1, 2] * (1 + count) for count in range(ends.count("decommissioned"), 1 + len(ends))]
    assert "ok    slots" in results["report"]
