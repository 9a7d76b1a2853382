"""Elastic jobs whose commits are in a Store, and which lose all of their ranks."""

from __future__ import annotations

import numpy as np
import pytest

import sparkhvd
from sparkhvd.errors import ConfigError, RankFailedError
from tests.launch import elastic_frameworks as frameworks
from tests.launch import elastic_training as training
from tests.launch.test_elastic import FAST, steps


def test_a_job_that_loses_all_ranks_resumes_from_the_last_published_commit(tmp_path):
    events = {(3, 0, 2): "kill", (3, 1, 2): "kill", (6, 0, 2): "raise", (6, 1, 2): "raise"}
    results = sparkhvd.run_elastic(
        training.train,
        (9, str(tmp_path), events),
        num_proc=2,
        store=str(tmp_path / "store"),
        commit_interval=0,
        **FAST,
    )
    assert [result[:4] for result in results] == [(9, 45.0, 0, 2), (9, 45.0, 1, 2)]
    assert sorted(one[:2] for one in steps(tmp_path)) == [(step, rank) for step in range(1, 10) for rank in range(2)]
    assert len({one[4] for one in steps(tmp_path)}) == 6, "three groups of two processes"
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()], "deleted after the job"


def test_the_steps_since_the_last_published_commit_are_lost(tmp_path):
    store = str(tmp_path / "store")
    results = sparkhvd.run_elastic(
        training.train_beyond_a_published_commit, (str(tmp_path), store), num_proc=1, store=store, **FAST
    )
    assert results == [(8, 36.0)]
    assert [one[0] for one in steps(tmp_path)] == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7, 8], "only commit 1 was published"


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    "framework", ["plain", "torch", *(pytest.param(name, marks=pytest.mark.soak) for name in ("tensorflow", "keras"))]
)
def test_the_state_that_new_ranks_resume_from_is_exactly_the_published_one(tmp_path, framework):
    preload = {"torch": ("torch",), "tensorflow": ("keras",), "keras": ("keras",)}.get(framework, ())
    results = sparkhvd.run_elastic(
        frameworks.lose_all_ranks,
        (framework, str(tmp_path)),
        num_proc=1,
        store=str(tmp_path / "store"),
        commit_interval=0,
        preload=preload,
        env={"OPENBLAS_NUM_THREADS": "1"},  # a warm process cannot fork while threads of BLAS run
        **FAST,
    )
    with np.load(tmp_path / "rank-0.npz") as saved:
        expected = [saved[name] for name in saved.files]
    assert len(expected) > 1
    for step, numbers in results:
        assert step == 3
        assert len(numbers) == len(expected)
        for number, value in zip(numbers, expected, strict=True):
            np.testing.assert_array_equal(number, value)


def test_a_failed_write_is_reported_and_loses_steps_only_if_all_ranks_are_lost(tmp_path, capfd):
    (tmp_path / "store").mkdir()
    obstacle = tmp_path / "store" / "elastic"
    obstacle.write_text("a file where the folder should be")
    results = sparkhvd.run_elastic(
        training.train_with_a_blocked_store,
        (str(tmp_path), str(obstacle)),
        num_proc=1,
        store=str(tmp_path / "store"),
        commit_interval=0,
        **FAST | {"verbose": 1},
    )
    assert results == [(4, 10.0)]
    assert [one[0] for one in steps(tmp_path)] == [1, 2, 1, 2, 3, 4], "the job started again from the beginning"
    shown = capfd.readouterr().out
    assert "Commit 2 could not be published, so a loss of all ranks would cost the steps since the last" in shown
    assert "No commit of this job has been published, so its training begins anew." in shown


def test_a_missing_published_commit_ends_the_job_instead_of_restarting_the_training(tmp_path):
    with pytest.raises(RankFailedError, match=r"commit-00000001-0000000001, the last commit of this job, is missing"):
        sparkhvd.run_elastic(
            training.train_without_its_store,
            (str(tmp_path), str(tmp_path / "store" / "elastic")),
            num_proc=1,
            store=str(tmp_path / "store"),
            commit_interval=0,
            **FAST | {"cooldown_range": (0.1, 0.1)},
        )
    assert [one[0] for one in steps(tmp_path)] == [1]


@pytest.mark.parametrize("interval", [-1, float("nan"), float("inf"), "60"])
def test_a_commit_interval_that_is_not_a_number_of_seconds_is_refused(tmp_path, interval):
    with pytest.raises(ConfigError, match="commit_interval must be a number of seconds, at least 0, got"):
        sparkhvd.run_elastic(print, num_proc=1, store=str(tmp_path), commit_interval=interval, **FAST)
