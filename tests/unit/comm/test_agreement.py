from __future__ import annotations

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.comm.agreement import agree
from tests.ranks import RankGroup


@pytest.fixture(scope="module")
def group():
    with RankGroup(3) as started:
        yield started


def of_rank(arrays, weights, options):
    """Return a rank's arrays after the agreement; rank n begins with ``arrays[n]``."""
    rank = session.current().world.rank
    return {**arrays[rank], **agree(session.current(), arrays[rank], weights[rank], **options)}


def agreed(group, arrays, weights=(1, 1, 1), **options):
    results = group.run(of_rank, [dict(each) for each in arrays], weights, options)
    for other in results[1:]:
        assert sorted(other) == sorted(results[0])
        for name, array in results[0].items():
            assert np.array_equal(array, other[name], equal_nan=array.dtype.kind == "f"), name
            assert array.dtype == other[name].dtype
    return results[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_floating_point_arrays_become_their_weighted_mean(group, dtype):
    found = agreed(group, [{"a": np.array([[value, 8.0]], dtype)} for value in (1, 3, 7)], weights=(1, 0, 3))["a"]
    assert found.dtype == dtype
    assert found.tolist() == [[5.5, 8.0]]


def test_other_types_take_the_values_of_the_first_rank_with_a_weight(group):
    arrays = [{"i": np.array(rank + 5), "b": np.array([rank == 1])} for rank in range(3)]
    found = agreed(group, arrays, weights=(0, 2, 9))
    assert found == {"i": 6, "b": [True]}


def test_without_weights_all_ranks_count_equally(group):
    found = agreed(group, [{"a": np.array([float(rank)]), "n": np.array(rank)} for rank in range(3)], weights=(0, 0, 0))
    assert found == {"a": [1.0], "n": 0}


def test_a_combined_variance_includes_the_distance_of_the_means(group):
    """The result is the variance of all rows together, even if the mean is much larger than the deviation."""
    random = np.random.default_rng(1)
    rows = [1e6 + rank + random.normal(size=(40 * (rank + 1), 2)) for rank in range(3)]
    arrays = [{"mean": part.mean(0), "var": part.var(0), "mask": np.array([-np.inf, np.nan, 0.0])} for part in rows]
    found = agreed(group, arrays, [len(part) for part in rows], means_of_variances={"var": "mean"})
    assert found["mean"] == pytest.approx(np.concatenate(rows).mean(0), rel=1e-12)
    assert found["var"] == pytest.approx(np.concatenate(rows).var(0), rel=1e-6)
    assert np.array_equal(found["mask"], [-np.inf, np.nan, 0.0], equal_nan=True)


def test_infinities_and_nan_that_all_ranks_share_stay_in_arrays_that_differ(group):
    arrays = [{"mask": np.array([-np.inf, np.nan, 3.0 * rank])} for rank in range(3)]
    assert np.array_equal(agreed(group, arrays)["mask"], [-np.inf, np.nan, 3.0], equal_nan=True)


def test_arrays_of_other_shapes_or_on_some_ranks_only_are_copied(group):
    arrays = [
        {"grows": np.zeros(2), "a": np.ones(1)},
        {"grows": np.ones(3), "a": np.zeros(1)},
        {"grows": np.ones(3), "a": np.zeros(1), "late": np.full(2, 7.0), "also": np.ones(1)},
    ]
    found = agreed(group, [arrays[2], arrays[1], arrays[0]], weights=(0.5, 2, 2), never_averaged=("a",))
    assert found["late"].tolist() == [7.0, 7.0]
    assert found["grows"].tolist() == [1.0, 1.0, 1.0]
    assert found["a"].tolist() == [0.0]


def equal_bits(value):
    return agree(session.current(), {"a": np.full(3, value), "n": np.array(3)}, session.current().world.rank + 0.3)


def test_equal_arrays_keep_every_bit(group):
    assert group.run(equal_bits, 0.1) == [{}, {}, {}]
