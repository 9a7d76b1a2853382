"""Which parameters make a run another one."""

from __future__ import annotations

import logging

import pytest

from sparkhvd import Checkpoints, KerasEstimator, LightningEstimator, SparkBackend, Store, TorchEstimator
from sparkhvd.estimators.runs import run_identity
from sparkhvd.estimators.runs.run_identity import DECISIONS, Counts, note_run
from sparkhvd.store import layout


def test_every_parameter_has_a_decision():
    declared = {name for kind in (TorchEstimator, KerasEstimator, LightningEstimator) for name in kind.declarations}
    undecided = sorted(declared - DECISIONS.keys())
    assert not undecided, (
        f"Decide in sparkhvd.estimators.runs.run_identity whether these change the trained model: {undecided}"
    )
    assert sorted(DECISIONS.keys() - declared) == []


def test_a_parameter_without_a_decision_counts():
    assert run_identity._counts("of_a_subclass", ())
    assert run_identity._counts("epochs", ("epochs",))
    assert not run_identity._counts("epochs", ())
    assert not run_identity._counts("verbose", ("verbose",))


def test_ranks_and_environment_of_a_backend_count():
    def counted(backend):
        return run_identity._counted("backend", backend)

    assert counted("barrier") == counted("mpi") is None
    assert counted(SparkBackend(2, launcher="mpi")) == counted(SparkBackend(2, start_timeout=5.0))
    assert counted(SparkBackend(2)) != counted(SparkBackend(3))
    assert counted(SparkBackend(2)) != counted(SparkBackend(2, env={"A": "b"}))


def test_the_choice_of_the_best_epoch_of_checkpoints_counts():
    def counted(**choice):
        return run_identity._counted("checkpoints", Checkpoints(**choice))

    assert counted() == counted(every_steps=3, keep=2)
    assert len({repr(counted(**choice)) for choice in ({}, {"best": "a"}, {"best": "a", "mode": "max"})}) == 3


def test_a_warning_names_a_run_that_differs_only_in_its_initial_weights(tmp_path, caplog):
    store = Store.create(str(tmp_path))
    first, second = layout.auto_run("a" * 64, "b" * 64), layout.auto_run("a" * 64, "c" * 64)
    caplog.set_level(logging.WARNING)
    note_run(store, first)
    note_run(store, first)
    note_run(store, layout.auto_run("d" * 64, "b" * 64))
    assert caplog.messages == []
    note_run(store, second)
    assert len(caplog.messages) == 1
    assert f"pass run_id={first!r}" in caplog.text
    note_run(store, second)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("decision", Counts)
def test_every_kind_of_decision_is_used(decision):
    assert decision in DECISIONS.values()
