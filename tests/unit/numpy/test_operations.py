from __future__ import annotations

import array
import inspect

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

import sparkhvd.numpy as hvd
import sparkhvd.torch
from sparkhvd.errors import ConfigError, MismatchError, UnsupportedError
from tests.ranks import RankGroup

DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", ml_dtypes.bfloat16, "float32", "float64",
]  # fmt: skip


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 ranks", marks=pytest.mark.soak), pytest.param(3, id="3 ranks")]
)
def group(request):
    with RankGroup(request.param, imports=("torch", "sparkhvd.numpy")) as started:
        yield started


# Functions that the ranks run.


def reduce_every_dtype():
    """Reduce small integers, so that every dtype holds the sum exactly."""
    ranks = hvd.size()
    for dtype in DTYPES:
        for shape in [(), (0,), (5,), (3, 4)]:
            mine = np.full(shape, hvd.rank() + 1).astype(dtype)
            for op, expected in [(hvd.Sum, ranks * (ranks + 1) // 2), (hvd.Min, 1), (hvd.Max, ranks)]:
                result = hvd.allreduce(mine, op=op)
                assert (result.dtype, result.shape) == (mine.dtype, shape)
                assert (result == np.full(shape, expected).astype(dtype)).all(), (dtype, shape, op, result)
            assert (mine == np.full(shape, hvd.rank() + 1).astype(dtype)).all(), "the input must not change"


def reduce_in_every_form():
    ranks, rank = hvd.size(), hvd.rank()
    mean, total = (ranks - 1) / 2, ranks * (ranks - 1) / 2
    mine = np.full(4, float(rank))
    assert hvd.allreduce(mine).tolist() == [mean] * 4
    handle = hvd.allreduce_async(mine, name="form")
    assert hvd.synchronize(handle).tolist() == [mean] * 4
    assert hvd.poll(handle)
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=5.0)
    assert scaled.tolist() == [10 * total] * 4
    assert hvd.allreduce(mine + 1, "product", hvd.Product).tolist() == [float(np.prod(np.arange(1, ranks + 1)))] * 4
    same = hvd.allreduce(np.ones(4), op=hvd.Adasum)
    assert same == pytest.approx(np.ones(4))
    first, second = hvd.grouped_allreduce([mine, np.array([rank], np.int32)], op=hvd.Sum)
    assert (first.tolist(), second.tolist(), second.dtype) == ([total] * 4, [total], np.int32)
    assert hvd.synchronize(hvd.grouped_allreduce_async([mine]))[0].tolist() == [mean] * 4
    pair = [mine.copy(), mine.copy()]
    changed = hvd.grouped_allreduce_(pair, op=hvd.Sum)
    assert all(result is array for result, array in zip(changed, pair, strict=True))
    assert [array.tolist() for array in pair] == [[total] * 4] * 2
    hvd.synchronize(hvd.grouped_allreduce_async_(pair, op=hvd.Max))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert mine.tolist() == [total] * 4
    assert hvd.synchronize(hvd.allreduce_async_(mine)) is mine


def scatter_in_every_form():
    ranks, rank = hvd.size(), hvd.rank()
    rows = np.arange(2.0 * ranks + 1)
    mine = np.array_split(rows, ranks)[rank]
    assert hvd.reducescatter(rows).tolist() == mine.tolist()
    assert hvd.reducescatter(rows, "scatter", hvd.Sum, postscale_factor=2.0).tolist() == (2 * ranks * mine).tolist()
    assert hvd.synchronize(hvd.reducescatter_async(rows, op=hvd.Max)).tolist() == mine.tolist()
    assert [part.tolist() for part in hvd.grouped_reducescatter([rows, rows])] == [mine.tolist()] * 2
    assert hvd.synchronize(hvd.grouped_reducescatter_async([rows]))[0].tolist() == mine.tolist()


def move_every_dtype():
    ranks, rank = hvd.size(), hvd.rank()
    for dtype in DTYPES:
        rows = [np.full((sender, 2), sender).astype(dtype) for sender in range(ranks)]
        gathered = hvd.allgather(rows[rank])
        assert gathered.dtype == rows[0].dtype
        assert (gathered == np.concatenate(rows)).all()
        sent = hvd.broadcast(np.full(3, rank).astype(dtype), ranks - 1)
        assert (sent == np.full(3, ranks - 1).astype(dtype)).all()
        received = hvd.alltoall(np.arange(ranks).astype(dtype))
        assert (received == np.full(ranks, rank).astype(dtype)).all()


def move_in_every_form():
    ranks, rank = hvd.size(), hvd.rank()
    mine = np.arange(3.0) + rank
    everything = np.concatenate([np.arange(3.0) + sender for sender in range(ranks)])
    assert hvd.synchronize(hvd.allgather_async(mine, name="gather")).tolist() == everything.tolist()
    assert [part.tolist() for part in hvd.grouped_allgather([mine, mine])] == [everything.tolist()] * 2
    assert hvd.synchronize(hvd.grouped_allgather_async([mine]))[0].tolist() == everything.tolist()
    assert hvd.synchronize(hvd.broadcast_async(mine, 1)).tolist() == [1.0, 2.0, 3.0]
    assert mine[0] == rank, "the input must not change"
    splits = np.arange(ranks)  # no row to rank 0, one row to rank 1, ...
    rows, sent_by = hvd.alltoall(np.full(splits.sum(), rank), splits)
    assert (rows.tolist(), sent_by.tolist()) == (
        [sender for sender in range(ranks) for _ in range(rank)],
        [rank] * ranks,
    )
    rows, _ = hvd.synchronize(hvd.alltoall_async(mine[: ranks - 1], [1] * (ranks - 1) + [0], name="to all"))
    assert len(rows) == (ranks if rank < ranks - 1 else 0)
    assert hvd.broadcast_(mine, 1) is mine
    assert mine.tolist() == [1.0, 2.0, 3.0]
    assert hvd.synchronize(hvd.broadcast_async_(mine, 0)) is mine


class OnlyDlpack:
    """An array that NumPy can read only through DLPack, like an array on a GPU."""

    def __init__(self, values):
        self._values = values

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


def reduce_foreign_arrays():
    import jax.numpy as jnp  # noqa: PLC0415
    import torch  # noqa: PLC0415

    total = hvd.size() * (hvd.size() + 1) // 2
    mine = np.arange(6.0).reshape(2, 3) * (hvd.rank() + 1)
    same_values = {
        "strided": np.repeat(mine, 2, axis=1)[:, ::2],
        "transposed": mine.T.copy().T,
        "foreign byte order": mine.astype(">f8"),
        "list": mine.tolist(),
        "JAX": jnp.asarray(mine),
        "DLPack": OnlyDlpack(mine),
        "PyTorch, negated lazily": torch.complex(torch.zeros(2, 3).double(), -torch.from_numpy(mine)).conj().imag,
    }
    for form, values in same_values.items():
        assert np.array_equal(hvd.allreduce(values, op=hvd.Sum, name=form), np.arange(6.0).reshape(2, 3) * total), form
    flat = mine.ravel()
    for form, values in {
        "Arrow": pa.array(flat),
        "Arrow chunks": pa.chunked_array([flat[:2], flat[2:]]),
        "array": array.array("d", flat),
        "memory": memoryview(flat),
    }.items():
        assert np.array_equal(hvd.allreduce(values, op=hvd.Sum, name=form), np.arange(6.0) * total), form
    half = hvd.allreduce(jnp.full(3, hvd.rank() + 1, jnp.bfloat16), op=hvd.Sum)
    assert (half.dtype.name, half.astype(float).tolist()) == ("bfloat16", [float(total)] * 3)
    assert hvd.allreduce(hvd.rank() + 1, op=hvd.Sum) == total
    assert float(hvd.allreduce(1.5)) == 1.5


def change_other_buffers():
    total = hvd.size() * (hvd.size() + 1) // 2
    numbers = array.array("f", [hvd.rank() + 1.0] * 3)
    assert hvd.allreduce_(numbers, op=hvd.Sum) is numbers
    assert numbers.tolist() == [total] * 3
    content = bytearray([hvd.rank()] * 4)
    assert hvd.broadcast_(content, 1) is content
    assert content == bytearray([1] * 4)
    values = np.full((4, 4), hvd.rank() + 1.0)
    hvd.allreduce_(values[1:3], op=hvd.Sum)
    assert values.sum(axis=1).tolist() == [4.0 * (hvd.rank() + 1), 4.0 * total, 4.0 * total, 4.0 * (hvd.rank() + 1)]


def refuse_unsendable_arrays():
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    refused = {
        r"^The array is a masked array, whose mask would be lost\. Pass": np.ma.masked_array([1.0, 2.0], [True, False]),
        r"^The array is a masked array, whose mask would": [np.ma.masked_array([1.0, 2.0], [True, False])],
        r"^The array, a ChunkedArray, has 1 null value, which .* Replace nulls first": pa.chunked_array([[1], [None]]),
        r"^The array has dtype complex128; collectives take bfloat16, .*broadcast_object\(\)": np.ones(2, complex),
        r"^The array has dtype object; collectives take": [None, 1.0],
        r"^The array has dtype uint32; collectives take": np.ones(2, np.uint32),
        r"^The array, a list, cannot be read as an array: .*inhomogeneous": [[1.0], [1.0, 2.0]],
    }
    for message, values in refused.items():
        for collective in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises(ConfigError, match=message):
                collective(values)
        with pytest.raises(ConfigError, match=message):
            hvd.broadcast(values, 0)
        with pytest.raises(ConfigError, match=message.replace("The array", "Array 1 of the group 'g'")):
            hvd.grouped_allreduce([1.0, values], name="g")
    with pytest.raises(ConfigError, match=r"(?s)^The array, a \w*Tracer\w*, cannot be read as an array: .*traced"):
        jax.jit(hvd.allreduce)(jnp.ones(2))


def refuse_unwritable_arrays():
    import jax.numpy as jnp  # noqa: PLC0415

    fixed = np.ones(2)
    fixed.flags.writeable = False
    refused = {
        "of shape (2,) and dtype <f8 is read-only": fixed,
        "of shape (2,) and dtype <f8 is not contiguous": np.ones(4)[::2],
        "of shape (2,) and dtype >f8 is not in this machine's byte order": np.ones(2, ">f8"),
        "a list, has no memory that a collective can write into": [1.0, 2.0],
        "a float, has no memory that a collective can write into": 1.0,
        "of shape (3,) and dtype |u1 is read-only": b"abc",
    }
    for message, values in refused.items():
        for change in (hvd.allreduce_, hvd.allreduce_async_, lambda array: hvd.broadcast_(array, 0)):
            with pytest.raises(ConfigError) as refusal:
                change(values)
            assert message in str(refusal.value)
        with pytest.raises(ConfigError) as refusal:
            hvd.grouped_allreduce_([np.ones(2), values])
        assert str(refusal.value).startswith("Array 1 of the group")
    with pytest.raises(ConfigError, match="read-only"):
        hvd.allreduce_(jnp.ones(2))


def refuse_other_arguments():
    with pytest.raises(ConfigError, match="splits must hold one number of rows"):
        hvd.alltoall(np.ones(2), [0.5, 1.5])
    with pytest.raises(ConfigError, match="splits must hold one number of rows"):
        hvd.alltoall(np.ones(2), [None, 1])
    with pytest.raises(ConfigError, match=r"splits must hold one number of rows, .* per rank, got \[\[1\], \[1, 0\]\]"):
        hvd.alltoall(np.ones(2), [[1], [1, 0]])
    for not_a_list in (np.ones((2, 2)), [], 1.0):
        with pytest.raises(ConfigError, match="takes a list of at least one array"):
            hvd.grouped_allgather(not_a_list)
    with pytest.raises(UnsupportedError, match="cannot use op=Adasum"):
        hvd.reducescatter(np.ones(2), op=hvd.Adasum)
    with pytest.raises(ConfigError, match="is not a handle"):
        hvd.synchronize(np.ones(2))


def reduce_different_dtypes():
    with pytest.raises(MismatchError, match=r"float32.*float64|float64.*float32"):
        hvd.allreduce(np.ones(2, "float32" if hvd.rank() else "float64"), name="types")


def send_to_some_ranks():
    last = hvd.size() - 1
    last_only = hvd.add_process_set([last])
    try:
        if last_only.included():
            assert hvd.allreduce(hvd.rank(), op=hvd.Sum, process_set=last_only) == last
            assert hvd.allgather([last], process_set=last_only).tolist() == [last]
            assert hvd.allgather_object({last}, process_set=last_only) == [{last}]
            hvd.barrier(last_only)
    finally:
        hvd.remove_process_set(last_only)
    assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    hvd.barrier()


def run_out_of_rows():
    batches = range(2 + hvd.rank())
    sums = [float(hvd.allreduce(1.0, op=hvd.Sum)) for _ in batches]
    assert hvd.join() == hvd.size() - 1
    return sums


def train_with_a_state():
    state = hvd.elastic.ObjectState(weights=np.full(2, float(hvd.rank() + 1)), step=0)

    @hvd.elastic.run
    def train(state, steps):
        while state.step < steps:
            state.weights += hvd.allreduce(np.ones(2))
            state.step += 1
            state.commit()
        return state.weights.tolist()

    return train(state, 3)


def synchronize_different_values():
    state = hvd.elastic.ObjectState(weights=0.0, **{("epoch", "batch")[hvd.rank() > 0]: 0})
    with pytest.raises(
        MismatchError,
        match=r"synchronized: only rank 0 has the value 'epoch', only rank 1 has the value 'batch'\. A new",
    ):
        state.sync()


def wait_twice():
    handle = hvd.allgather_async([hvd.rank()])
    assert handle.wait() is handle.wait(), "the result is made once"


CASES = [
    reduce_every_dtype, reduce_in_every_form, scatter_in_every_form, move_every_dtype, move_in_every_form,
    reduce_foreign_arrays, change_other_buffers, refuse_unsendable_arrays, refuse_unwritable_arrays,
    refuse_other_arguments, reduce_different_dtypes, send_to_some_ranks, synchronize_different_values, wait_twice,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_case_passes_on_every_rank(group, case):
    group.run(case)


def test_a_rank_without_further_rows_joins(group):
    for rank, sums in enumerate(group.run(run_out_of_rows)):
        assert sums[:2] == [group.size] * 2
        assert len(sums) == rank + 2


def test_a_state_starts_with_the_values_of_rank_0(group):
    assert group.run(train_with_a_state) == [[4.0, 4.0]] * group.size


def test_the_module_exports_the_names_of_sparkhvd_torch_that_do_not_need_torch():
    torch_only = {
        "Compression", "Compressor", "DistributedOptimizer", "SyncBatchNorm", "broadcast_optimizer_state",
        "broadcast_parameters", "sparse_allreduce", "sparse_allreduce_async",
    }  # fmt: skip
    assert set(hvd.__all__) == set(sparkhvd.torch.__all__) - torch_only
    assert hvd.allreduce.__name__ == "allreduce"
    assert hvd.broadcast_.__name__ == "broadcast_"
    assert inspect.signature(hvd.allreduce).return_annotation == "Array"
    assert "Combine the arrays of all ranks" in inspect.getdoc(hvd.allreduce)
    with pytest.raises(AttributeError, match="Did you mean 'allreduce'"):
        _ = hvd.allreduced
