from __future__ import annotations

import inspect

import pytest
import torch

import sparkhvd
from sparkhvd import SparkBackend, Store, TorchEstimator
from sparkhvd.errors import ConfigError
from sparkhvd.estimators.params.backend import ELASTIC_ARGUMENTS, run_ranks
from sparkhvd.estimators.params.params import EstimatorParams


def test_the_arguments_of_elastic_backends_are_those_of_run_elastic():
    assert set(ELASTIC_ARGUMENTS) <= set(inspect.signature(sparkhvd.run_elastic).parameters)
    assert not set(ELASTIC_ARGUMENTS) & set(inspect.signature(sparkhvd.run).parameters)


def test_a_backend_is_elastic_if_its_number_of_ranks_has_a_limit():
    assert not SparkBackend(2, launcher="local").is_elastic
    assert SparkBackend(2, min_num_proc=1).is_elastic
    assert SparkBackend(2, max_num_proc=4).without_env().is_elastic
    assert [SparkBackend(**sizes).largest for sizes in ({}, {"num_proc": 2}, {"min_num_proc": 3})] == [None, 2, 3]
    assert SparkBackend(2, max_num_proc=4).largest == 4


def test_an_elastic_backend_accepts_the_launchers_of_run_elastic():
    for launcher, name in {"auto": "barrier", "spark": "barrier", "local": "local", "ray": "ray"}.items():
        backend = SparkBackend(2, min_num_proc=1, launcher=launcher)
        backend.check_elastic()
        assert backend.launch()[0] == name


def test_the_ranks_of_an_elastic_backend_are_not_limited_by_the_current_slots():
    assert SparkBackend(50, min_num_proc=40).reserve() == 50
    assert SparkBackend(min_num_proc=40, max_num_proc=60).num_processes() == 40


def test_an_elastic_backend_on_ray_starts_no_more_ranks_than_its_rows_are_divided_for(monkeypatch):
    backend = SparkBackend(3, min_num_proc=1, launcher="ray", gpus_per_task=1)
    backend.check_elastic()
    completed = backend.completed(spark=object(), rows=None, preload=(), num_proc=None)
    calls = []
    monkeypatch.setattr("sparkhvd.estimators.params.backend.run_elastic", lambda *_, **options: calls.append(options))
    completed.run(print)
    assert (calls[0]["max_num_proc"], calls[0]["gpus_per_task"], calls[0]["launcher"]) == (3, 1, "ray")
    assert "spark" not in calls[0], "Ray needs no session"


@pytest.mark.parametrize("argument", ["rows", "use_mpi"])
def test_an_elastic_backend_refuses_arguments_that_run_elastic_lacks(argument):
    with pytest.raises(TypeError, match=argument):
        SparkBackend(2, min_num_proc=1, **{argument: None})


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (SparkBackend(2, reset_limit=1), "reset_limit is for elastic training"),
        (SparkBackend(2, max_num_proc=1), "must not decrease in this order"),
        (SparkBackend(2, min_num_proc=1, launcher="barrier"), "The launcher 'barrier' cannot start elastic ranks"),
        (SparkBackend(2, min_num_proc=1, gpus_per_task=1), "gpus_per_task and cpus_per_task .* require launcher='ray'"),
        (SparkBackend(2, min_num_proc=1, max_restarts=-1), "max_restarts must be an integer of at least 0"),
    ],
)
def test_contradictory_arguments_of_elastic_backends_are_refused(backend, message):
    with pytest.raises(ConfigError, match=message):
        backend.check_elastic()


def test_a_backend_of_the_users_own_may_unpack_its_keyword_arguments():
    class Own:
        def num_processes(self):
            return 1

        def run(self, fn, args=(), kwargs=None, env=None):
            return [(fn(*args, **kwargs), dict(env))]

    results = run_ranks(
        EstimatorParams(backend=Own())._plan(),
        int,
        ("3",),
        spark=None,
        env={"A": "1"},
        default_env={"A": "2", "B": "3"},
        preload=(),
        rows=None,
    )
    assert results == [(3, {"A": "1", "B": "3"})]


def test_the_preflight_learns_the_limits_of_elastic_ranks(tmp_path):
    def limits(backend: SparkBackend) -> tuple[int | None, int | None]:
        model = torch.nn.Linear(1, 1)
        training = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.functional.mse_loss}
        columns = {"feature_cols": ["x"], "label_cols": ["y"], "store": Store.create(str(tmp_path))}
        tasks = TorchEstimator(model=model, backend=backend, **training, **columns).requested_tasks()
        return tasks.min_num_proc, tasks.max_num_proc

    assert limits(SparkBackend(2)) == (None, None)
    assert limits(SparkBackend(2, min_num_proc=1)) == (1, 2)
    assert limits(SparkBackend(2, max_num_proc=4)) == (2, 4)
    assert limits(SparkBackend(min_num_proc=3)) == (3, 3)
