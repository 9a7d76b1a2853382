"""A program that was written for Horovod, with imports and calls that must work unchanged.

python -m tests.unit.compat.horovod_program
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import horovod
import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner import run
from horovod.torch.mpi_ops import rank, size
from sparkdl import HorovodRunner

from sparkhvd.comm import nccl
from tests.scripts import print_results


def train_torch() -> dict[str, object]:
    hvd.init()
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), hvd.Compression.none, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    before = model.weight.detach().clone()
    model(torch.full((3, 2), 1.0 + rank())).mean().backward()
    optimizer.step()
    sparse = torch.sparse_coo_tensor([[rank()]], [1.0], (2,))
    return {
        "step": (before - model.weight.detach()).tolist(),
        "sum": hvd.allreduce_(torch.ones(1), None, "a", hvd.Sum).item(),
        "half": hvd.allreduce(torch.ones(1), None, "b", hvd.Compression.fp16, hvd.Sum, 0.5).item(),
        "sparse": hvd.sparse_allreduce_async(sparse, "s", hvd.Sum)().to_dense().tolist(),
        "splits": splits_of(hvd.alltoall, hvd.synchronize(hvd.alltoall_async(torch.ones(2), [1, 1]))),
        "joined": hvd.join(-1) in range(size()),
        "built": hvd.nccl_built() == nccl.version(),
    }


def splits_of(alltoall, *results) -> list[object]:
    """Return the result of an alltoall without splits, and the received splits of the other alltoalls."""
    alone = alltoall(torch.ones(2)).tolist()
    received_splits = [splits for _, splits in (alltoall(torch.ones(2), torch.tensor([1, 1])), *results)]
    return [alone, *([str(splits.dtype), splits.tolist()] for splits in received_splits)]


def use_other_features() -> dict[str, object]:
    """Return the results of Horovod's other features: process sets, optimizer states, warnings and refusals."""
    hvd.init()
    only_first = hvd.add_process_set([0])
    weight = torch.nn.Parameter(torch.zeros(1))
    local = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=only_first)
    (weight.sum() * (1.0 + rank())).backward()
    local.step()

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    before = model.weight.item()
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    created = [len(optimizer.state), model.weight.grad.item(), model.weight.item() == before]

    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()

    rows = torch.nn.Embedding(4, 1, sparse=True)
    lazy = torch.optim.SparseAdam(list(rows.parameters()), lr=0.1)
    lazy = hvd.DistributedOptimizer(lazy, sparse_as_dense=True, backward_passes_per_step=2)
    lazy.set_backward_passes_per_step(1)
    passes = lazy.backward_passes_per_step
    rows(torch.tensor([rank()])).sum().backward()
    lazy.step()
    changed = rows.weight.grad.coalesce().indices().tolist()

    try:
        hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    except NotImplementedError as error:
        refused = str(error)
    if rank() == 1:
        hvd.barrier()  # so that the first tensor of rank 0 is in flight when it submits the second
    handle = hvd.allreduce_async(torch.ones(1), name="twice")
    try:
        refused_twice = rank() == 0 and not hvd.allreduce_async(torch.ones(1), name="twice")
    except ValueError:
        refused_twice = True
    gathered = hvd.allgather_async(torch.ones(1), name="twice")
    if rank() == 0:
        hvd.barrier()
    return {
        "local": weight.item(),
        "created": created,
        "warned": [str(warning.message).split(".")[1] for warning in caught],
        "names": sorted(optimizer._parameter_names.values()),
        "options": [
            optimizer.op is hvd.Average,
            optimizer.process_set is hvd.global_process_set,
            local.process_set is only_first,
            passes,
            optimizer.gradient_predivide_factor,
        ],
        "changed": changed,
        "refused": refused,
        "refused twice": refused_twice,
        "in flight": hvd.synchronize(handle).item(),
        "of the same name": hvd.synchronize(gathered).tolist(),
    }


def use_torch() -> tuple[dict[str, object], dict[str, object], str]:
    """Run the parts of the program one after the other: importing PyTorch takes most of the time of a rank."""
    return train_torch(), use_other_features(), disagree()


def disagree() -> str:
    hvd.init()
    try:
        hvd.allreduce(torch.ones(1 + rank()), name="x")
    except HorovodInternalError as error:
        return type(error).__name__
    return "nothing"


def train_tensorflow() -> dict[str, object]:
    import horovod.tensorflow as hvd  # noqa: PLC0415
    import horovod.tensorflow.keras as hvd_keras  # noqa: PLC0415
    import keras  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    hvd.init()
    weight = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        loss = weight * (1.0 + hvd.rank())
    tape = hvd.DistributedGradientTape(tape, "", "", hvd.Compression.none, False, hvd.Sum)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), None, "", "", hvd_keras.Compression.fp16)
    model.compile(optimizer, "mse")
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
    ]
    model.fit(np.ones((4, 2)), np.full((4, 1), 1.0 + hvd.rank()), verbose=0, callbacks=callbacks)
    constant = keras.initializers.Constant(hvd.rank())
    frozen = [keras.layers.Dense(1, use_bias=False, kernel_initializer=constant, trainable=False) for _ in range(2)]
    unequal = keras.Sequential([keras.Input((1,)), *frozen])
    unequal.compile(loss="mse")
    start = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(1, "", frozen[0].variables)
    unequal.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0, callbacks=[start])
    weights = hvd_keras.allgather(model.layers[0].kernel[None], name="weights").numpy()
    errors = []
    for call in (
        lambda: hvd.allreduce(tf.ones(1 + hvd.rank()), name="shapes"),
        lambda: hvd.alltoall(tf.ones(3)),
        lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0])), op=hvd.Max),
        lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0])), prescale_factor=0.5),
        lambda: hvd.grouped_allreduce(
            [tf.ones(1), tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]))], postscale_factor=2.0
        ),
    ):
        try:
            call()
        except (HorovodInternalError, ValueError, NotImplementedError) as error:
            error_types = (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError, NotImplementedError)
            errors.append([error_type.__name__ for error_type in error_types if isinstance(error, error_type)])
    rows = tf.IndexedSlices(tf.ones([1, 1], tf.int32), tf.constant([hvd.rank()]))  # without a dense_shape
    mixed = hvd.grouped_allreduce([rows, tf.ones(1)], op=hvd.Sum)
    axes = tf.Variable([0.0, 0.0])
    with tf.GradientTape() as orthogonal:
        total = tf.reduce_sum(axes * tf.one_hot(hvd.rank(), 2))
    orthogonal = hvd.DistributedGradientTape(orthogonal, op=hvd.Adasum)
    only_first = hvd.add_process_set([0])
    with tf.GradientTape() as local:
        local_loss = weight * (1.0 + hvd.rank())
    local = hvd.DistributedGradientTape(local, process_set=only_first)
    received = hvd.alltoall(tf.ones(2), [1, 1])[1]
    last = hvd.join()
    return {
        "integers": [received.dtype.name, received.numpy().tolist(), last.dtype.name, int(last) in range(2)],
        "errors": errors,
        "kernels": [float(layer.kernel[0, 0]) for layer in frozen],
        "mixed": [mixed[0].values.numpy().tolist(), mixed[0].indices.numpy().tolist(), mixed[1].numpy().tolist()],
        "adasum": orthogonal.gradient(total, axes).numpy().tolist(),
        "local": float(local.gradient(local_loss, weight)),
        "gradient": float(tape.gradient(loss, weight)),
        "sum": hvd.allreduce(tf.ones(1), None, "", "", hvd.Compression.none, hvd.Sum).numpy().tolist(),
        "scattered": hvd.reducescatter(tf.ones(2), "", hvd.Compression.none, hvd.Sum).numpy().tolist(),
        "ops": [int(hvd.size_op()), int(hvd.rank_op()), int(hvd.local_size_op()), int(hvd.local_rank_op())],
        "broadcast": [variable.numpy().tolist() for variable in hvd.broadcast_([tf.Variable([hvd.rank()])], 1)],
        "equal": bool((weights[0] == weights[1]).all()),
    }


def lose_a_rank(folder: str) -> list[int]:
    hvd.init()
    killed, state = Path(folder, "killed"), hvd.elastic.ObjectState(step=0, sizes=[])

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> list[int]:
        state.sizes.append(size())
        while state.step < 6:
            hvd.allreduce(torch.ones(1))
            state.step += 1
            if state.step == 3 and rank() == 1 and not killed.exists():
                killed.touch()
                os._exit(1)
            state.commit()
        return state.sizes

    return train(state)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        script = Path(folder, "hosts")
        script.write_text("#!/bin/sh\necho localhost\n")
        script.chmod(0o700)
        elastic = horovod.run(
            lose_a_rank,
            (folder,),
            min_num_proc=2,
            slots=2,
            host_discovery_script=str(script),
            network_interfaces=["lo"],
            cooldown_range=(0.1, 1.0),
        )
    trained, some, errors = zip(*horovod.run(use_torch, np=2, hosts="localhost:2", use_gloo=True), strict=True)
    print_results(
        {
            "version": horovod.__version__,
            "torch": trained,
            "some": some,
            "errors": errors,
            "tensorflow": run(train_tensorflow, num_proc=2),
            "elastic": elastic,
            "runner": HorovodRunner(np=-2).run(disagree),
        }
    )
