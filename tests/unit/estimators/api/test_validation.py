from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from sparkhvd import LightningEstimator
from sparkhvd.data import DataModule
from sparkhvd.errors import ConfigError, ParamError
from sparkhvd.estimators.api.train_job import row_loader, train_spec
from sparkhvd.estimators.api.validation import check, check_monitored_metrics, row_cache
from sparkhvd.estimators.params.backend import SparkBackend, check_backend
from sparkhvd.estimators.params.params import EstimatorParams
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.estimators.runs.run_plan import RunPlan
from sparkhvd.estimators.torch import TorchEstimator
from sparkhvd.estimators.torch.plugin import PLUGIN
from sparkhvd.store import LocalStore
from tests.unit.estimators.arrays import schema


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shuffle_buffer_size", 5, "shuffle_buffer_size has no meaning in TorchEstimator: rows are shuffled within"),
        ("reader_pool_type", "dummy", "reader_pool_type has no meaning in TorchEstimator: rows are always decoded by"),
        ("continuous_cols", ["a"], "it was for NVTabular's loaders"),
    ],
)
def test_a_retired_parameter_of_horovod_is_refused_with_the_reason(name, value, message):
    with pytest.raises(ParamError, match=message):
        TorchEstimator(**{name: value})


@pytest.mark.parametrize(
    ("kind", "accessor", "message"),
    [
        (TorchEstimator, "getReaderPoolType", "reader_pool_type has no meaning in TorchEstimator: rows are always"),
        (TorchEstimator, "setNumGPUs", "'TorchEstimator' object has no attribute 'setNumGPUs'"),
        (TorchEstimator, "setNumProcs", "'TorchEstimator' object has no attribute 'setNumProcs'"),
    ],
)
def test_the_getter_of_a_retired_parameter_is_refused_with_the_reason(kind, accessor, message):
    assert not hasattr(kind(), accessor)
    with pytest.raises(AttributeError, match=message):
        getattr(kind(), accessor)


@pytest.mark.parametrize(
    ("kind", "setter", "message"),
    [
        (TorchEstimator, "setShufflingBufferSize", "shuffling_buffer_size has no meaning in TorchEstimator: rows are"),
        (LightningEstimator, "setNumGPUs", "num_gpus has no meaning in LightningEstimator: a rank trains on one GPU"),
        (LightningEstimator, "setProfiler", "profiler has no meaning in LightningEstimator: set it on the Trainer"),
    ],
)
def test_a_retired_parameter_accepts_only_none(kind, setter, message):
    estimator = kind(**{message.split()[0]: None})
    assert getattr(estimator, setter)(None) is estimator
    with pytest.raises(ParamError, match=message):
        getattr(estimator, setter)(5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run_id": "mine"}, r"run_id='mine' names a run .* Store keeps no runs.* save_runs=True, or leave run_id"),
        ({"resume": "auto"}, "resume='auto' finds its run in a Store, but the estimator's Store keeps no runs"),
        (
            {"checkpoints": Checkpoints(every_steps=2)},
            "keeps states of the run in a Store, but the estimator's Store keeps no runs",
        ),
    ],
)
def test_resuming_is_refused_if_the_store_keeps_no_runs(given, message, tmp_path):
    store = LocalStore(str(tmp_path), save_runs=False)
    check(TorchEstimator(store=store, data="store")._plan())
    with pytest.raises(ParamError, match=message):
        check(TorchEstimator(store=store, **given)._plan())


@pytest.mark.parametrize("name", ["output_cols", "output_types"])
def test_the_numbers_of_outputs_and_labels_must_match(name):
    plan = TorchEstimator(label_cols=["a", "b"], **{name: ["label"]})._plan()
    with pytest.raises(ParamError, match=rf"{name} has 1 entry \['label'\], but label_cols has 2 columns \['a', 'b'\]"):
        check(plan)


def test_irregular_names_of_horovods_setters_exist():
    estimator = TorchEstimator().setTrainReaderNumWorker(3).setValReaderNumWorker(4).setInMemoryCacheAll(True)
    assert (estimator.getTrainReaderNumWorkers(), estimator.getValReaderNumWorker()) == (3, 4)
    assert estimator.getInmemoryCacheAll() is estimator.getInMemoryCacheAll() is True
    assert estimator.setUseGpu(False).setMpStartMethod("spawn").setBackendEnv({"A": None}).getBackendEnv() == {
        "A": None
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "backend",
            "slurm",
            r"backend='slurm' must be one of 'auto', 'barrier', 'mpi', 'local', 'ray', or an object with run",
        ),
        ("backend", object(), "or an object with run"),
        ("backend_env", {"A": 1}, "backend_env must be a dict from environment variable names to strings"),
        (
            "mp_start_method",
            "thread",
            "mp_start_method='thread' must be one of 'fork', 'spawn', 'forkserver'",
        ),
        ("transformation_fn", 3, "transformation_fn=3 must be a function"),
        ("reader", "csv", "reader='csv' must be one of 'native', 'petastorm'"),
        ("early_stopping", "val_loss", r"early_stopping='val_loss' must be an EarlyStopping, such as EarlyStopping\("),
        ("data", "both", "data='both' must be one of 'auto', 'direct', 'store'"),
    ],
)
def test_an_invalid_value_is_refused_with_its_name(name, value, message):
    with pytest.raises(ParamError, match=message):
        EstimatorParams(**{name: value})


def test_an_object_with_run_and_num_processes_is_a_backend():
    class Own:
        def num_processes(self):
            return 3

        def run(self, fn, args=(), kwargs=None, env=None):
            return [fn(*args)]

    own = Own()
    assert EstimatorParams(backend=own).getBackend() is own
    assert EstimatorParams(backend=SparkBackend(3)).getBackend().num_processes() == 3
    with pytest.raises(ParamError, match=r"^backend=Own\(\.\.\.\) cannot send the rows of a DataFrame to the ranks"):
        check_backend(EstimatorParams(backend=own)._plan(), "direct")
    assert EstimatorParams().getCheckpoints() == Checkpoints()


def test_the_options_of_a_spark_backend_are_checked_before_any_work():
    with pytest.raises(TypeError, match=r"takes no argument 'gpu_per_task'\. Did you mean gpus_per_task\?"):
        SparkBackend(2, gpu_per_task=1)

    def check_options(num_proc, data="direct", **options):
        check_backend(EstimatorParams(backend=SparkBackend(num_proc, **options))._plan(), data)

    check_options(2, gpus_per_task=1)
    with pytest.raises(ParamError, match=r"^backend='mpi' cannot send the rows"):
        check_options(2, use_mpi=True)
    with pytest.raises(
        ConfigError, match=r"gpus_per_task must be a positive integer or a fraction between 0 and 1 .*, got 0"
    ):
        check_options(2, gpus_per_task=0)
    with pytest.raises(ConfigError, match="configure Spark tasks, but launcher='local' starts none"):
        check_options(2, "store", cpus_per_task=1, launcher="local")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "direct"}, "data='direct' sends rows straight from Spark, but fit_on_parquet reads files"),
        (
            {"compress_sparse_cols": True},
            "compress_sparse_cols=True controls how .* or pass compress_sparse to prepare_data",
        ),
        (
            {"partitions_per_process": 3},
            "partitions_per_process=3 controls how .* or pass partitions_per_process to prepare_data",
        ),
        ({"keep_data": 0}, "keep_data=0.0 controls how .* or pass keep_seconds to prepare_data"),
    ],
)
def test_existing_files_are_not_prepared(given, message):
    with pytest.raises(ParamError, match=message):
        TorchEstimator(**given).fit_on_parquet()


def test_a_folder_in_place_of_the_parameters_is_refused_with_the_name_of_its_argument():
    with pytest.raises(ParamError, match=r"params='/data/rows' must be a dict .* Pass Parquet files as path="):
        TorchEstimator().fit_on_parquet("/data/rows")


class Rows(DataModule):
    def train_data(self):
        raise NotImplementedError


def made_by_lightning(train, validation):
    raise NotImplementedError


def test_a_lightning_data_module_factory_keeps_the_readers(tmp_path):
    params = {"model": object(), "feature_cols": ["x"], "label_cols": ["y"], "transformation_fn": len}
    plan = LightningEstimator(**params, data_module=made_by_lightning)._checked_plan()
    assert row_loader(plan) is None
    assert plan.data_module is made_by_lightning
    with pytest.raises(
        ParamError, match="data_module loads prepared rows, but this fit sends rows straight from Spark"
    ):
        LightningEstimator(**params, data_module=Rows)._checked_plan()
    with pytest.raises(ParamError, match="transformation_fn needs the native reader, but data_module replaces it"):
        check(replace(plan, data="store", store=LocalStore(str(tmp_path)), data_module=Rows))


def test_the_type_of_data_module_depends_on_the_framework():
    assert LightningEstimator(data_module=Rows).getDataModule() is Rows
    with pytest.raises(ParamError, match="must be a class or function that creates a LightningDataModule"):
        LightningEstimator(data_module=3)
    with pytest.raises(ParamError, match=r"must be a subclass of sparkhvd\.data\.DataModule"):
        TorchEstimator(data_module=made_by_lightning)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"early_stopping": EarlyStopping("val_loss")},
            "early_stopping monitors 'val_loss', but this fit has no valid",
        ),
        ({"checkpoints": Checkpoints(best="val_accuracy")}, "checkpoints monitors 'val_accuracy', but this fit has no"),
    ],
)
def test_validation_metrics_may_be_monitored_if_the_files_have_validation_rows(given, message):
    fixed = {"model": torch.nn.Linear(1, 1), "loss": len, "feature_cols": ["x"], "label_cols": ["y"]}
    optimizer = torch.optim.SGD(fixed["model"].parameters(), lr=0.1)
    plan = TorchEstimator(**fixed, optimizer=optimizer, **given)._checked_plan()
    monitors = PLUGIN.monitors(plan.params)
    check_monitored_metrics(monitors, held_out=True)
    with pytest.raises(ParamError, match=message):
        check_monitored_metrics(monitors, held_out=False)


def test_the_spec_of_the_ranks_holds_the_parameters():
    data = schema(x=("feature", "float64", (), "scalar"))
    parameters = {"val_batch_size": 7, "train_steps_per_epoch": 3, "validation_steps_per_epoch": 2, "use_gpu": False}
    readers = {"train_reader_num_workers": 5, "val_reader_num_workers": 6}

    def spec_of(**params):
        plan = EstimatorParams(**params)._plan(num_proc=2, run_id="r", random_seed=1)
        return train_spec(RunPlan(**vars(plan), division_proc=2, facts=None, lease=None), data)

    spec = spec_of(**parameters, **readers, inmemory_cache_all=True)
    assert {name: getattr(spec, name) for name in parameters} == parameters
    assert (spec.reading.threads, spec.val_reading.threads) == (5, 6)
    assert spec.reading.cache == spec.val_reading.cache == "memory"
    by_default = spec_of(batch_size=9, local_cache=True)
    assert (by_default.val_batch_size, by_default.reading.cache) == (9, "disk")


@pytest.mark.parametrize("name", ["inmemory_cache_all", "local_cache"])
def test_only_one_cache_of_rows_can_be_requested_and_only_with_the_native_reader(name):
    with pytest.raises(ParamError, match="both cache the same rows"):
        row_cache(EstimatorParams(inmemory_cache_all=True, local_cache=True)._plan(data="store"))
    with pytest.raises(ParamError, match=f"{name}=True caches rows that are read from a Store"):
        row_cache(EstimatorParams(**{name: True})._plan(data="direct"))


def test_several_fits_never_share_one_run():
    fixed = {"model": torch.nn.Linear(1, 1), "loss": len, "feature_cols": ["x"], "label_cols": ["y"]}
    optimizer = torch.optim.SGD(fixed["model"].parameters(), lr=0.1)
    fixed |= {"optimizer": optimizer, "store": LocalStore("/nowhere")}
    named, other = TorchEstimator(run_id="r", **fixed), TorchEstimator(**fixed)
    for estimator, param_map in ((named, {}), (other, {other.run_id: "r"})):
        with pytest.raises(ParamError, match="run_id='r' would make several fits share one run"):
            next(estimator.fitMultiple(object(), [param_map]))
        with pytest.raises(ParamError, match="fit takes a Spark DataFrame"):  # a single fit gets as far as its rows
            estimator.fit(object(), param_map)


def test_a_plan_holds_every_parameter_under_its_name_and_never_changes():
    estimator = TorchEstimator(feature_cols=["x"], label_cols=["y"], epochs=3, clip_grad_norm=1.0)
    plan = estimator._plan(data="store")
    assert plan.params == {**estimator.values(), "data": "store"}
    assert (plan.epochs, plan.own["clip_grad_norm"]) == (3, 1.0)
    assert set(plan.own) == set(TorchEstimator.declarations) - set(EstimatorParams.declarations)
    with pytest.raises(FrozenInstanceError):
        plan.epochs = 4
    assert replace(plan, epochs=4).params == {**plan.params, "epochs": 4}
