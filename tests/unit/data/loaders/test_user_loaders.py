from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sparkhvd.comm import session
from sparkhvd.data import AsyncDataLoaderMixin, BaseDataLoader
from sparkhvd.data.loaders.user_loaders import LoaderSource
from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import DataError, ParamError
from sparkhvd.estimators.params.params import EstimatorParams
from tests.ranks import RankGroup

SCHEMA = DataSchema(
    (ColumnSpec("x", "float64", (2,), "feature", "array"), ColumnSpec("y", "int64", (), "label", "scalar"))
)


class Counted(BaseDataLoader):
    """Batches of these sizes; their labels contain rank, epoch and batch."""

    def __init__(self, sizes, rank=0):
        self.sizes, self.rank, self.epoch = sizes, rank, -1

    def __len__(self):
        return len(self.sizes)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _iterate(self):
        for number, rows in enumerate(self.sizes):
            label = 100 * self.rank + 10 * self.epoch + number
            yield {"x": np.zeros((rows, 2)), "y": np.full(rows, label), "thread": threading.current_thread().name}

    def _process_batch(self, batch):
        return {**batch, "x": batch["x"] + 1}


class Ahead(AsyncDataLoaderMixin, Counted):
    pass


@pytest.fixture(scope="module")
def group():
    with RankGroup(2) as started:
        yield started


def epochs_of(sizes_of_ranks):
    rank = session.current().world.rank
    source = LoaderSource(Counted(sizes_of_ranks[rank], rank), SCHEMA, "train", session.current())
    epochs = [
        [(batch.columns["y"].tolist(), batch.rows, batch.global_rows, batch.columns["x"].sum()) for batch in batches]
        for batches in (source.epoch(0), source.epoch(1, 1))
    ]
    return source.steps(), epochs


def test_ranks_with_different_numbers_of_batches_have_equal_steps(group):
    (steps, first), (same, second) = group.run(epochs_of, [[3, 1], [2, 2, 1]])
    assert (steps, same) == (3, 3)
    assert first[0] == [([0, 0, 0], 3, 5, 6.0), ([1], 1, 3, 2.0), ([], 0, 1, 0.0)]
    assert second[0] == [([100, 100], 2, 5, 4.0), ([101, 101], 2, 3, 4.0), ([102], 1, 1, 2.0)]
    assert first[1] == [([11], 1, 3, 2.0), ([], 0, 1, 0.0)], "another epoch, from a later step"


def rest_of_epoch(first_step):
    source = LoaderSource(Counted([1, 0, 2, 3]), SCHEMA, "train", session.current())
    return [batch.columns["y"].tolist() for batch in source.epoch(0, first_step)]


def test_an_epoch_continues_after_the_batches_that_it_has_delivered_even_if_a_step_had_no_rows_on_any_rank(group):
    assert group.run(rest_of_epoch, 0) == [[[0], [2, 2], [3, 3, 3]]] * 2
    assert group.run(rest_of_epoch, 2) == [[[3, 3, 3]]] * 2


def test_a_thread_loads_ahead_and_ends_with_the_iteration():
    ahead = iter(Ahead([1] * 5, async_loader_queue_size=2))
    assert next(ahead)["thread"] == "sparkhvd-loader"
    ahead.close()
    assert [batch["y"].tolist() for batch in Ahead([1, 2])] == [[-10], [-9, -9]]
    assert {batch["thread"] for batch in Ahead([1], async_loader_queue_size=0)} == {"MainThread"}


class Slow(Ahead):
    """Yields its batches when ``proceed`` is set."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.reads, self.proceed = threading.Event(), threading.Event()

    def _iterate(self):
        self.reads.set()
        assert self.proceed.wait(60)
        yield from super()._iterate()


def stopped_while_loading():
    loader, stop = Slow([1]), StopSignal()
    source = LoaderSource(loader, SCHEMA, "train", session.current())
    with ThreadPoolExecutor(1) as consumer:
        batches = consumer.submit(list, source.epoch(0, 0, stop))
        assert loader.reads.wait(60)
        stop.stop()
        loader.proceed.set()
        return type(batches.exception(60)).__name__


def test_another_thread_stops_an_epoch_that_waits_for_a_batch(group):
    assert group.run(stopped_while_loading) == ["StoppedError"] * 2


def test_an_error_in_the_thread_reaches_the_user():
    class Broken(Ahead):
        def _iterate(self):
            yield {"x": np.zeros((1, 2))}
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        list(Broken([1]))


def refused(kind):
    class Wrong(Counted):
        def _iterate(self):
            rows = {"x": np.zeros((2, 2)), "y": np.zeros(2, int)}
            yield {"short": {**rows, "y": rows["y"][:1]}, "missing": {"x": rows["x"]}}.get(kind, rows)
            if kind == "more":
                yield rows

    try:
        list(LoaderSource(Wrong([] if kind == "none" else [2]), SCHEMA, "train", session.current()).epoch(0))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("none", "train loaders have no batches on any rank"),
        ("more", "loader yielded more than 1 batch in an epoch, although its len() is 1"),
        ("missing", "yielded the columns ['x'] without 'y'"),
        ("short", "yielded columns of different lengths: {'x': 2, 'y': 1}"),
    ],
)
def test_batches_that_cannot_be_trained_on_are_refused(group, kind, message):
    assert all(message in text for text in group.run(refused, kind))


def test_a_data_module_is_passed_as_a_class():
    with pytest.raises(ParamError, match=r"must be a subclass of sparkhvd\.data\.DataModule: the class, not an inst"):
        EstimatorParams(data_module=Counted([1]))
