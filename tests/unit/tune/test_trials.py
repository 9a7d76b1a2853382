from __future__ import annotations

import _thread
import sys
import threading

import optuna
import pytest

from sparkhvd._util.background import is_done_within, is_set_within
from sparkhvd.tune import trials


class Estimator:
    """An estimator whose fit interrupts the search and ends only if it is interrupted itself."""

    epochs = "epochs"

    def __init__(self):
        self.ended = threading.Event()

    def getOrDefault(self, name):  # noqa: N802 - Spark's name
        return 3 if name == "epochs" else None

    def copy(self):
        return self

    def as_trial(self, name, params):
        return self

    def setParams(self, **params):  # noqa: N802 - Spark's name
        pass

    def fit_on_parquet(self, dataset_idx):
        try:
            _thread.interrupt_main()
            is_set_within(threading.Event(), 60.0)
        finally:
            self.ended.set()


def search_in(study, template=None):
    return trials.Trials(
        template or Estimator(), None, None, lambda _: {}, study, ["loss"], None, "run", halving=None, keep_runs=False
    )


def test_an_interrupted_search_interrupts_fits_whatever_their_launcher(monkeypatch):
    monkeypatch.setattr(trials, "inheriting", lambda _, act: act)
    monkeypatch.setattr(trials, "add_tag", lambda *_: None)
    monkeypatch.setattr(trials, "cancel", lambda _spark, _tag, ended: is_done_within(ended, 30.0))
    study, template = optuna.create_study(), Estimator()
    search = search_in(study, template)
    with pytest.raises(KeyboardInterrupt):
        search.run(trials.SearchLimits(2, 1, None))
    assert template.ended.is_set()
    (trial,) = study.trials
    assert (trial.state.name, "sparkhvd:error" in trial.user_attrs) == ("FAIL", False), "the next search resumes it"


def test_a_search_that_is_killed_before_its_trial_has_a_run_starts_the_trial_again(monkeypatch):
    study = optuna.create_study()
    study.ask()  # a trial of another program
    study.enqueue_trial({"lr": 0.1})
    killed, following = (search_in(study) for _ in range(2))
    with monkeypatch.context() as killing:
        killing.setattr(optuna.Trial, "set_user_attr", lambda *_, **__: sys.exit())
        with pytest.raises(SystemExit):
            killed._new()
    following.resume_interrupted()
    assert [trial.state.name for trial in study.trials] == ["RUNNING", "FAIL", "WAITING"]
    resumed = following._new()
    assert (resumed.run_id, resumed.trial.suggest_float("lr", 0.0, 1.0)) == ("run-0002", 0.1)


def test_an_error_of_optunas_storage_ends_the_search_at_once(monkeypatch):
    waited = []
    monkeypatch.setattr(trials, "inheriting", lambda _, act: act)
    monkeypatch.setattr(trials, "add_tag", lambda *_: None)
    monkeypatch.setattr(trials, "cancel", lambda _spark, _tag, ended: waited.append(is_done_within(ended, 10.0)))
    study = optuna.create_study()

    def fail():
        raise OSError("database or disk is full")

    monkeypatch.setattr(study, "ask", fail)
    search = search_in(study)
    with pytest.raises(OSError, match="disk is full"):
        search.run(trials.SearchLimits(2, 2, None))
    assert waited == [True], "no trial is in progress"
