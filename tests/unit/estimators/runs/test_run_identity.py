"""The parameters that are part of a run's identity."""

from __future__ import annotations

import logging

from sparkhvd import Checkpoints, KerasEstimator, LightningEstimator, SparkBackend, Store, TorchEstimator
from sparkhvd.estimators.params.declarations import Identity
from sparkhvd.estimators.runs import run_identity
from sparkhvd.estimators.runs.run_identity import record_run
from sparkhvd.store import layout


def test_only_these_parameters_are_not_always_part_of_the_identity():
    estimators = (TorchEstimator, KerasEstimator, LightningEstimator)
    items = [item for kind in estimators for item in kind.declarations.items()]
    of_kind = {kind: sorted({name for name, item in items if item.identity is kind}) for kind in Identity}
    assert of_kind[Identity.IN_PARAM_MAPS] == ["epochs"]
    assert of_kind[Identity.NEVER] == [
        "elastic_timeout", "keep_data", "log_every_n_steps", "logger", "mp_start_method", "output_cols",
        "output_types", "reset_limit", "resume", "run_id", "store", "train_reader_num_workers", "use_gpu",
        "val_reader_num_workers", "verbose",
    ]  # fmt: skip


def test_the_epochs_are_part_of_the_identity_only_if_a_parameter_map_sets_them():
    estimator = TorchEstimator()
    assert estimator.is_identity("batch_size", ())
    assert estimator.is_identity("epochs", ("epochs",))
    assert not estimator.is_identity("epochs", ())
    assert not estimator.is_identity("verbose", ("verbose",))


def test_ranks_and_environment_of_a_backend_are_part_of_the_identity():
    def counted(backend):
        return run_identity._identity_part("backend", backend)

    assert counted("barrier") == counted("mpi") is None
    assert counted(SparkBackend(2, launcher="mpi")) == counted(SparkBackend(2, start_timeout=5.0))
    assert counted(SparkBackend(2)) != counted(SparkBackend(3))
    assert counted(SparkBackend(2)) != counted(SparkBackend(2, env={"A": "b"}))
    assert counted(SparkBackend(min_num_proc=2)) != counted(SparkBackend(min_num_proc=3)), "their global batches differ"
    assert counted(SparkBackend(3, min_num_proc=2)) == counted(SparkBackend(3, max_num_proc=4))


def test_the_choice_of_the_best_epoch_by_checkpoints_is_part_of_the_identity():
    def counted(**choice):
        return run_identity._identity_part("checkpoints", Checkpoints(**choice))

    assert counted() == counted(every_steps=3, keep=2)
    assert len({repr(counted(**choice)) for choice in ({}, {"best": "a"}, {"best": "a", "mode": "max"})}) == 3


def test_a_warning_names_a_run_that_differs_only_in_its_initial_weights(tmp_path, caplog):
    store = Store.create(str(tmp_path))
    first, second = layout.auto_run("a" * 64, "b" * 64), layout.auto_run("a" * 64, "c" * 64)
    caplog.set_level(logging.WARNING)
    record_run(store, first)
    record_run(store, first)
    record_run(store, layout.auto_run("d" * 64, "b" * 64))
    assert caplog.messages == []
    record_run(store, second)
    assert len(caplog.messages) == 1
    assert f"pass run_id={first!r}" in caplog.text
    assert "(torch.manual_seed, keras.utils.set_random_seed)" in caplog.text
    record_run(store, second)
    assert len(caplog.messages) == 1
