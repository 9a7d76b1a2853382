"""Runs that are interrupted and resumed, and other ways to start the ranks of a fit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from pyspark.sql import functions
from torch.nn import functional

from sparkhvd import Checkpoints, EarlyStopping, SparkBackend, Store, TorchEstimator
from sparkhvd.data import AsyncDataLoaderMixin, BaseDataLoader, DataModule
from sparkhvd.errors import DataError, ParamError, RankFailedError, StoreError
from sparkhvd.estimators.api import estimator as estimator_api
from sparkhvd.estimators.runs import run_lease
from sparkhvd.estimators.runs.run_lease import Fence
from sparkhvd.estimators.torch import LRSchedule, TorchCallback
from sparkhvd.estimators.training import checkpoint, job_files
from sparkhvd.store import LocalStore, layout
from tests.spark import trainings

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store.create(str(tmp_path_factory.mktemp("a store")))


@pytest.fixture(scope="module")
def df(spark):
    """Return 200 rows of two numbers, a word, and a label that depends on the numbers."""
    return spark.range(200).selectExpr(
        "id / 200.0D AS a", "id % 7 / 7.0D AS b", "IF(id % 2 = 0, 'up', 'down') AS word", "a * 2 - b AS y"
    )


def network(inputs=2):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(inputs, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))


def schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)


def estimator(store, **more):
    model = network(len(more.get("feature_cols", "ab")))
    params = {
        "num_proc": 2,
        "store": store,
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.03),
        "lr_scheduler": LRSchedule(schedule, every="step"),
        "loss": functional.mse_loss,
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 10,
        "epochs": 3,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**{**params, **more})


def parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class KillOnce(TorchCallback):
    """Kills rank 1 once, after a step of an epoch."""

    def __init__(self, marker, epoch, step):
        self.marker, self.epoch, self.step = marker, epoch, step

    def on_step_end(self, run, epoch, step, loss):
        if run.rank == 1 and (epoch, step) == (self.epoch, self.step) and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(store, df):
    return estimator(store).fit(df)


@pytest.fixture(scope="module")
def interrupted(store, df, tmp_path_factory):
    """Interrupt a run at a random step of its second epoch, copy it in the Store, and return its estimator."""
    step = int(np.random.default_rng().integers(3, 10))
    kill = KillOnce(str(tmp_path_factory.mktemp("killed") / "once"), 1, step)
    broken = estimator(store, run_id="broken", checkpoints=Checkpoints(every_steps=2), callbacks=[kill])
    with pytest.raises(RankFailedError, match=r"Rank 1 on host .* was killed"):
        broken.fit(df)
    kept = checkpoint.load(store, checkpoint.latest(store, "broken"))
    assert (kept.epoch, kept.within.step) == (1, (step - 1) // 2 * 2), f"rank 1 was killed after step {step}"
    runs = Path(store.arrow(layout.run_folder("broken"))[1])
    shutil.copytree(runs, runs.with_name("copy"))
    return broken


def test_a_run_that_lost_a_rank_ends_like_an_uninterrupted_one(interrupted, undisturbed, df):
    """Resume a run with dropout and a schedule by step: random numbers and learning rates must continue, too."""
    with pytest.raises(ParamError, match="interrupted within epoch 2, where its loss or its metrics differed"):
        interrupted.copy({interrupted.metrics: {"mae": torch.nn.functional.l1_loss}}).fit(df)
    with pytest.raises(ParamError, match="interrupted within epoch 2, whose rows were shuffled with random_seed=3"):
        interrupted.copy({interrupted.random_seed: 4}).fit(df)
    with pytest.raises(ParamError, match=r"interrupted in epoch 2 after step \d+, more than train_steps_per_epoch=1"):
        interrupted.copy({interrupted.train_steps_per_epoch: 1}).fit(df)
    fitted = interrupted.fit(df)
    assert torch.equal(parameters(fitted.getModel()), parameters(undisturbed.getModel()))
    for mine, theirs in zip(fitted.getHistory(), undisturbed.getHistory(), strict=True):
        assert mine["train"]["loss"] == pytest.approx(theirs["train"]["loss"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*")  # within Lightning 2.6 with torch 2.13
@pytest.mark.soak
@pytest.mark.parametrize("framework", ["keras", "lightning"])
def test_a_run_of_other_frameworks_resumes_with_another_launcher(store, df, framework, tmp_path):
    undisturbed = trainings.estimator(framework, store, backend="local").fit(df)
    kill = trainings.Kill(str(tmp_path), 1, int(np.random.default_rng().integers(3, 10)))
    broken = trainings.estimator(framework, store, kill, run_id=f"broken {framework}")
    with pytest.raises(RankFailedError, match=r"Rank 1 on host .* was killed"):
        broken.fit(df)
    kept = checkpoint.load(store, checkpoint.latest(store, f"broken {framework}"))
    assert (kept.epoch, kept.within.step) == (1, (kill.step - 1) // 2 * 2), f"killed after step {kill.step}"
    fitted = broken.setBackend("mpi").fit(df)
    assert trainings.weights(framework, fitted) == trainings.weights(framework, undisturbed)
    for mine, theirs in zip(fitted.getHistory(), undisturbed.getHistory(), strict=True):
        assert mine["train"]["loss"] == pytest.approx(theirs["train"]["loss"], rel=1e-6)


def test_an_interrupted_epoch_is_finished_by_another_number_of_ranks(store, df, interrupted, undisturbed):
    """The interrupted epoch still uses every row once; three ranks train the later epochs."""
    fitted = estimator(store, num_proc=3, run_id="copy").fit(df)
    assert [entry["epoch"] for entry in fitted.getHistory()] == [0, 1, 2]
    losses = [entry["train"]["loss"] for entry in fitted.getHistory()]
    wanted = [entry["train"]["loss"] for entry in undisturbed.getHistory()]
    assert losses[0] == wanted[0]
    assert losses[1] == pytest.approx(wanted[1], rel=0.5)
    assert losses[2] < losses[0] / 2


def test_an_interrupted_epoch_refuses_other_rows(store, df, interrupted):
    kept = checkpoint.load(store, checkpoint.latest(store, "copy"))
    within = checkpoint.EpochPosition(4, 2, 10, "another division")
    checkpoint.save(Fence(store, "elsewhere", 0), checkpoint.Checkpoint(1, 3, kept.history[:1], kept.state, within))
    with pytest.raises(
        RankFailedError, match="interrupted in epoch 2 after step 4, and its rows were divided into batches"
    ):
        estimator(store, run_id="elsewhere").fit(df)


def with_words(columns):
    """Return the columns with the text column as a number."""
    up = (columns["word"] == "up").astype("float32")
    return {**columns, "word": up, "y": columns["y"] + up}


@pytest.mark.parametrize("backend", ["local", "mpi"])
def test_a_fit_runs_on_the_drivers_machine_and_under_open_mpi(store, df, backend):
    """Fit through the Store, with a transformation of the rows, early stopping and the best model."""
    fitted = estimator(
        store,
        backend=backend,
        backend_env={"SPARKHVD_TEST_WORD": "here"},
        callbacks=[Environment()],
        mp_start_method="spawn",
        transformation_fn=with_words,
        feature_cols=["a", "b", "word"],
        validation=0.2,
        epochs=4,
        early_stopping=EarlyStopping("val_loss", patience=1, min_delta=1e9),
        checkpoints=Checkpoints(best="val_loss"),
        gradient_compression="bf16",
        compress_sparse_cols=True,
    ).fit(df)
    history = fitted.getHistory()
    assert len(history) == 2, "no epoch can be so much better than the first"
    best = min(range(2), key=lambda epoch: history[epoch]["validation"]["loss"])
    model, optimizer = fitted.getModelAndOptimizer()
    assert int(optimizer.state[model[0].weight]["step"]) == (best + 1) * -(-_train_rows(fitted, df) // 20)


def _train_rows(fitted, df):
    return fitted.trained.rows if hasattr(fitted.trained, "rows") else 160


class Environment(TorchCallback):
    def on_train_begin(self, run):
        import multiprocessing  # noqa: PLC0415

        assert os.environ["SPARKHVD_TEST_WORD"] == "here"
        assert multiprocessing.get_start_method() == "spawn"


def test_a_transformation_works_without_a_store_and_for_a_list_of_parameter_maps(df):
    one = estimator(None, num_proc=1, transformation_fn=with_words, feature_cols=["a", "word"], epochs=1)
    backend = SparkBackend(1, launcher="barrier", verbose=0)
    first, second = one.fit(df, [{one.batch_size: 50}, {one.batch_size: 100, one.epochs: 2}])
    assert [len(first.getHistory()), len(second.getHistory())] == [1, 2]
    assert first.getModel()[0].in_features == 2
    assert backend.num_processes() == 1
    with pytest.raises(DataError, match=r"transformation_fn returned the columns \['a'\] without 'word'"):
        estimator(
            None, num_proc=1, transformation_fn=lambda columns: {"a": columns["a"]}, feature_cols=["a", "word"]
        ).fit(df)


OTHER_RUNS = (
    {"batch_size": 20},
    {"loss": functional.l1_loss},
    {"compress_sparse_cols": True},
    {"random_seed": 4},
    {"early_stopping": EarlyStopping("loss")},
    {"checkpoints": Checkpoints(best="loss")},
    {"transformation_fn": lambda columns: columns},
    {"backend_env": {"A": "b"}},
)


def halved(module):
    for parameter in module.parameters(recurse=False):
        parameter.data *= 0.5


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def twins():
    """Return two layers of the same shape, of which an optimizer may train one."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def test_a_fit_finds_its_own_run_by_content(store, spark):
    df = spark.range(60).selectExpr("id / 60.0D AS a", "id % 7 / 7.0D AS b", "a - b AS y")
    params = {"num_proc": 1, "resume": "auto"}
    first = estimator(store, **params, epochs=1).fit(df)
    again = estimator(store, num_proc=1, epochs=2).fit(df, resume="auto")
    assert again.getRunId() == first.getRunId()
    assert again.getHistory()[0] == first.getHistory()[0]
    assert len(again.getHistory()) == 2
    with mock.patch.object(estimator_api, "run_ranks", side_effect=AssertionError("no ranks are needed")):
        at_once = estimator(store, num_proc=1, resume="auto", epochs=2).fit(df)
        assert at_once.getHistory() == again.getHistory()
        assert torch.equal(parameters(at_once.getModel()), parameters(again.getModel()))
        with pytest.raises(AssertionError, match="no ranks are needed"):
            estimator(store, num_proc=1, resume="auto", epochs=3).fit(df)
    with pytest.raises(ParamError, match=r"which was trained for 2 epochs, more than epochs=1\. Set epochs=2 to get"):
        estimator(store, **params, epochs=1).fit(df)
    one = estimator(store, **params)
    of_each_map = [{one.batch_size: 20, one.epochs: 1}, {one.batch_size: 30, one.epochs: 1}]
    models = one.fit(df, of_each_map, resume="auto")
    with mock.patch.object(estimator_api, "run_ranks", side_effect=AssertionError("no ranks are needed")):
        found = one.fit(df, of_each_map, resume="auto")
    assert [model.getRunId() for model in found] == [model.getRunId() for model in models]
    assert len({first.getRunId(), *(model.getRunId() for model in models)}) == 3
    maps = [{}, {one.epochs: 1}, {one.epochs: 2}, {one.num_proc: 2}, {one.callbacks: [KillOnce("marker", 1, 1)]}]
    others = [
        *(one.copy(each) for each in maps),
        *(estimator(store, **{**params, **other}) for other in OTHER_RUNS),
        estimator(store, **params, model=(model := network().apply(halved)), optimizer=sgd(model)),
        estimator(store, **params, model=(model := network()), optimizer=sgd(model)),
        *(estimator(store, **params, model=(model := twins()), optimizer=sgd(model[trained])) for trained in (0, 1)),
    ]
    ids = {other._run_id_by_content(df) for other in others}
    assert len(ids) == len(others)
    assert first.getRunId() in ids
    assert estimator(store, **params, verbose=1, epochs=7, output_cols=["z"])._run_id_by_content(df) == first.getRunId()
    model, optimizer = first.getModelAndOptimizer()
    assert estimator(store, **params, model=model, optimizer=optimizer)._run_id_by_content(df) not in ids, (
        "the run is trained further"
    )
    with pytest.raises(ParamError, match=r"resume='yes' must be one of 'auto'\."):
        estimator(store, num_proc=1).fit(df, resume="yes")
    assert estimator(store, **params)._run_id_by_content(df.where("a < 0.5")) not in ids
    with pytest.raises(ParamError, match="identifies a run by its rows, but their content cannot be determined"):
        estimator(store, **params).fit(df.withColumn("a", functions.udf(lambda a: a, "double")("a")))


class OwnLoader(AsyncDataLoaderMixin, BaseDataLoader):
    """Returns one batch per file, and assigns the files to the ranks round-robin."""

    def __init__(self, context, files):
        super().__init__(async_loader_queue_size=2)
        self.context, self.files = context, files[context.rank :: context.size]

    def __len__(self):
        return len(self.files)

    def _iterate(self):
        import pyarrow.parquet  # noqa: PLC0415

        for path in self.files:
            with self.context.store.open(path, "rb") as file:
                table = pyarrow.parquet.read_table(file, columns=self.context.schema.names())
            yield {name: table[name].to_numpy() for name in table.column_names}


class OwnModule(DataModule):
    def train_data(self):
        return OwnLoader(self.context, self.context.train_files)

    def val_data(self):
        return OwnLoader(self.context, self.context.val_files)


class OneMore(OwnLoader):
    def __len__(self):
        return super().__len__() + 1


class LacksBatch(OwnModule):
    def train_data(self):
        return OneMore(self.context, self.context.train_files)


class NoRows(OwnModule):
    def train_data(self):
        raise OSError("there are no rows today")


def test_a_user_defined_loader_provides_the_batches(store, df):
    """Three files for two ranks make two steps; one rank has no rows in the last step."""
    own = estimator(store, backend="local", data_module=OwnModule, validation=0.2, epochs=2)
    fitted = own.fit(df.repartition(3))
    model, optimizer = fitted.getModelAndOptimizer()
    steps = int(optimizer.state[model[0].weight]["step"])
    assert steps == 4
    history = fitted.getHistory()
    assert len(history) == 2
    held_out = history[-1]["validation"]["loss"]
    assert 0 < held_out < history[0]["validation"]["loss"]


class Exits(TorchCallback):
    def on_step_end(self, run, epoch, step, loss):
        sys.exit()


def test_a_callback_that_calls_exit_fails_the_fit_and_a_file_that_cannot_be_deleted_does_not(
    store, df, monkeypatch, caplog
):
    monkeypatch.setattr(job_files, "INLINE_BYTES", 0)  # so that the model is sent through the Store
    delete = LocalStore.delete

    def fail(self, path):
        if "/payload-" in path:
            raise StoreError("the Store does not answer")
        delete(self, path)

    monkeypatch.setattr(LocalStore, "delete", fail)
    with pytest.raises(
        RankFailedError, match=r"Rank 0 .* raised ParamError: User code called sys\.exit\(\) during the"
    ):
        estimator(store, num_proc=1, backend="local", callbacks=[Exits()], epochs=1).fit(df)
    assert re.search(r"could not delete .*/payload-\w+, .*: the Store does not answer", caplog.text)


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["lightning", "keras"])
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*")  # within Lightning 2.6 with torch 2.13
def test_a_user_defined_loader_serves_the_other_frameworks_too(store, df, framework):
    own = trainings.estimator(framework, store, backend="local", data_module=OwnModule, checkpoints=None)
    first, second = own.fit(df.repartition(3)).getHistory()
    assert 0 < second["train"]["loss"] < first["train"]["loss"]
    with pytest.raises(RankFailedError, match="there are no rows today"):
        own.setDataModule(NoRows).fit(df)
    own.setDataModule(LacksBatch)
    if framework == "keras":  # which fixes the number of batches beforehand
        with pytest.raises(RankFailedError, match="have only 2 batches with rows in this epoch, although Keras expect"):
            own.fit(df.repartition(3))
    else:
        losses = [epoch["train"]["loss"] for epoch in own.fit(df.repartition(3)).getHistory()]
        assert losses == pytest.approx([first["train"]["loss"], second["train"]["loss"]])


def test_contradictory_parameters_are_refused(store, df):
    with pytest.raises(ParamError, match=r'At most one of the parameters "backend" and "num_proc"'):
        estimator(store, backend=SparkBackend(2)).fit(df)
    with pytest.raises(ParamError, match="backend='mpi' cannot send the rows of a DataFrame to the ranks"):
        estimator(None, backend="mpi").fit(df)
    with pytest.raises(ParamError, match="checkpoints monitors 'val_loss', but this fit has no valid"):
        estimator(store, checkpoints=Checkpoints(best="val_loss")).fit(df)
    with pytest.raises(ParamError, match="resumes within an epoch, which needs the same rows on every"):
        estimator(store, data="direct", checkpoints=Checkpoints(every_steps=3)).fit(df)
    with pytest.raises(ParamError, match="data_module loads prepared rows, but this fit sends rows straight from"):
        estimator(None, data_module=OwnModule).fit(df)
    with pytest.raises(ParamError, match="transformation_fn needs the native reader, but data_module replaces it"):
        estimator(store, data_module=OwnModule, transformation_fn=with_words).fit(df)
    with pytest.raises(ParamError, match="train_steps_per_epoch needs the native reader, but reader='petastorm'"):
        estimator(store, reader="petastorm", train_steps_per_epoch=3).fit(df)


class TakesTheRun(TorchCallback):
    """Takes over the run in the second epoch, like another fit that considers this fit dead."""

    def __init__(self, store, run_id):
        self.store, self.run_id = store, run_id

    def on_epoch_begin(self, run, epoch):
        if run.rank == 0 and epoch == 1:
            claims = self.store.list(layout.claims_folder(self.run_id))
            token = max(map(layout.token_of, claims))
            with self.store.open(layout.claim_path(self.run_id, token), "rb") as file:
                holder = json.loads(file.read())
            other = json.dumps({**holder, "name": "other", "host": "a host elsewhere"}).encode()
            self.store.publish(layout.claim_path(self.run_id, token + 1), other)


def test_a_fit_fails_if_its_run_is_taken_over_and_is_refused_if_the_run_is_held(store, df):
    lease = run_lease.acquire_lease(store, "held")
    with pytest.raises(ParamError, match=r"Run 'held' is being trained by another fit \(process \d+ on"):
        estimator(store, run_id="held").fit(df)
    lease.release()
    with pytest.raises(RankFailedError, match=r"Run 'held' in file:.* was taken over by another fit \(.*elsewhere"):
        estimator(store, num_proc=1, run_id="held", callbacks=[TakesTheRun(store, "held")]).fit(df)
    assert checkpoint.kept_epochs(store, "held") == {0}
