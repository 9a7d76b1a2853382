"""Searches of parameters, whose trials are fits."""

from __future__ import annotations

import _thread
import logging
import threading
from functools import partial

import mlflow
import optuna
import pytest
import torch
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator, TrainValidationSplit
from torch.nn import functional

from sparkhvd import SparkBackend, Store, TorchEstimator, tune
from sparkhvd.data.spark.job import cancel
from sparkhvd.errors import LaunchError, ParamError, SearchError
from sparkhvd.estimators.params import backend
from sparkhvd.store import layout
from sparkhvd.tune import trials

pytestmark = pytest.mark.spark
optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture
def store(tmp_path):
    return Store.create(str(tmp_path / "store"))


@pytest.fixture(scope="module")
def df(spark):
    return spark.range(120).selectExpr(
        "id / 120.0D AS a", "id % 7 / 7.0D AS b", "a * 2 - b AS y", "id % 4 = 0 AS held_out"
    )


def estimator(store, **more):
    params = {
        "num_proc": 1,
        "store": store,
        "loss": functional.mse_loss,
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "validation": "held_out",
        "batch_size": 10,
        "epochs": 3,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**params | more)


def space(trial):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=lr)}


def runs(store):
    return {path.split("/")[1] for path in store.list("runs")}


def test_a_search_returns_the_model_of_its_best_trial_and_leaves_only_its_run(df, store):
    searched = estimator(store, epoch_callback=lambda _, values: values["val_loss"])  # which does not end training
    result = tune.minimize(searched, df, space, 4, parallelism=2, sampler=optuna.samplers.RandomSampler(seed=0))
    ended = result.study.trials
    assert [trial.state.name for trial in ended] == ["COMPLETE"] * 4
    assert all(set(trial.intermediate_values) == {0, 1, 2} for trial in ended)
    best = min(ended, key=lambda trial: trial.value)
    assert best.params == result.best_params
    assert best.value == result.best_value == result.best_model.getHistory()[-1]["validation"]["loss"]
    assert runs(store) == {result.best_model.getRunId()}
    assert len({path.split("/")[1] for path in store.list(layout.DATASETS)}) == 1
    predicted = result.best_model.transform(df).where("held_out").toPandas()
    assert ((predicted["y__output"] - predicted["y"]) ** 2).mean() == pytest.approx(best.value, rel=1e-5)


class AfterEpoch(optuna.pruners.BasePruner):
    """Prunes the trials with these numbers after their first epoch."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def prune(self, study, trial):
        return trial.number in self.numbers


def test_a_pruned_trial_ends_after_the_epoch_and_an_exhausted_grid_ends_the_search(df, store):
    grid = optuna.samplers.GridSampler({"lr": [0.1, 0.01]})
    result = tune.minimize(estimator(store), df, space, 5, pruner=AfterEpoch(1), sampler=grid, keep_runs=True)
    first, second = result.study.trials
    assert (first.state.name, second.state.name) == ("COMPLETE", "PRUNED")
    assert list(second.intermediate_values) == [0]
    assert not [
        path for path in store.list(layout.run_folder(second.user_attrs["sparkhvd:run_id"])) if "epoch-00001" in path
    ]
    assert len(runs(store)) == 2


def test_halving_trains_the_best_trials_further_from_their_checkpoints(df, store):
    trained = []
    halving = tune.SuccessiveHalving(min_epochs=1, factor=2)
    searched = estimator(
        store, epochs=3, epoch_callback=lambda epoch, values: trained.append((epoch, values["val_loss"]))
    )
    result = tune.minimize(
        searched, df, space, 4, halving=halving, pruner=AfterEpoch(), sampler=optuna.samplers.RandomSampler(seed=0)
    )
    lengths = {trial.number: len(trial.intermediate_values) for trial in result.study.trials}
    states = [trial.state.name for trial in result.study.trials]
    assert sorted(lengths.values()) == [1, 1, 2, 3]
    assert states == ["COMPLETE" if lengths[number] == 3 else "PRUNED" for number in range(4)]
    best = result.study.best_trial
    alone = estimator(store, **space(optuna.trial.FixedTrial(best.params))).fit(df)
    losses = [epoch["validation"]["loss"] for epoch in alone.getHistory()]
    assert list(best.intermediate_values.values()) == pytest.approx(losses, rel=1e-6)
    assert best.value == pytest.approx(losses[-1], rel=1e-6)
    first = {trial.number: trial.intermediate_values[0] for trial in result.study.trials}
    assert min(first, key=first.get) in {number for number, length in lengths.items() if length > 1}
    assert runs(store) == {result.best_model.getRunId(), alone.getRunId()}


def test_a_trial_that_fails_keeps_its_reason_and_the_search_continues(df, store, caplog):
    def fragile(trial):
        return {**space(trial), "batch_size": [0, 10][trial.number]}

    result = tune.minimize(estimator(store), df, fragile, 2)
    assert [trial.state.name for trial in result.study.trials] == ["FAIL", "COMPLETE"]
    assert "trial 0 failed, and the search continues: ParamError: batch_size=0" in caplog.text
    assert result.best_params == result.study.trials[1].params
    with pytest.raises(SearchError, match=r"None of 1 trial completed\. Trial 0 failed: ParamError: batch_size=0"):
        tune.minimize(estimator(store), df, fragile, 1)


def test_an_interrupted_search_resumes_its_trials_and_keeps_their_best_model(df, store, tmp_path, monkeypatch, caplog):
    """Interrupt the second trial in its second epoch, and leave the third one like a killed driver."""
    caplog.set_level(logging.INFO, "sparkhvd")
    undisturbed = Store.create(str(tmp_path / "other"))
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))
    settings = {"sampler": optuna.samplers.RandomSampler(seed=0), "study_name": "search"}
    expected = tune.minimize(estimator(undisturbed), df, space, 3, **settings)
    calls, cancelled = [], threading.Event()
    monkeypatch.setattr(trials, "cancel", lambda *arguments: (cancelled.set(), cancel(*arguments)))

    def interrupt(epoch, values):
        calls.append(epoch)
        if len(calls) == 5:
            _thread.interrupt_main()
            assert cancelled.wait(60)

    settings["sampler"] = optuna.samplers.RandomSampler(seed=0)
    with pytest.raises(KeyboardInterrupt):
        tune.minimize(estimator(store, epoch_callback=interrupt), df, space, 3, storage=storage, **settings)
    study = optuna.load_study(study_name="search", storage=storage, sampler=settings["sampler"])
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL"]
    run_id = study.trials[1].user_attrs["sparkhvd:run_id"]
    assert [path for path in store.list(layout.checkpoints_folder(run_id)) if "epoch-0000" in path]
    killed = study.ask()
    space(killed)
    killed.set_user_attr("sparkhvd:run_id", "search-0002")

    result = tune.minimize(estimator(store, epoch_callback=lambda *_: None), df, space, 3, storage=storage, **settings)
    assert {trial.value for trial in result.study.trials if trial.value} == {
        trial.value for trial in expected.study.trials
    }
    assert result.best_value == expected.best_value
    assert f"trial 1 was interrupted; its run {run_id} is resumed" in caplog.text
    assert runs(store) == {result.best_model.getRunId()}


def test_a_search_removes_the_runs_that_a_killed_one_left_but_none_that_an_earlier_one_kept(df, store, monkeypatch):
    settings = {"storage": optuna.storages.InMemoryStorage(), "study_name": "search"}
    first = tune.minimize(estimator(store, epochs=1), df, space, 1, keep_runs=True, **settings)
    with monkeypatch.context() as killed:  # between the end of the trial and the removal of its run
        killed.setattr(trials.Trials, "_remove", lambda *_: None)
        tune.minimize(estimator(store, epochs=1), df, space, 2, pruner=AfterEpoch(1), **settings)
    assert len(runs(store)) == 2
    last = tune.minimize(estimator(store, epochs=1), df, space, 3, **settings)
    assert runs(store) == {first.best_model.getRunId(), last.best_model.getRunId()}


def test_a_study_that_is_being_searched_is_refused(df, store):
    storage = optuna.storages.InMemoryStorage()

    def searching(trial):
        with pytest.raises(ParamError, match="Study 'search' belongs to a search that is still running"):
            tune.minimize(estimator(store), df, space, 1, storage=storage, study_name="search")
        return space(trial)

    tune.minimize(estimator(store), df, searching, 1, storage=storage, study_name="search")


def test_another_study_of_the_same_name_trains_separate_runs(df, store):
    settings = {"study_name": "search", "keep_runs": True}
    first = tune.minimize(estimator(store), df, space, 1, sampler=optuna.samplers.RandomSampler(seed=0), **settings)
    second = tune.minimize(estimator(store), df, space, 1, sampler=optuna.samplers.RandomSampler(seed=1), **settings)
    assert first.best_value != second.best_value
    assert runs(store) == {first.best_model.getRunId(), second.best_model.getRunId()}


def test_a_continued_search_refuses_changes_that_make_trials_incomparable(df, store, tmp_path, caplog):
    """Also check that the search returns the unchanged model of the earlier best trial."""
    settings = {"storage": optuna.storages.InMemoryStorage(), "study_name": "search"}
    first = tune.minimize(estimator(store), df, space, 1, **settings)
    again = tune.minimize(estimator(store, epochs=5), df, space, 1, **settings)
    assert again.best_model.getRunId() == first.best_model.getRunId()
    assert again.best_value == again.best_model.getHistory()[-1]["validation"]["loss"]
    assert len(again.best_model.getHistory()) == 3

    other = {
        "have metrics": lambda: tune.minimize(estimator(store), df, space, 2, metric="loss", **settings),
        "have random_seed": lambda: tune.minimize(estimator(store, random_seed=4), df, space, 2, **settings),
        "have rows": lambda: tune.minimize(estimator(store), df.limit(60), space, 2, **settings),
        "have label ranges": lambda: tune.minimize(
            estimator(store), df.withColumn("y", df.y * 2), space, 2, **settings
        ),
        "have validation": lambda: tune.minimize(estimator(store, validation=0.5), df, space, 2, **settings),
        "is not in file:.*other": lambda: tune.minimize(
            estimator(Store.create(str(tmp_path / "other"))), df, space, 2, **settings
        ),
        "does not fit the best trial so far": lambda: tune.minimize(
            estimator(store), df, lambda trial: {"batch_size": trial.suggest_int("size", 1, 5)}, 2, **settings
        ),
    }
    for complaint, search in other.items():
        with pytest.raises(ParamError, match=complaint):
            search()
    assert runs(store) == {first.best_model.getRunId()}
    assert "The rows of study 'search'" not in caplog.text
    tune.minimize(estimator(store), df.withColumn("a", df.a * 2), space, 1, **settings)
    assert "The rows of study 'search', or settings of Spark" in caplog.text


def test_an_interrupted_trial_keeps_the_parameters_that_the_space_did_not_ask_for_yet(df, store):
    storage = optuna.storages.InMemoryStorage()
    study = optuna.create_study(storage=storage, study_name="search")
    study.enqueue_trial({"lr": 0.0123})
    study.ask().set_user_attr("sparkhvd:run_id", "search-0")
    result = tune.minimize(estimator(store), df, space, 1, storage=storage, study_name="search")
    assert result.best_params == {"lr": 0.0123}


def test_a_resumed_grid_trains_its_interrupted_trials_too(df, store):
    """One of them ended before the space asked for its parameter."""
    storage = optuna.storages.InMemoryStorage()
    settings = {"storage": storage, "study_name": "search", "sampler": optuna.samplers.GridSampler({"lr": [0.1, 0.01]})}
    study = optuna.create_study(**settings)
    killed = [study.ask(), study.ask()]
    for trial in killed:
        trial.set_user_attr("sparkhvd:run_id", f"search-{trial.number}")
    space(killed[0])
    result = tune.minimize(estimator(store, epochs=1), df, space, 4, **settings)
    completed = [trial.params["lr"] for trial in result.study.trials if trial.state.name == "COMPLETE"]
    assert sorted(completed) == [0.01, 0.1]


def test_trials_of_other_programs_are_kept_and_not_ranked(df, store):
    storage = optuna.storages.InMemoryStorage()
    optuna.create_study(storage=storage, study_name="search").optimize(lambda _: -99.0, n_trials=1)
    result = tune.minimize(estimator(store), df, space, 2, storage=storage, study_name="search")
    assert result.best_trial.number == 1
    assert runs(store) == {result.best_model.getRunId()}


def test_another_trial_is_promoted_if_the_best_one_fails(df, store):
    def fragile(epoch, values):
        if epoch == 1 and not failed:
            failed.append(values)
            raise ValueError("once")

    failed = []
    searched = estimator(store, epochs=2, epoch_callback=fragile)
    result = tune.minimize(searched, df, space, 2, halving=tune.SuccessiveHalving(min_epochs=1, factor=2))
    assert failed
    assert sorted(trial.state.name for trial in result.study.trials) == ["COMPLETE", "FAIL"]


def search_with_optuna(searched, df):
    with pytest.raises(SearchError, match="Trial 0 failed: LaunchError: recorded"):
        tune.minimize(searched, df, space, 1)


def search_with_spark(kind, searched, df):
    grid = [{searched.epochs: 1}]
    evaluator = RegressionEvaluator(labelCol="y", predictionCol="y__output")
    search = kind(estimator=Pipeline(stages=[searched]), estimatorParamMaps=grid, evaluator=evaluator)
    with pytest.raises(LaunchError, match="recorded"):
        search.fit(df)


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")  # pyspark's
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "search_in",
    [search_with_optuna, partial(search_with_spark, CrossValidator), partial(search_with_spark, TrainValidationSplit)],
    ids=["optuna", "folds", "split"],
)
def test_ranks_of_a_search_fork_from_a_warm_process_unless_the_user_decides(df, store, monkeypatch, search_in):
    def record(*_, env, **__):
        recorded.append(env.get("SPARKHVD_WARM_SECONDS"))
        raise LaunchError("recorded")

    def search(**variables):
        search_in(estimator_with(variables), df)

    def estimator_with(variables):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"num_proc": None, "backend": SparkBackend(1, env=variables), "model": model, "optimizer": optimizer}
        return estimator(store, **options)

    recorded = []
    monkeypatch.setattr(backend, "run", record)
    monkeypatch.delenv("SPARKHVD_WARM_SECONDS")
    search()
    search(SPARKHVD_WARM_SECONDS="5")
    monkeypatch.setenv("SPARKHVD_WARM_SECONDS", "7")
    search()
    assert recorded == ["60.0", "5", None]
    monkeypatch.delenv("SPARKHVD_WARM_SECONDS")
    with pytest.raises(LaunchError, match="recorded"):
        estimator_with({}).fit(df)
    assert recorded[3:] == [None], "only searches start warm by default"


def test_several_metrics_return_a_pareto_front_of_models(df, store):
    result = tune.minimize(estimator(store, metrics=[mean_error]), df, space, 3, metric=["val_loss", "val_mean_error"])
    front = {number: trial.values for number, trial in result.best_trials.items()}
    assert front.keys() == result.models.keys()
    for number, model in result.models.items():
        last = model.getHistory().to_pandas().iloc[-1]
        assert front[number] == [last["val_loss"], last["val_mean_error"]]


def mean_error(output, label):
    return (output - label).abs().mean()


def test_a_metric_that_no_epoch_reports_ends_the_search(df, store):
    with pytest.raises(
        ParamError, match=r"The search optimizes 'val_los', but an epoch reports .* Did you mean 'val_loss'"
    ):
        tune.minimize(estimator(store), df, space, 5, metric="val_los")


@pytest.mark.parametrize(
    ("more", "arguments", "complaint"),
    [
        ({"store": None}, {}, "A search keeps the prepared rows and its trials in a Store"),
        ({"run_id": "mine"}, {}, "Leave the estimator's run_id out"),
        ({"validation": None}, {}, "there are no validation rows"),
        ({}, {"n_trials": 0}, "n_trials=0 must be a whole number of at least 1"),
        ({}, {"parallelism": 1.5}, "parallelism=1.5 must be"),
        ({}, {"timeout": -1}, "timeout=-1 must be positive"),
        ({}, {"metric": ()}, "metric must be the name of a metric"),
        ({}, {"metric": None}, "metric must be the name of a metric"),
        ({}, {"metric": ["loss", "loss"]}, "several different names"),
        ({}, {"halving": 3}, "halving=3 must be a SuccessiveHalving"),
        ({}, {"pruner": optuna.pruners.MedianPruner}, "must be objects, not classes"),
        ({}, {"space": lambda _: None}, "space returned None; it must return parameters"),
        ({}, {"space": lambda _: {"batchsize": 3}}, "space returned an unknown parameter: .*batch_size"),
        ({}, {"study_name": ""}, "Use 1 to 180 characters"),
        ({}, {"space": {}}, "must be a function"),
        ({}, {"storage": "sqlite://"}, "needs study_name"),
        ({}, {"storage": "nothing://", "study_name": "a"}, "Optuna cannot open storage='nothing://'"),
        ({}, {"study_name": "a/b"}, "study_name='a/b' is part of the names of folders"),
        ({}, {"study_name": "a" * 200}, "Use 1 to 180 characters"),
    ],
)
def test_a_search_with_invalid_parameters_is_refused(df, store, more, arguments, complaint):
    given = {"space": space, "n_trials": 1, **arguments}
    with pytest.raises(ParamError, match=complaint):
        tune.minimize(estimator(more.pop("store", store), **more), df, **given)


def test_every_trial_is_a_nested_run_of_mlflow(df, store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    with mlflow.start_run() as parent:
        result = tune.minimize(estimator(store), df, space, 2)
    found = mlflow.search_runs(filter_string=f"tags.mlflow.parentRunId = '{parent.info.run_id}'", output_format="list")
    named = {run.data.tags["mlflow.runName"]: float(run.data.params["trial.lr"]) for run in found}
    assert named == {f"trial {trial.number}": trial.params["lr"] for trial in result.study.trials}


def test_a_promoted_trial_continues_its_run_of_mlflow(df, store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    halving = tune.SuccessiveHalving(min_epochs=1, factor=2)
    with mlflow.start_run() as parent:
        result = tune.minimize(estimator(store, epochs=2), df, space, 2, halving=halving)
    found = mlflow.search_runs(filter_string=f"tags.mlflow.parentRunId = '{parent.info.run_id}'", output_format="list")
    assert sorted(run.data.tags["mlflow.runName"] for run in found) == ["trial 0", "trial 1"]
    assert {run.data.params["epochs"] for run in found} == {"2"}
    client = mlflow.MlflowClient()
    steps = {
        run.data.tags["mlflow.runName"]: [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
        for run in found
    }
    best = result.best_trial.number
    assert steps == {f"trial {best}": [0, 1], f"trial {1 - best}": [0]}


def test_the_callback_of_an_objective_reports_and_prunes(df, store):
    def objective(trial):
        reports = tune.TrialReports(trial, "val_loss")
        model = estimator(store, **space(trial), epoch_callback=reports).fit(df)
        assert len(model.getHistory()) == (1 if trial.number == 1 else 3)
        return reports.value()

    study = optuna.create_study(pruner=AfterEpoch(1))
    study.optimize(objective, n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
