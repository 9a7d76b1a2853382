from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import sparkhvd.tensorflow as hvd
from sparkhvd.comm import interface
from sparkhvd.errors import ConfigError, MismatchError

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


# Functions that the ranks run.


def graph(function):
    """Return a ``tf.function`` without AutoGraph, which would look for source code that these ranks do not have."""
    return tf.function(function, autograph=False)


def reduce_every_dtype():
    for name in DTYPES:
        for shape in [(), (0,), (5,), (3, 4)]:
            mine = tf.cast(tf.fill(shape, hvd.rank() + 1), name)
            for op, expected in [(hvd.Sum, 3), (hvd.Min, 1), (hvd.Max, 2), (hvd.Product, 2)]:
                result = hvd.allreduce(mine, op=op)
                assert result.dtype == mine.dtype
                assert np.array_equal(result.numpy(), np.full(shape, expected).astype(result.numpy().dtype)), (name, op)
            assert np.array_equal(mine.numpy(), np.full(shape, hvd.rank() + 1).astype(mine.numpy().dtype))
    assert hvd.allreduce(tf.constant([True, False]), op=hvd.Max).numpy().tolist() == [True, False]


def agree(operation, tensor):
    """Return the result of an operation, after checking that eager mode and a graph agree."""
    eager = operation(tensor)
    traced = graph(operation)(tensor)
    assert np.array_equal(eager.numpy(), traced.numpy(), equal_nan=True), (eager, traced)
    return eager.numpy().tolist()


def reduce_in_every_mode():
    mine = tf.fill([3], float(hvd.rank()))
    assert agree(hvd.allreduce, mine) == [0.5] * 3
    assert agree(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=2.0, postscale_factor=5.0), mine) == [10.0] * 3
    assert agree(lambda t: hvd.allreduce(t, compression=hvd.Compression.fp16), mine) == [0.5] * 3
    subnormal = tf.constant([2.0**-16] * 3, tf.float16)  # TensorFlow's threads replace such float32 numbers by 0
    assert agree(lambda t: hvd.allreduce(t, op=hvd.Sum), subnormal) == [2.0**-15] * 3
    beyond_float16 = tf.constant([1e30], tf.bfloat16)
    kept = hvd.allreduce(beyond_float16, compression=hvd.Compression.fp16)
    assert (kept.dtype, float(kept[0])) == (tf.bfloat16, float(beyond_float16[0]))
    both = graph(lambda t: hvd.grouped_allreduce([t, 2 * t], op=hvd.Sum))(mine)
    assert [value.numpy().tolist() for value in both] == [[1.0] * 3, [2.0] * 3]
    twice = graph(lambda t: hvd.grouped_allreduce([t, t], op=hvd.Sum))(mine)
    assert [value.numpy().tolist() for value in twice] == [[1.0] * 3] * 2


def reduce_the_memory_of_tensors():
    """Reduce CPU tensors through the code path that passes the memory of GPU tensors to NCCL."""
    from sparkhvd.tensorflow import gpu  # noqa: PLC0415

    mine = tf.constant([[1.0, -2.0], [np.nan, np.inf]]) * (hvd.rank() + 1)
    memory = gpu.memory_of(mine)
    assert memory[1:3] == ((2, 2), "float32")
    assert (memory.address, memory.device) == (np.asarray(mine).ctypes.data, None)
    assert not gpu.uses_nccl([mine], hvd.Sum, None)
    decides, gpu.uses_nccl = gpu.uses_nccl, lambda tensors, op, process_set: True
    before = mine.numpy()
    sums = agree(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=2.0, postscale_factor=5.0), mine)
    assert np.array_equal(sums, [[30.0, -60.0], [np.nan, np.inf]], equal_nan=True)
    both = graph(lambda t: hvd.grouped_allreduce([t, tf.cast(t, tf.bfloat16)]))(mine)
    assert [value[0].numpy().tolist() for value in both] == [[1.5, -3.0], [1.5, -3.0]]
    assert np.array_equal(mine.numpy(), before, equal_nan=True)
    variable = tf.Variable([float(hvd.rank())])
    with tf.GradientTape() as tape:
        loss = variable * variable
    assert hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0].numpy().tolist() == [1.0]
    gpu.uses_nccl = decides


def gather_and_broadcast():
    mine = tf.fill([hvd.rank() + 1, 2], hvd.rank())
    assert agree(hvd.allgather, mine) == [[0, 0], [1, 1], [1, 1]]
    assert agree(lambda t: hvd.broadcast(t, 1), tf.fill([2], hvd.rank())) == [1, 1]
    hvd.barrier()


def move_rows():
    rank = hvd.rank()
    mine = tf.reshape(tf.range(6), [3, 2]) * (rank + 1)
    assert agree(lambda t: hvd.reducescatter(t, op=hvd.Sum), mine) == ([[0, 3], [6, 9]] if rank == 0 else [[12, 15]])
    halved = agree(lambda t: hvd.reducescatter(t, hvd.Compression.fp16, postscale_factor=0.5), tf.ones([2]))
    assert halved == [0.5]
    assert agree(hvd.alltoall, tf.range(4) + 10 * rank) == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    splits = [1, 2] if rank == 0 else [0, 3]
    sent = lambda t: hvd.alltoall(t, splits)[0]  # noqa: E731
    assert agree(sent, mine) == ([[0, 1]] if rank == 0 else [[2, 3], [4, 5], [0, 2], [4, 6], [8, 10]])
    assert hvd.alltoall(mine, tf.constant(splits))[1].numpy().tolist() == ([1, 0] if rank == 0 else [2, 3])
    for invalid in ([[1], [1, 0]], [0.5, 2.5], [None, 1]):
        with pytest.raises(ConfigError, match=r"splits must hold one number of rows, at least 0, per rank, got \["):
            hvd.alltoall(mine, invalid)


def move_in_groups():
    rank = hvd.rank()
    both = lambda t: hvd.grouped_allgather([t, tf.cast(t, tf.float32)[:rank]])  # noqa: E731
    for results in (both(tf.range(2)), graph(both)(tf.range(2))):
        assert [result.numpy().tolist() for result in results] == [[0, 1, 0, 1], [0.0]]
    parts = hvd.grouped_reducescatter([tf.range(2), tf.fill([2, 1], 4.0)], op=hvd.Max, name="parts")
    assert [part.numpy().tolist() for part in parts] == [[rank], [[4.0]]]


def use_process_sets_and_join():
    rank = hvd.rank()
    mine = hvd.add_process_set([1])
    if rank == 1:
        assert hvd.allreduce(tf.constant(3.0), op=hvd.Sum, process_set=mine).numpy() == 3
        assert hvd.allgather(tf.constant([3.0]), process_set=mine).numpy().tolist() == [3]
        assert hvd.broadcast(tf.constant(2), 1, process_set=mine).numpy() == 2
        assert hvd.reducescatter(tf.range(2), op=hvd.Sum, process_set=mine).numpy().tolist() == [0, 1]
        assert hvd.alltoall(tf.range(2), process_set=mine).numpy().tolist() == [0, 1]
        hvd.barrier(process_set=mine)
    hvd.remove_process_set(mine)
    if rank == 0:
        assert hvd.allreduce(tf.constant(2.0), op=hvd.Sum, name="alone").numpy() == 2
    assert hvd.join().numpy() in {0, 1}


def differentiate_while_a_rank_has_joined():
    """Compute gradients on rank 1, while rank 0 has joined and contributes no rows."""
    outcome = None
    if hvd.rank() == 1:
        mine = tf.Variable([[1.0], [2.0]])

        def gradient_of_allgather():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(hvd.allgather(mine, name="late") * [[4.0], [6.0]])
            return tape.gradient(loss, mine)

        outcome = [gradient.numpy().tolist() for gradient in (gradient_of_allgather(), graph(gradient_of_allgather)())]
        with tf.GradientTape() as tape:
            scattered = hvd.reducescatter(mine, op=hvd.Sum, name="late")
        with pytest.raises(tf.errors.InvalidArgumentError, match="some ranks have joined"):
            tape.gradient(scattered, mine)
    hvd.join()
    return outcome


def differentiate(in_graph):
    """Differentiate `rank + 1` times a weighted sum of the result, so that gradients differ between ranks."""
    factor = hvd.rank() + 1.0

    def gradient_of(operation, rows=3):
        mine = tf.ones([rows])
        with tf.GradientTape() as tape:
            tape.watch(mine)
            result = operation(mine)
            loss = tf.reduce_sum(result * tf.range(1.0, tf.cast(tf.size(result), tf.float32) + 1.0)) * factor
        return tape.gradient(loss, mine)

    run = graph(gradient_of) if in_graph else gradient_of
    assert run(hvd.allreduce).numpy().tolist() == [1.5, 3.0, 4.5]
    assert run(lambda t: hvd.allreduce(t, op=hvd.Sum)).numpy().tolist() == [3.0, 6.0, 9.0]
    gathered = run(hvd.allgather, 2).numpy().tolist()
    assert gathered == ([1.5, 3.0] if hvd.rank() == 0 else [4.5, 6.0])
    sent = run(lambda t: hvd.broadcast(t, 0)).numpy().tolist()
    assert sent == ([1.5, 3.0, 4.5] if hvd.rank() == 0 else [0.0] * 3)
    assert run(hvd.reducescatter).numpy().tolist() == [1.0, 2.0, 2.0]
    assert run(lambda t: hvd.reducescatter(t, op=hvd.Sum)).numpy().tolist() == [2.0, 4.0, 4.0]
    exchanged = run(lambda t: hvd.alltoall(t, [1, 2])[0]).numpy().tolist()
    assert exchanged == ([1.0, 2.0, 4.0] if hvd.rank() == 0 else [2.0, 6.0, 8.0])
    factors = {"prescale_factor": factor, "postscale_factor": 3.0}  # every rank scales its rows differently
    weighted = run(lambda t: hvd.allreduce(t, op=hvd.Sum, **factors)).numpy()
    assert (weighted / factor).tolist() == [9.0, 18.0, 27.0]
    weighted = run(lambda t: hvd.reducescatter(t, **factors)).numpy()
    assert (weighted / factor).tolist() == [3.0, 6.0, 6.0]


def differentiate_twice(in_graph):
    """Compute gradients of gradients through the collectives."""
    values = tf.constant([1.0 + hvd.rank(), 2.0])
    total = np.array([3.0, 4.0])

    def second_derivative(operation):
        with tf.GradientTape() as outer:
            outer.watch(values)
            with tf.GradientTape() as inner:
                inner.watch(values)
                loss = tf.reduce_sum(operation(values) ** 3)
            penalty = tf.reduce_sum(inner.gradient(loss, values))
        return outer.gradient(penalty, values)

    run = graph(second_derivative) if in_graph else second_derivative
    np.testing.assert_allclose(run(lambda t: hvd.allreduce(t, op=hvd.Sum)), 4 * 6 * total)
    np.testing.assert_allclose(run(hvd.allreduce), 6 * total / 2)
    np.testing.assert_allclose(run(lambda t: hvd.allreduce(t, op=hvd.Sum, postscale_factor=0.5)), 3 * total)
    np.testing.assert_allclose(run(lambda t: hvd.allgather(t, name="rows")), 3 * values)


def combine_captured_tensors():
    """Capture eager tensors in a graph; the numbers that processes give to tensors may differ between ranks."""
    for _ in range(5 * hvd.rank()):
        tf.constant(1.0)
    value = tf.constant([1.0 + hvd.rank()])
    combined = graph(lambda: [hvd.allreduce(value, op=hvd.Sum), hvd.allgather(value), hvd.broadcast(value, 1)])()
    assert [tensor.numpy().tolist() for tensor in combined] == [[3.0], [1.0, 2.0], [2.0]]


def combine_tensors_of_layers():
    """Create more layers on rank 0, which Keras counts in the names of their tensors."""
    import keras  # noqa: PLC0415  (the ranks have no sources, and most of them need no Keras)

    layers = [keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2 - hvd.rank())]

    def combine(values):
        output = layers[-1](values)
        return [hvd.allreduce(output, op=hvd.Sum), hvd.allgather(output), hvd.broadcast(output, 1)]

    combined = graph(combine)(tf.constant([[1.0 + hvd.rank()]]))
    assert [tensor.numpy().tolist() for tensor in combined] == [[[3.0]], [[1.0], [2.0]], [[2.0]]]


def combine_with_a_missing_gradient():
    """Compute gradients while rank 0 has none for the first variable; it joins, and thereby contributes zeros."""
    variables = [tf.Variable([1.0]) for _ in range(3)]
    with tf.GradientTape() as tape:
        loss = tf.add_n([(i + 1.0) * variables[i] for i in range(hvd.rank() == 0, 3)])
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
    hvd.join()
    assert [g is None for g in gradients] == [hvd.rank() == 0, False, False]
    assert [float(g[0]) for g in gradients if g is not None] == [0.5, 2.0, 3.0][hvd.rank() == 0 :]


def reduce_slices():
    rank = hvd.rank()
    slices = tf.IndexedSlices(tf.fill([2, 3], float(rank + 1)), tf.constant([rank, 2]), tf.constant([4, 3]))
    mean = tf.convert_to_tensor(hvd.allreduce(slices)).numpy()
    assert mean[:, 0].tolist() == [0.5, 1.0, 1.5, 0.0]
    weighted = hvd.allreduce(slices, op=hvd.Sum, prescale_factor=rank + 1.0, postscale_factor=2.0)
    assert tf.convert_to_tensor(weighted).numpy()[:, 0].tolist() == [2.0, 8.0, 10.0, 0.0]
    gradients = []
    for op in (hvd.Sum, hvd.Average):
        dense, sparse = tf.Variable(tf.ones([4, 3])), tf.Variable(tf.ones([2, 3]))
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.IndexedSlices(sparse * 1.0, tf.constant([0, 2]), tf.constant([4, 3]))
            reduced = tf.convert_to_tensor(hvd.allreduce(rows, op=op)) * float(rank + 1)
            dense_result = hvd.allreduce(dense, op=op) * float(rank + 1)
        sparse_gradient, dense_gradient = tape.gradient(reduced, sparse), tape.gradient(dense_result, dense)
        gradients.append(bool(tf.reduce_all(tf.equal(sparse_gradient, tf.gather(dense_gradient, [0, 2])))))
    assert gradients == [True, True], gradients
    counts = tf.IndexedSlices(tf.constant([[7], [-7]]), tf.constant([rank, 2]), tf.constant([4, 1]))
    means = hvd.allreduce(counts)
    assert (means.indices.numpy().tolist(), means.values[:, 0].numpy().tolist()) == ([0, 2, 1], [3.5, -7.0, 3.5])
    large = tf.IndexedSlices(tf.constant([[2**53 + 1]], tf.int64), tf.constant([rank]), tf.constant([4, 1]))
    assert hvd.allreduce(large, op=hvd.Sum).values[:, 0].numpy().tolist() == [2**53 + 1] * 2
    short = tf.IndexedSlices(tf.constant([[3]], tf.int16), tf.constant([1]), tf.constant([4, 1]))
    assert hvd.allreduce(short, op=hvd.Sum).values[:, 0].numpy().tolist() == [6]


def scale_in_double_precision():
    value = tf.Variable(tf.ones([1], tf.float64))
    with tf.GradientTape() as tape:
        result = hvd.allreduce(value, op=hvd.Average, prescale_factor=0.1)
    slices = tf.IndexedSlices(tf.ones([1], tf.float64), tf.constant([0]), tf.constant([1]))
    scaled = hvd.allreduce(slices, op=hvd.Sum, prescale_factor=0.1)
    return tape.gradient(result, value).numpy().tolist(), scaled.values.numpy().tolist()


def average_integer_slices(in_graph):
    """Average rows that several ranks have, without truncating intermediate values."""
    rank = hvd.rank()
    means_by_dtype = {}
    for dtype in (tf.uint8, tf.int8, tf.int32, tf.int64):  # TensorFlow itself cannot sum rows of uint16 and int16
        slices = tf.IndexedSlices(tf.cast([[3], [rank]], dtype), tf.constant([1, 1]), tf.constant([2, 1]))
        dense = tf.cast([rank], tf.float32)

        def reduce(slices=slices, dense=dense, dtype=dtype):
            alone = hvd.allreduce(slices, name=f"alone.{dtype.name}")
            group = hvd.grouped_allreduce([dense, slices, slices], name=f"group.{dtype.name}")
            scaled = hvd.allreduce(slices, prescale_factor=0.5, postscale_factor=2.0, name=f"scaled.{dtype.name}")
            assert group[0].dtype == tf.float32
            return [tf.convert_to_tensor(result) for result in (alone, *group[1:], scaled)]

        results = (graph(reduce) if in_graph else reduce)()
        means_by_dtype[dtype.name] = [(result.dtype.name, result.numpy()[:, 0].tolist()) for result in results]
    total = hvd.allreduce(tf.IndexedSlices(tf.constant([[3]]), tf.constant([0])), op=hvd.Sum, name="total")
    assert total.dtype == tf.int32
    return means_by_dtype


def train_with_tape(in_graph, sparse_as_dense):
    """Compare two ranks with half of the rows each with one process with all rows."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 7, 16)
    targets = rng.normal(size=(16, 4)).astype(np.float32)

    def trained(rows, wrap):
        table = tf.Variable(tf.reshape(tf.range(28.0) / 28, [7, 4]))
        weights, shifts = tf.Variable(tf.eye(4)), tf.Variable(tf.zeros([7, 4]))

        def step():
            with tf.GradientTape() as tape:
                outputs = tf.matmul(tf.gather(table, ids[rows]), weights) + tf.gather(shifts, ids[rows])
                loss = tf.reduce_mean((outputs - targets[rows]) ** 2)
            gradients = wrap(tape).gradient(loss, [table, weights, shifts])
            for variable, gradient in zip([table, weights, shifts], gradients, strict=True):
                variable.assign_sub(0.5 * tf.convert_to_tensor(gradient))

        run = graph(step) if in_graph else step
        for _ in range(4):
            run()
        return table.numpy(), weights.numpy(), shifts.numpy()

    wrap = lambda tape: hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense)  # noqa: E731
    alone = trained(slice(None), lambda tape: tape)
    together = trained(slice(hvd.rank() * 8, hvd.rank() * 8 + 8), wrap)
    for expected, result in zip(alone, together, strict=True):
        np.testing.assert_allclose(expected, result, rtol=1e-5, atol=1e-6)


def keep_gradients_of_local_layers(in_graph):
    import keras  # noqa: PLC0415  (the ranks have no sources, and most of them need no Keras)

    local_layer = keras.layers.Dense(1, use_bias=False)
    local_layer.build((None, 1))
    table, alone, shared = (tf.Variable([[1.0], [1.0]]) for _ in range(3))
    sources = [local_layer.trainable_weights[0], table, alone, shared]

    def gradients(wrap):
        with tf.GradientTape(persistent=True) as tape:
            terms = [tf.reduce_sum(local_layer(tf.ones([1, 1]))), tf.reduce_sum(tf.gather(table, [1]))]
            loss = (tf.add_n(terms) + tf.reduce_sum(alone) + tf.reduce_sum(shared)) * (hvd.rank() + 1.0)
        tape = wrap(tape)
        tape.register_local_source(table)
        tape.register_local_source(alone)
        gradients_of_tape = tape.gradient(loss, sources)
        for_local, for_all = tape.get_local_and_global_gradients(loss, sources, use_generic_names=True)
        assert [source is expected for (source, _), expected in zip(for_local + for_all, sources, strict=True)] == [
            True
        ] * 4
        assert [len(for_local), len(for_all)] == [3, 1]
        sums = [tf.reduce_sum(tf.convert_to_tensor(gradient)) for gradient in gradients_of_tape]
        for total, (_, gradient) in zip(sums, for_local + for_all, strict=True):
            tf.debugging.assert_equal(total, tf.reduce_sum(tf.convert_to_tensor(gradient)))
        return sums

    def both():
        scaled = gradients(lambda tape: hvd.PartialDistributedGradientTape(tape, local_layers=local_layer))
        whole = gradients(
            lambda tape: hvd.PartialDistributedGradientTape(
                tape, local_layers=[local_layer], scale_local_gradients=False
            )
        )
        return scaled, whole

    mine = hvd.rank() + 1.0
    scaled, whole = (graph(both) if in_graph else both)()
    assert [float(total) for total in scaled] == [mine / 2, mine / 2, mine, 3.0]
    assert [float(total) for total in whole] == [mine, mine, 2 * mine, 3.0]


def broadcast_and_gather_objects():
    variable = tf.Variable([float(hvd.rank())])
    hvd.broadcast_variables([variable], root_rank=1)
    assert variable.numpy().tolist() == [1.0]
    graph(lambda: hvd.broadcast_variables([variable], root_rank=0))()
    assert variable.numpy().tolist() == [1.0]
    for wrap in (graph, lambda function: function):
        wrap(lambda: hvd.broadcast_variables([]))()
    assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    alone = sets[hvd.rank()]
    hvd.broadcast_variables([variable], root_rank=hvd.rank(), process_set=alone)
    assert hvd.broadcast_object(hvd.rank(), hvd.rank(), process_set=alone) == hvd.rank()
    assert hvd.allgather_object(hvd.rank(), process_set=alone) == [hvd.rank()]
    for process_set in sets:
        hvd.remove_process_set(process_set)


def broadcast_every_dtype():
    """Broadcast variables of every dtype, and restore them from a state."""
    dtypes = (tf.uint32, tf.uint64, tf.complex64, tf.complex128, tf.bfloat16, tf.bool, tf.int64)
    for shape in ((), (2, 3), (0, 3)):
        variables = [tf.Variable(tf.cast(tf.fill(shape, hvd.rank() + 1), dtype)) for dtype in dtypes]
        hvd.broadcast_variables(variables, root_rank=1)
        for variable in variables:
            assert variable.shape == shape
            assert np.all(variable.numpy() == (True if variable.dtype == tf.bool else 2))
        state = hvd.elastic.TensorFlowState(variables)
        for variable in variables:
            variable.assign(tf.cast(tf.fill(shape, hvd.rank()), variable.dtype))
        graph(lambda variables=variables: hvd.broadcast_variables(variables))()
        assert not any(np.any(variable.numpy()) for variable in variables)
        state.restore()
        assert all(np.all(variable.numpy()) for variable in variables)
    with pytest.raises(ConfigError, match=r"^Variable 0 has dtype string; collectives take"):
        hvd.broadcast_variables([tf.Variable("text")])


def synchronize_different_variables():
    variables = [tf.Variable([1.0]), tf.Variable(2)][: hvd.rank() + 1]
    with pytest.raises(MismatchError) as caught:
        hvd.elastic.TensorFlowState(variables).sync()
    return str(caught.value)


# The tests.


def test_every_dtype_is_reduced_by_every_operator(group):
    group.run(reduce_every_dtype)


def test_eager_mode_and_graphs_agree(group):
    group.run(reduce_in_every_mode)
    group.run(gather_and_broadcast)


def test_memory_of_tensors_is_reduced_in_eager_mode_and_graphs(group):
    group.run(reduce_the_memory_of_tensors)


def test_rows_move_equally_in_eager_mode_and_graphs(group):
    group.run(move_rows)
    group.run(move_in_groups)


def test_every_collective_takes_a_process_set_and_ranks_may_join_early(group):
    group.run(use_process_sets_and_join)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_collectives_have_gradients(group, in_graph):
    group.run(differentiate, in_graph)


def test_gradients_are_correct_while_a_rank_has_joined(group):
    assert group.run(differentiate_while_a_rank_has_joined) == [None, [[[2.0], [3.0]]] * 2]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_collectives_have_second_gradients(group, in_graph):
    group.run(differentiate_twice, in_graph)


def test_a_graph_combines_eager_tensors_that_it_captures(group):
    group.run(combine_captured_tensors)


def test_a_graph_combines_tensors_of_layers_if_one_rank_has_created_more_layers(group):
    group.run(combine_tensors_of_layers)


def test_a_missing_gradient_on_one_rank_does_not_mix_up_the_others(group):
    group.run(combine_with_a_missing_gradient)


def test_indexed_slices_are_gathered_and_summed(group):
    group.run(reduce_slices)


def test_scale_factors_have_the_precision_of_the_values(group):
    assert group.run(scale_in_double_precision) == [([0.1], [0.2])] * 2


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_the_mean_of_indexed_slices_with_integers_is_not_truncated(group, in_graph):
    quotients = {"uint8": "float32", "int8": "float32", "int32": "float64", "int64": "float64"}
    expected = {dtype: [(real, [0.0, 3.5])] * 4 for dtype, real in quotients.items()}
    assert group.run(average_integer_slices, in_graph) == [expected, expected]


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["sparse", "dense"])
def test_ranks_with_a_distributed_tape_train_like_one_big_batch(group, in_graph, sparse_as_dense):
    group.run(train_with_tape, in_graph, sparse_as_dense)


def test_variables_and_objects_are_broadcast(group):
    group.run(broadcast_and_gather_objects)
    group.run(broadcast_every_dtype)


def test_ranks_with_different_variables_do_not_wait_for_each_other(group):
    for message in group.run(synchronize_different_variables):
        assert "cannot be synchronized: only rank 1 has a variable of int32[]. " in message


def test_the_module_exports_the_common_interface_without_duplicates():
    assert set(interface.__all__) < set(hvd.__all__) <= set(dir(hvd))
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(getattr(hvd, name) is getattr(interface, name) for name in interface.__all__)
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_gradients_of_local_layers_are_not_exchanged_and_are_available_separately(group, in_graph):
    group.run(keep_gradients_of_local_layers, in_graph)


def test_the_error_for_an_optimizer_names_the_keras_module():
    with pytest.raises(AttributeError, match=r"Use sparkhvd\.keras\.DistributedOptimizer, or DistributedGradientTape"):
        hvd.DistributedOptimizer  # noqa: B018


def test_a_local_layer_of_a_tape_must_be_built():
    layer = SimpleNamespace(name="later", built=False, trainable_weights=[])
    with pytest.raises(ConfigError, match="'later' has no variables before it is built"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer)


@pytest.mark.parametrize("collective", [hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter])
def test_ragged_and_sparse_tensors_are_rejected_with_a_remedy(collective):
    with pytest.raises(ConfigError, match=r"no tf\.RaggedTensor; pass its flat_values and its row_lengths\(\)"):
        collective(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    with pytest.raises(ConfigError, match=r"no tf\.SparseTensor; convert it with tf\.sparse\.to_dense"):
        collective(tf.sparse.from_dense([[1.0, 0.0]]))


def test_graphs_and_sessions_of_tensorflow_1_are_rejected_at_once():
    with tf.Graph().as_default(), pytest.raises(ConfigError, match="move the training step"):
        hvd.allreduce(tf.constant([1.0]))


def test_graphs_for_xla_are_rejected_at_once():
    with pytest.raises(ConfigError, match="jit_compile=False"):
        tf.function(hvd.allreduce, jit_compile=True)(tf.constant([1.0]))
