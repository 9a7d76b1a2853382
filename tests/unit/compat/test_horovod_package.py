"""The distribution ``compat/horovod``: programs that import Horovod run unchanged."""

from __future__ import annotations

import operator
import os
import sys
import threading
from contextlib import nullcontext
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path

import keras
import pytest

from sparkhvd.cli.flags import parser
from sparkhvd.errors import LaunchError, SlotsError
from tests.scripts import results_of, run_script

_ROOT = Path(__file__).parents[3]
_PACKAGE = _ROOT / "compat" / "horovod"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return the results of ``horovod_program``."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.unit.compat.horovod_program"]
    done = run_script(command, tmp_path_factory.mktemp("horovod"), 240, PYTHONPATH=f"{_ROOT}:{_PACKAGE}")
    return results_of(done)


def test_the_version_is_that_of_the_supported_interface(program):
    assert program["version"] == "0.28.1"


def test_a_pytorch_program_runs_unchanged(program):
    for rank in program["torch"]:
        assert rank == {
            "step": [[pytest.approx(0.2 * 1.5)] * 2],
            "sum": 2.0,
            "half": 1.0,
            "sparse": [1.0, 1.0],
            "splits": [[1.0, 1.0], ["torch.int32", [1, 1]], ["torch.int32", [1, 1]]],
            "joined": True,
            "built": True,
        }


def test_a_pytorch_program_can_use_the_features_beside_the_collectives(program):
    for number, rank in enumerate(program["some"]):
        assert rank == {
            "local": -1.0 - number,  # the process set has only rank 0; rank 1 trains on its own gradients
            "created": [2, 0.0, True],
            "warned": ["step() called without optimizer"],
            "names": ["bias", "weight"],
            "options": [True, True, True, 1, 1.0],
            "changed": [[0, 1]],
            "refused": "A reducescatter cannot use op=Adasum, which needs whole tensors; use an allreduce.",
            "refused twice": number == 0,
            "in flight": 1.0,
            "of the same name": [1.0, 1.0],
        }


def test_a_tensorflow_and_keras_program_runs_unchanged(program):
    for number, rank in enumerate(program["tensorflow"]):
        assert rank == {
            "integers": ["int32", [1, 1], "int32", True],
            "errors": [["FailedPreconditionError"], ["InvalidArgumentError"], *[["NotImplementedError"]] * 3],
            "kernels": [number, 1.0],
            "mixed": [[[1], [1]], [0, 1], [2.0]],
            "adasum": [1.0, 1.0],
            "local": 1.0 + number,
            "gradient": 3.0,
            "sum": [2.0],
            "scattered": [2.0],
            "ops": [2, number, 2, number],
            "broadcast": [[1]],
            "equal": True,
        }


def test_a_failed_collective_is_horovods_internal_error(program):
    assert program["errors"] == ["MismatchError"] * 2
    assert program["runner"] == "MismatchError"


def test_horovods_run_replaces_a_lost_rank(program):
    assert program["elastic"] == [[2, 2], [2, 2]]


@pytest.fixture
def horovod(monkeypatch):
    """Add the package to the import path, and remove its modules afterwards."""
    monkeypatch.syspath_prepend(str(_PACKAGE))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in {"horovod", "sparkdl"}]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("horovod.mxnet", "no MXNet interface"),
        ("horovod.tensorflow.data.compute_service", "does not start TensorFlow's data service"),
        ("horovod.spark.tensorflow.compute_worker", "does not start TensorFlow's data service"),
        ("horovod.spark.data_loaders.pytorch_data_loaders", "does not read with petastorm"),
        ("horovod.spark.keras.datamodule", "does not read with petastorm"),
        ("horovod.spark.lightning.datamodule", "does not read with petastorm"),
        ("horovod.spark.torch.datamodule", "does not read with petastorm"),
        ("horovod.runner.elastic.discovery", r"function to sparkhvd\.run_elastic\(discovery=\.\.\.\)"),
        ("horovod.runner.http.http_server", "does not have the parts of Horovod's launcher"),
        ("horovod.runner.gloo_run", r"Start jobs with horovod\.run or horovodrun"),
        ("horovod.runner.mpi_run", r"Start jobs with horovod\.run or horovodrun"),
        ("horovod.runner.common.util.hosts", r"Start jobs with horovod\.run or horovodrun"),
    ],
)
def test_missing_features_raise_an_error_of_one_sentence(horovod, module, message):
    with pytest.raises(ImportError, match=message):
        __import__(module)


def test_the_launchers_helpers_that_sparkhvd_lacks_raise_an_error_of_one_sentence(horovod):
    from horovod.runner.common.util import codec, env  # noqa: F401, PLC0415

    with pytest.raises(ImportError, match="does not have the parts of Horovod's launcher"):
        from horovod.runner.common.util import settings  # noqa: F401, PLC0415
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from horovod.runner.common.util import nothing  # noqa: F401, PLC0415


def test_ranks_on_ray_are_those_of_sparkhvd(horovod):
    pytest.importorskip("ray")
    import horovod.ray  # noqa: PLC0415

    from sparkhvd.ray import RayExecutor  # noqa: PLC0415

    assert issubclass(horovod.ray.RayExecutor, RayExecutor)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"slots": 2}, ValueError, "Set host_discovery_script, too"),
        ({"hosts": "a:1", "host_discovery_script": "true"}, ValueError, "hosts and host_discovery_script are both set"),
        ({"reset_limit": 2}, ValueError, "Set min_num_proc or max_num_proc"),
        ({"min_num_proc": 3, "hosts": "localhost:2"}, SlotsError, "more than the 2 slots"),
        ({"use_gloo": True, "use_mpi": True}, ValueError, "use_gloo and use_mpi are both set"),
        ({"use_mpi": True}, NotImplementedError, "horovodrun --mpi"),
        ({"hosts": "a:1", "hostfile": "hosts"}, ValueError, "Pass one of them"),
        ({"hosts": "localhost:1", "num_proc": 2}, SlotsError, "more than the 1 slot"),
    ],
)
def test_run_refuses_unsupported_arguments(horovod, arguments, kind, message):
    from horovod.runner import run  # noqa: PLC0415

    with pytest.raises(kind, match=message):
        run(print, **arguments)


_OVER_SSH = {"launcher": "ssh", "nics": ["eth0", "lo"], "ssh_port": 22, "ssh_identity_file": "key"}


@pytest.mark.parametrize(
    ("arguments", "job", "options"),
    [
        ({"num_proc": 2}, ("run", 2), {"launcher": "local"}),
        ({"np": 2, "hosts": "localhost:2"}, ("run", 2), {"launcher": "local"}),
        ({"num_proc": 2, "hosts": "a:1,b:4"}, ("run", 2), {**_OVER_SSH, "hosts": "a:1,b:4"}),
        ({"min_num_proc": 2, "hosts": "127.0.0.1:3"}, ("run_elastic", 2, 2, 3), {"launcher": "local"}),
        ({"max_np": 2, "hosts": "127.0.0.1:3"}, ("run_elastic", 1, None, 2), {"launcher": "local"}),
        ({"min_np": 2, "hosts": "a:3"}, ("run_elastic", 2, 2, None), {**_OVER_SSH, "hosts": "a:3"}),
        ({"host_discovery_script": "true"}, ("run_elastic", 1, None, None), _OVER_SSH),
    ],
)
@pytest.mark.filterwarnings("ignore:np is deprecated")
def test_hosts_and_limits_choose_the_launcher_and_the_kind_of_job(horovod, monkeypatch, arguments, job, options):
    from horovod.runner import run  # noqa: PLC0415

    calls = []
    for name in ("run", "run_elastic"):
        monkeypatch.setattr(f"sparkhvd.{name}", lambda *args, name=name, **kwargs: calls.append((name, args, kwargs)))
    run(print, network_interface="eth0,lo", ssh_port=22, ssh_identity_file="key", **arguments)
    ((name, (_, _, _, *counts, start_timeout), keywords),) = calls
    assert ((name, *counts), start_timeout) == (job, None)
    passed = {key: keywords.get(key) for key in (*_OVER_SSH, "hosts")}
    assert passed == {**dict.fromkeys(passed), **options}


@pytest.mark.parametrize("limits", [{"min_np": 2, "max_np": 3}, {"min_num_proc": 2, "max_num_proc": 3}])
def test_an_elastic_job_on_spark_takes_horovods_names_of_its_limits(horovod, monkeypatch, limits):
    from horovod.spark import run_elastic  # noqa: PLC0415

    calls = []
    monkeypatch.setattr("sparkhvd.run_elastic", lambda *args, **kwargs: calls.append((args, kwargs)))
    run_elastic(print, (1,), num_proc=2, start_timeout=5, **limits)
    run_elastic(print, (1,), None, 2, 2, 3, 5)
    named = {"num_proc": 2, "start_timeout": 5, "min_num_proc": 2, "max_num_proc": 3}
    assert calls == [((print, (1,)), named), ((print, (1,), None, 2, 2, 3, 5), {})]


def test_the_launchers_function_runs_functions_and_commands(horovod, monkeypatch):
    from horovod.runner import _HorovodArgs, launch  # noqa: PLC0415

    calls = []
    monkeypatch.setattr("sparkhvd.run", lambda *args, **kwargs: calls.append((args, kwargs)) or ["result"])
    args = _HorovodArgs()
    args.num_proc, args.hosts, args.nics, args.use_mpi, args.run_func = 2, "a:1,b:1", "eth0,lo", False, print
    assert launch._run(args) == ["result"]
    (((function, _, _, num_proc, _), options),) = calls
    assert (function, num_proc, options["hosts"], options["nics"]) == (print, 2, "a:1,b:1", ["eth0", "lo"])

    codes = [0, 3]
    monkeypatch.setattr(launch, "main", lambda words: calls.append(list(words)) or codes.pop(0))
    args.run_func, args.command, args.verbose, args.use_gloo = None, ["python", "train.py"], 2, True
    args.cooldown_range = (5, 10)
    assert launch._run(args) is None
    flags = ["--num-proc=2", "--hosts=a:1,b:1", "--network-interfaces=eth0,lo", "--verbose", "--gloo"]
    assert calls[1] == [*flags, "--blacklist-cooldown-range", "5", "10", "--", "python", "train.py"]
    parsed = parser().parse(calls[1])
    assert (parsed.num_proc, parsed.nics, parsed.cooldown_range) == (2, ["eth0", "lo"], [5, 10])
    with pytest.raises(RuntimeError, match=r"'python train.py' failed with exit code 3"):
        launch._run(args)


@pytest.mark.parametrize("code", [0, 3])
def test_horovodrun_is_a_function(horovod, monkeypatch, code):
    from horovod.runner import launch  # noqa: PLC0415

    monkeypatch.setattr(launch, "main", lambda: code)
    with pytest.raises(SystemExit, match="3") if code else nullcontext():
        launch.run_commandline()


def test_sessions_of_tensorflow_1_are_refused(horovod):
    import horovod.tensorflow as hvd  # noqa: PLC0415

    with pytest.raises(RuntimeError, match="no graph sessions"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(NotImplementedError, match="no graph sessions"):
        hvd.BroadcastGlobalVariablesHook(0)


def test_threads_run_in_the_background(horovod):
    from horovod.runner.util.threads import in_thread  # noqa: PLC0415

    calls = []
    thread = in_thread(calls.append, (1,), name="appends")
    thread.join(60)
    assert (calls, thread.name, thread.daemon) == ([1], "appends", True)
    in_thread(int, ("no number",), silent=True).join(60)
    with pytest.raises(ValueError, match=r"must be a tuple, but is a list\. Pass \(value,\)"):
        in_thread(calls.append, [1])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_in_threads_return_their_results_by_index(horovod):
    from horovod.runner.util.threads import execute_function_multithreaded as call_all  # noqa: PLC0415

    numbers = [["1"], ["2"], ["3"]]
    assert call_all(int, numbers, max_concurrent_executions=2) == {0: 1, 1: 2, 2: 3}
    assert numbers == [["1"], ["2"], ["3"]]
    assert call_all(int, []) == {}
    assert call_all(int, numbers, block_until_all_done=False) is None
    with pytest.raises(RuntimeError, match=r"1 of 2 calls failed\. See their errors above\."):
        call_all(operator.getitem, [["ab", 1], ["ab", 2]])


@pytest.mark.parametrize("stops", [False, True])
def test_a_thread_waits_for_an_event(horovod, stops):
    from horovod.runner.util.threads import on_event  # noqa: PLC0415

    event, stop, calls = threading.Event(), threading.Event(), []
    thread = on_event(event, calls.append, (1,), stop, check_stop_interval_s=0.01, daemon=False)
    if stops:
        stop.set()
        thread.join(60)
    event.set()
    thread.join(60)
    assert calls == ([] if stops else [1])
    with pytest.raises(ValueError, match=r"daemon=False must have an event that stops it\. Pass stop\."):
        on_event(event, calls.append, (1,), daemon=False)
    with pytest.raises(ValueError, match=r"event must be a threading\.Event, got None"):
        on_event(None, calls.append)


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "2", "PMI_SIZE": "3"}, (2, 3)),
    ],
)
def test_the_rank_is_known_before_init(horovod, variables, wanted):
    from horovod.common.util import env  # noqa: PLC0415
    from horovod.runner.common.util.env import get_env_rank_and_size  # noqa: PLC0415

    with env(**variables, HOROVOD_CYCLE_TIME=None):
        assert get_env_rank_and_size() == wanted
    assert not any(name in os.environ for name in variables)
    with env(PMI_SIZE="2"), pytest.raises(RuntimeError, match="Only one of PMI_RANK and PMI_SIZE is set"):
        get_env_rank_and_size()


def test_versions_are_compared(horovod):
    from horovod.common.util import is_version_greater_equal_than as reaches  # noqa: PLC0415

    assert [reaches("2.10.1", "2.6.0"), reaches("2.6.0", "2.6.0"), reaches("2.6.0rc1", "2.6.0")] == [True, True, False]
    for target, message in [("2.6", "major.minor.patch"), (2, "must be strings")]:
        with pytest.raises(ValueError, match=message):
            reaches("2.6.0", target)


def test_the_helpers_for_tensorflow_work_in_graphs(horovod):
    import horovod.tensorflow as hvd  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    calls = []
    cached = hvd.util._cache(lambda value: calls.append(value) or value)
    assert hvd._executing_eagerly()
    found = []
    tf.function(lambda: found.append((hvd._executing_eagerly(), cached(1))), autograph=False)()
    assert [found, cached(1), cached(1), calls] == [[(False, 1)], 1, 1, [1, 1]]


_REDUCED = "prescale_factor postscale_factor process_set"
_TF_REDUCED = "average device_dense device_sparse compression op prescale_factor postscale_factor"
_TF_DEVICES = "device_dense device_sparse compression sparse_as_dense"
_KERAS_OPTIMIZER = f"optimizer name {_TF_DEVICES} gradient_predivide_factor op"
_SCHEDULE = "momentum_correction steps_per_epoch"
# The parameters of Horovod 0.28.1 that programs can pass by position.
_PARAMETERS = {
    "common.util.nccl_built": "verbose",
    "runner.run": "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
    "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo "
    "use_mpi mpi_args network_interface network_interfaces executable np min_np max_np",
    "spark.run": "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose nics "
    "prefix_output_with_timestamp executable",
    "spark.run_elastic": "fn args kwargs num_proc min_num_proc max_num_proc start_timeout elastic_timeout reset_limit "
    "env stdout stderr verbose nics prefix_output_with_timestamp",
    "spark.common.util.prepare_data": "num_processes store df label_columns feature_columns validation "
    "sample_weight_col compress_sparse partitions_per_process verbose",
    "spark.common.backend.SparkBackend": "num_proc env",
    "spark.common.store.HDFSStore": "prefix_path host port user kerb_ticket driver extra_conf",
    "ray.RayExecutor": "settings num_workers num_hosts num_workers_per_host cpus_per_worker use_gpu gpus_per_worker "
    "use_current_placement_group",
    "torch.init": "comm process_sets",
    "torch.start_timeline": "file_path mark_cycles",
    "torch.DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "torch.SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    "torch.allreduce": f"tensor average name compression op {_REDUCED}",
    "torch.allreduce_": f"tensor average name op {_REDUCED}",
    "torch.allreduce_async": f"tensor average name op {_REDUCED}",
    "torch.allreduce_async_": f"tensor average name op {_REDUCED}",
    "torch.grouped_allreduce": f"tensors average name compression op {_REDUCED}",
    "torch.grouped_allreduce_": f"tensors average name op {_REDUCED}",
    "torch.grouped_allreduce_async": f"tensors average name op {_REDUCED}",
    "torch.grouped_allreduce_async_": f"tensors average name op {_REDUCED}",
    "torch.sparse_allreduce_async": "tensor name op process_set",
    "torch.allgather": "tensor name process_set",
    "torch.grouped_allgather": "tensors name process_set",
    "torch.broadcast": "tensor root_rank name process_set",
    "torch.alltoall": "tensor splits name process_set",
    "torch.reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "torch.reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "torch.grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "torch.broadcast_parameters": "params root_rank",
    "torch.broadcast_optimizer_state": "optimizer root_rank model",
    "torch.broadcast_object": "obj root_rank name process_set",
    "torch.elastic.TorchState": "model optimizer",
    "torch.elastic.ElasticSampler": "dataset shuffle seed",
    "tensorflow.DistributedGradientTape": f"gradtape {_TF_DEVICES} op gradient_predivide_factor num_groups groups "
    "process_set scale_local_gradients",
    "tensorflow.PartialDistributedGradientTape": f"gradtape {_TF_DEVICES} op gradient_predivide_factor num_groups "
    "groups process_set local_layers scale_local_gradients",
    "tensorflow.allreduce": f"tensor {_TF_REDUCED} name process_set ignore_name_scope",
    "tensorflow.grouped_allreduce": f"tensors {_TF_REDUCED} process_set ignore_name_scope name",
    "tensorflow.reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor "
    "postscale_factor",
    "tensorflow.allgather": "tensor name ignore_name_scope process_set",
    "tensorflow.broadcast": "tensor root_rank name ignore_name_scope process_set",
    "tensorflow.alltoall": "tensor splits name ignore_name_scope process_set",
    "tensorflow.broadcast_variables": "variables root_rank process_set inplace",
    "tensorflow.broadcast_object": "obj root_rank session name process_set",
    "tensorflow.broadcast_object_fn": "root_rank session name process_set",
    "tensorflow.allgather_object": "obj session name process_set",
    "tensorflow.elastic.TensorFlowKerasState": "model optimizer",
    "keras.DistributedOptimizer": f"{_KERAS_OPTIMIZER} num_groups groups",
    "keras.PartialDistributedOptimizer": f"{_KERAS_OPTIMIZER} groups process_set local_layers scale_local_gradients",
    "keras.allreduce": "value name average prescale_factor postscale_factor op compression",
    "keras.load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
    "keras.callbacks.BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "keras.callbacks.LearningRateScheduleCallback": "initial_lr multiplier start_epoch end_epoch staircase "
    f"{_SCHEDULE}",
    "keras.callbacks.LearningRateWarmupCallback": f"initial_lr warmup_epochs {_SCHEDULE} verbose",
    "keras.callbacks.BestModelCheckpoint": "monitor verbose mode save_freq",
    "tensorflow.keras.callbacks.BestModelCheckpoint": "monitor verbose save_weights_only mode save_freq",
    "tensorflow.keras.DistributedOptimizer": f"{_KERAS_OPTIMIZER} backward_passes_per_step "
    "average_aggregated_gradients num_groups groups process_set scale_local_gradients",
}


def test_functions_take_their_arguments_in_horovods_order(horovod):
    pytest.importorskip("ray")
    found = {}
    for path, names in _PARAMETERS.items():
        module, _, name = path.rpartition(".")
        parameters = signature(getattr(import_module(f"horovod.{module}"), name)).parameters.values()
        by_position = [item.name for item in parameters if item.kind is Parameter.POSITIONAL_OR_KEYWORD]
        found[path] = " ".join(by_position[: len(names.split())])
    assert found == _PARAMETERS


def test_functions_accept_arguments_that_have_no_effect_here(horovod, tmp_path):
    import horovod.tensorflow as hvd  # noqa: PLC0415
    from horovod.tensorflow import keras as hvd_keras  # noqa: PLC0415

    model = compiled_network(0.4)
    model.save(tmp_path / "model.keras")
    hvd.init()
    try:
        hvd.broadcast_variables(model.variables, 0, inplace=True)
        loaded = hvd_keras.load_model(str(tmp_path / "model.keras"), legacy_opts=True)
    finally:
        hvd.shutdown()
    assert float(loaded.optimizer.learning_rate) == pytest.approx(0.4)
    assert hvd_keras.callbacks.BestModelCheckpoint("loss", 0, True, "min").monitor == "loss"


def test_programs_can_derive_from_the_compressors(horovod):
    torch = pytest.importorskip("torch")
    from horovod.tensorflow.compression import FP16Compressor as TensorFlowCompressor  # noqa: PLC0415
    from horovod.torch.compression import FP16Compressor  # noqa: PLC0415

    class Halved(FP16Compressor):
        pass

    sent, context = Halved.compress(torch.ones(1))
    assert (sent.dtype, Halved.decompress(sent, context).dtype) == (torch.float16, torch.float32)
    assert TensorFlowCompressor.dtype.name == "float16"


def test_private_modules_that_programs_import_exist(horovod):
    from horovod.runner.common.util.codec import dumps_base64, loads_base64  # noqa: PLC0415
    from horovod.torch import elastic  # noqa: PLC0415
    from horovod.torch.elastic.sampler import ElasticSampler  # noqa: PLC0415
    from horovod.torch.elastic.state import TorchState  # noqa: PLC0415

    assert (ElasticSampler, TorchState) == (elastic.ElasticSampler, elastic.TorchState)
    text = dumps_base64(lambda: "loaded")
    assert (type(text), type(dumps_base64(1, False)), loads_base64(text)()) == (str, bytes, "loaded")


def test_elastic_jobs_on_ray_accept_the_settings_and_callbacks_of_horovod(horovod, monkeypatch):
    pytest.importorskip("ray")
    from horovod.ray import ElasticRayExecutor  # noqa: PLC0415

    calls = []
    monkeypatch.setattr("sparkhvd.ray.elastic.run_elastic", lambda *args, **options: calls.append((args, options)))
    settings = ElasticRayExecutor.create_settings(2, 4, elastic_timeout=30, timeout_s=20, min_np=1, verbose=True)
    executor = ElasticRayExecutor(settings, use_gpu=True, cpus_per_slot=2, env_vars={"MINE": "yes"})
    with pytest.raises(LaunchError, match=r"has not been started\. Call start\(\) first"):
        executor.run(print)
    executor.start()
    executor.run(print, callbacks=[print])
    ((args, options),) = calls
    assert args == (print, (), None)
    sizes = {name: options[name] for name in ("num_proc", "min_num_proc", "max_num_proc", "start_timeout")}
    assert sizes == {"num_proc": None, "min_num_proc": 1, "max_num_proc": 4, "start_timeout": 20}
    assert (options["launcher"], options["env"]) == ("ray", {"MINE": "yes"})
    assert (options["cpus_per_task"], options["gpus_per_task"]) == (2, 1.0)


def compiled_network(lr):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(lr), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize(("staircase", "epochs_after_the_start"), [(True, 2), (False, 2.25)])
def test_a_number_as_multiplier_applies_to_every_epoch(horovod, staircase, epochs_after_the_start):
    from horovod.tensorflow.keras.callbacks import LearningRateScheduleCallback  # noqa: PLC0415

    schedule = LearningRateScheduleCallback(0.4, 0.5, 2, None, staircase, steps_per_epoch=4)
    schedule.set_model(compiled_network(0.4))
    schedule.on_epoch_begin(4)
    schedule.on_train_batch_begin(1)
    assert float(schedule.model.optimizer.learning_rate) == pytest.approx(0.4 * 0.5**epochs_after_the_start)


@pytest.mark.parametrize(
    ("rank", "printed"), [(0, "\nThe warmup ended after epoch 2; the learning rate is 0.4.\n"), (1, "")]
)
def test_rank_0_prints_the_end_of_the_warmup(horovod, monkeypatch, capsys, rank, printed):
    from horovod.keras import callbacks  # noqa: PLC0415

    monkeypatch.setattr(callbacks.interface, "rank", lambda: rank)
    warmup = callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
    warmup.set_model(compiled_network(0.4))
    warmup.on_epoch_end(0, {})
    warmup.on_epoch_end(1, {})
    assert capsys.readouterr().out == printed


def test_the_history_of_a_keras_model_equals_that_of_keras(horovod, monkeypatch):
    from horovod.spark.keras import KerasModel  # noqa: PLC0415

    from sparkhvd.estimators import keras as ours  # noqa: PLC0415
    from sparkhvd.estimators.training.logs.history import EpochRecord, to_history  # noqa: PLC0415

    shares = {"data_wait": 0.1, "compute": 0.7, "communication": 0.2}
    records = [EpochRecord(0, {"loss": 2.0, "mae": 1.0}, {"loss": 3.0, "mae": 1.5}, 9.0, 0.5, shares)]
    monkeypatch.setattr(ours.KerasModel, "getHistory", lambda _: to_history(records))
    history = KerasModel.getHistory(KerasModel.__new__(KerasModel))
    assert history == {"loss": [2.0], "mae": [1.0], "val_loss": [3.0], "val_mae": [1.5]}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("torch", "run TorchState ObjectState State"),
        ("tensorflow", "run TensorFlowState TensorFlowKerasState"),
        ("keras", "run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback"),
        ("tensorflow.keras", "run KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback"),
    ],
)
def test_elastic_names_are_those_of_sparkhvd(horovod, module, names):
    elastic = import_module(f"horovod.{module}").elastic
    assert elastic.__all__ == import_module(f"horovod.{module}.elastic").__all__
    for name in names.split():
        assert getattr(elastic, name).__module__.startswith("sparkhvd.")


def test_the_elastic_sampler_counts_its_batches_as_horovod(horovod):
    from horovod.torch import elastic  # noqa: PLC0415

    sampler = elastic.ElasticSampler(range(100), shuffle=False)
    for global_step in (40, 41):
        sampler.record_batch(global_step, 8)
    sampler.reset()
    sampler.record_batch(0, 8)
    assert (sampler.processed_num, next(iter(sampler))) == (24, 16)


def test_a_broadcast_leaves_out_variables_that_are_registered_later(horovod):
    from horovod.tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback  # noqa: PLC0415

    model = compiled_network(0.4)
    start = BroadcastGlobalVariablesCallback(0)
    start.set_model(model)
    start.register_local_var(model.layers[0].kernel)
    assert [variable.path for variable in start._variables()][:1] == [model.layers[0].bias.path]


def test_the_error_for_an_unknown_name_suggests_the_closest_name(horovod):
    import horovod.torch as hvd  # noqa: PLC0415

    with pytest.raises(AttributeError, match="Did you mean"):
        _ = hvd.allreduse


def test_the_estimators_are_also_in_horovods_modules(horovod):
    from horovod.spark.keras.estimator import KerasEstimator  # noqa: PLC0415
    from horovod.spark.lightning.estimator import MIN_PL_VERSION, TorchEstimator  # noqa: PLC0415
    from horovod.spark.torch.estimator import TorchModel  # noqa: PLC0415

    assert MIN_PL_VERSION
    assert {KerasEstimator.__name__, TorchEstimator.__name__, TorchModel.__name__} == {
        "KerasEstimator",
        "TorchEstimator",
        "TorchModel",
    }


def test_a_sequence_is_split_into_almost_equal_parts(horovod):
    from horovod.common.util import split_list  # noqa: PLC0415

    assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
