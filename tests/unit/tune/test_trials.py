from __future__ import annotations

import _thread
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


def test_an_interrupted_search_interrupts_fits_whatever_their_launcher(monkeypatch):
    monkeypatch.setattr(trials, "inheriting", lambda _, act: act)
    monkeypatch.setattr(trials, "add_tag", lambda *_: None)
    monkeypatch.setattr(trials, "cancel", lambda _spark, _tag, ended: is_done_within(ended, 30.0))
    study, template = optuna.create_study(), Estimator()
    search = trials.Trials(
        template, None, None, lambda _: {}, study, ["loss"], None, "run", halving=None, keep_runs=False
    )
    with pytest.raises(KeyboardInterrupt):
        search.run(trials.Limits(2, 1, None))
    assert template.ended.is_set()
    (trial,) = study.trials
    assert (trial.state.name, "sparkhvd:error" in trial.user_attrs) == ("FAIL", False), "the next search resumes it"
