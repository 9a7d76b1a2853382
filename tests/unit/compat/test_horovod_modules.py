"""Modules of Horovod that programs import beside those of the frameworks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import sparkhvd.torch

_PACKAGE = Path(__file__).parents[3] / "compat" / "horovod"


class _Communicator:
    """Stands for a communicator of ``mpi4py``."""

    def allgather(self, sendobj):
        return [sendobj]

    def Ibarrier(self):  # noqa: N802 - the name is mpi4py's
        pytest.fail("the set is not registered")


@pytest.fixture(autouse=True)
def _horovod(monkeypatch):
    monkeypatch.syspath_prepend(_PACKAGE)


def test_elastic_states_are_in_the_common_module():
    from horovod.common import elastic  # noqa: PLC0415

    class Counted(elastic.ObjectState):
        pass

    sparkhvd.torch.init()
    try:
        state = Counted(bcast_object=None, get_rank=None, epoch=3)
        train = elastic.run_fn(lambda state, factor: factor * state.epoch, lambda: pytest.fail("reset is not needed"))
        assert train(state, 2) == 6
    finally:
        sparkhvd.torch.shutdown()
    assert issubclass(elastic.ObjectState, elastic.State)


@pytest.mark.parametrize("module", ["torch", "tensorflow"])
def test_run_fn_is_in_the_elastic_module_of_the_framework(module):
    from horovod.common.elastic import run_fn  # noqa: PLC0415

    elastic = import_module(f"horovod.{module}.elastic")
    assert elastic.run_fn is run_fn
    assert "run_fn" in elastic.__all__


def test_the_autograd_functions_of_pytorch_are_the_collectives():
    import torch  # noqa: PLC0415
    from horovod.torch import mpi_ops as hvd  # noqa: PLC0415

    hvd.init()
    try:
        everyone, tensor = hvd.global_process_set, torch.arange(2.0, requires_grad=True)
        results = [
            hvd.HorovodAllreduce.apply(tensor, None, "x", hvd.Sum, 3.0, 1.0, everyone),
            hvd.HorovodAllgather.apply(tensor, "x", everyone),
            hvd.HorovodBroadcast.apply(tensor, 0, "x", everyone),
            hvd.HorovodAlltoall.apply(tensor, None, "x", everyone),
            hvd.HorovodReducescatter.apply(tensor, "x", hvd.Sum, everyone, 3.0, 1.0),
        ]
        sum(results).sum().backward()
    finally:
        hvd.shutdown()
    assert [result.tolist() for result in results] == [[0, 3], [0, 1], [0, 1], [0, 1], [0, 3]]
    assert tensor.grad.tolist() == [9, 9]


def test_the_autograd_functions_of_groups_return_tuples():
    import torch  # noqa: PLC0415
    from horovod.torch import mpi_ops as hvd  # noqa: PLC0415

    hvd.init()
    try:
        everyone, tensors = hvd.global_process_set, [torch.arange(2.0, requires_grad=True) for _ in range(2)]
        results = [
            hvd.HorovodGroupedAllreduce.apply(None, "x", hvd.Sum, 3.0, 1.0, everyone, *tensors),
            hvd.HorovodGroupedAllgather.apply("x", everyone, *tensors),
            hvd.HorovodGroupedReducescatter.apply("x", hvd.Sum, everyone, 3.0, 1.0, *tensors),
        ]
        sum(torch.cat(outputs).sum() for outputs in results).backward()
    finally:
        hvd.shutdown()
    assert all(isinstance(outputs, tuple) for outputs in results)
    assert [[output.tolist() for output in outputs] for outputs in results] == [
        [[0, 3]] * 2,
        [[0, 1]] * 2,
        [[0, 3]] * 2,
    ]
    assert [tensor.grad.tolist() for tensor in tensors] == [[7, 7]] * 2


@pytest.mark.parametrize("module", ["torch", "tensorflow"])
def test_the_operation_follows_from_arguments_in_the_module_of_collectives(module):
    hvd = import_module(f"horovod.{module}.mpi_ops")
    assert hvd.handle_average_backwards_compatibility(None, False) is hvd.Sum


def test_state_handlers_are_refused():
    from horovod.torch.elastic import state  # noqa: PLC0415

    class Handler(state.StateHandler):
        pass

    for call in (lambda: Handler(1), state.get_handler_registry, lambda: state.set_handler_registry([])):
        with pytest.raises(NotImplementedError, match=r"derive a class from hvd\.elastic\.State"):
            call()


def test_batch_normalization_of_tensorflow_has_a_module():
    import horovod.tensorflow as hvd  # noqa: PLC0415
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization  # noqa: PLC0415

    assert SyncBatchNormalization is hvd.SyncBatchNormalization


def test_the_modules_of_the_frameworks_have_horovods_helpers():
    import horovod.tensorflow as hvd  # noqa: PLC0415
    import horovod.torch  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    restored = hvd.util.refs_to_vars(hvd.util.vars_to_refs(variables))
    assert all(one is other for one, other in zip(restored, variables, strict=True))
    assert not hvd.gpu_available("tensorflow")
    assert hvd.check_num_rank_power_of_2(4)
    horovod.torch.check_extension("horovod.torch")
    hvd.check_extension("horovod.tensorflow")


def test_the_collectives_of_keras_take_a_value_and_a_name():
    import horovod.keras  # noqa: PLC0415
    import horovod.tensorflow.keras as hvd  # noqa: PLC0415

    assert hvd.allreduce is horovod.keras.allreduce
    hvd.init()
    try:
        results = [
            hvd.allreduce([2.0], "x"),
            hvd.allreduce(value=[2.0], name="x"),
            hvd.allgather([2.0], "x"),
            hvd.broadcast([2.0], 0, "x"),
            hvd.reducescatter([2.0], "x"),
        ]
    finally:
        hvd.shutdown()
    assert [float(result[0]) for result in results] == [2.0] * 5


def test_a_process_set_answers_before_it_is_registered():
    from horovod import torch as hvd  # noqa: PLC0415
    from horovod.common.process_sets import ProcessSet  # noqa: PLC0415

    assert hvd.ProcessSet is ProcessSet
    own, other = (ProcessSet(ranks_or_comm=ranks) for ranks in ([0], [1, 2]))
    hvd.init()
    try:
        assert [(some.size(), some.rank(), some.included()) for some in (own, other)] == [
            (None, None, True),
            (None, None, False),
        ]
        everyone = hvd.global_process_set
        assert (everyone.size(), everyone.rank(), everyone.included()) == (1, 0, True)
        assert ProcessSet(_Communicator()).included() is None
    finally:
        hvd.shutdown()


def test_the_functions_of_every_framework_are_methods_of_an_object():
    from horovod import torch as hvd  # noqa: PLC0415
    from horovod.common.basics import HorovodBasics  # noqa: PLC0415

    basics = HorovodBasics(__file__, "mpi_lib")
    basics.init()
    try:
        assert (basics.rank(), basics.size(), hvd.is_initialized()) == (0, 1, True)
        assert (basics.sycl_built(), hvd.sycl_built()) == (False, False)
        assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0]}, "Horovod's tests call this"
    finally:
        basics.shutdown()
    with pytest.raises(AttributeError, match=r"no attribute 'sise'. Did you mean 'size'"):
        basics.sise()


@pytest.mark.parametrize(
    ("op", "average", "chosen"),
    [(None, None, "Average"), (None, True, "Average"), (None, False, "Sum"), ("Max", None, "Max")],
)
def test_the_operation_follows_from_op_and_average(op, average, chosen):
    from horovod.common.util import get_average_backwards_compatibility_fun  # noqa: PLC0415

    choose = get_average_backwards_compatibility_fun(sparkhvd.torch)
    assert choose(op and getattr(sparkhvd.torch, op), average) is getattr(sparkhvd.torch, chosen)
    with pytest.raises(ValueError, match=r"op=max and average=False are both set\. Pass op only\."):
        choose(sparkhvd.torch.Max, False)


def test_common_helpers_answer_as_in_horovod():
    from horovod.common import util  # noqa: PLC0415

    assert [util.num_rank_is_power_2(ranks) for ranks in (0, 1, 2, 3, 4, 6)] == [False, True, True, False, True, False]
    assert [util.is_iterable([]), util.is_iterable(1)] == [True, False]
    assert [util.extension_available(name) for name in ("torch", "mxnet")] == [True, False]
    assert not util.gpu_available("torch")
    assert issubclass(util.HorovodVersionMismatchError, ImportError)


def test_helpers_of_estimators_are_in_their_module():
    from horovod.spark.common import constants, util  # noqa: PLC0415

    assert [util.to_list(var, 2) for var in (None, "a", ["a"], ["a", "b"])] == [None, ["a"] * 2, ["a"] * 2, ["a", "b"]]
    with pytest.raises(ValueError, match=r"^The list \['a', 'b'\] must have 3 entries, but has 2\.$"):
        util.to_list(["a", "b"], 3)
    assert not util.is_databricks()
    assert constants.BYTES_PER_GIB == 1024**3


def loader(queue_size, fail_at=None):
    from horovod.data import AsyncDataLoaderMixin, BaseDataLoader  # noqa: PLC0415

    class Squares(BaseDataLoader):
        def __init__(self, stop):
            self.stop = stop

        def __len__(self):
            return self.stop

        def _iterate(self):
            for number in range(self.stop):
                if number == fail_at:
                    raise OSError("unreadable")
                yield number

        def _process_batch(self, batch):
            return batch**2

    class AsyncSquares(AsyncDataLoaderMixin, Squares):
        pass

    return AsyncSquares(queue_size, False, stop=5)


@pytest.mark.parametrize("queue_size", [0, 1, 64])
def test_a_loader_reads_ahead_epoch_by_epoch(queue_size):
    squares = loader(queue_size)
    epochs = [list(squares) for _ in range(3)]
    squares.close_async_loader()
    assert epochs == [[0, 1, 4, 9, 16]] * 3
    assert len(squares) == 5


@pytest.mark.parametrize("queue_size", [0, 1, 64])
def test_the_error_of_a_loader_reaches_each_iteration(queue_size):
    squares = loader(queue_size, fail_at=2)
    for _ in range(2):
        batches = iter(squares)
        assert [next(batches), next(batches)] == [0, 1]
        with pytest.raises(OSError, match="unreadable"):
            next(batches)
    squares.close_async_loader()


def test_a_loader_that_waits_for_room_can_be_closed():
    squares = loader(1)
    assert next(iter(squares)) == 0
    squares.close_async_loader()
    assert list(squares) == []


def test_a_discovery_finds_the_slots_of_ray_by_address(monkeypatch):
    ray = pytest.importorskip("ray")
    from horovod.ray import elastic, elastic_v2  # noqa: PLC0415

    def node(address: str, cpus: float, gpus: float = 0.0, alive: bool = True) -> dict[str, object]:
        return {"Alive": alive, "NodeManagerAddress": address, "Resources": {"CPU": cpus, "GPU": gpus}}

    nodes = [node("a", 4, 1), node("b", 1), node("c", 8, 4, alive=False), node("a", 3)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert elastic.RayHostDiscovery(cpus_per_slot=2).find_available_hosts_and_slots() == {"a": 3}
    assert elastic_v2.RayHostDiscovery(True, cpus_per_worker=2).find_available_hosts_and_slots() == {"a": 1}


def test_the_parts_of_horovods_launcher_on_ray_are_refused():
    pytest.importorskip("ray")
    for module in ("strategy", "utils"):
        with pytest.raises(ImportError, match=r"Start jobs with horovod\.ray\.RayExecutor"):
            import_module(f"horovod.ray.{module}")


def test_callbacks_of_ray_have_no_effect(monkeypatch):
    pytest.importorskip("ray")
    from horovod.ray import ray_logger, runner  # noqa: PLC0415

    from sparkhvd.ray import RayExecutor  # noqa: PLC0415

    monkeypatch.setattr(RayExecutor, "run", lambda self, fn, args, kwargs: fn(*args))
    monkeypatch.setattr(RayExecutor, "execute", lambda self, fn: fn(self))
    executor = object.__new__(runner.RayExecutor)
    assert executor.run(int, ("3",), None, [print]) == 3
    assert executor.execute(id, callbacks=[print]) == id(executor)
    with pytest.warns(UserWarning, match="does not call its receivers"):
        ray_logger.log({"loss": 1.0})
