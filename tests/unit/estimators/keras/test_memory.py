"""A fit with Keras leaves neither rows nor model in the memory of its process, nor a thread that waits for rows."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkhvd.comm import session
from sparkhvd.data.read.prefetch import StoppedError
from sparkhvd.errors import HorovodInternalError
from sparkhvd.estimators.keras.dataset import BatchDataset
from sparkhvd.estimators.keras.losses.divisors import CurrentBatch
from sparkhvd.estimators.keras.plugin import PLUGIN
from tests.unit.estimators.arrays import ArraySource, Hooks, partition_rows, spec
from tests.unit.estimators.keras.networks import SEQUENCES, masked_network, parameters, raise_lost_rank, sequences


def fit_once(*, completes):
    """Return weak references to the objects of a fit, by name."""
    world = session.current().world
    params = parameters(SEQUENCES, model=masked_network(), loss="mse", metrics=None)
    train_spec = spec(SEQUENCES, epochs=2, backward_passes_per_step=2)
    trainer = PLUGIN.trainer(PLUGIN.pack(params), train_spec, world)
    train, validation = (partition_rows(sequences(16), [(4, 4)] * 2, world.rank, SEQUENCES) for _ in range(2))
    if completes:
        trainer.fit(train, validation, Hooks())
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CurrentBatch, "factor", raise_lost_rank)
            with pytest.raises(HorovodInternalError, match="rank 1 was lost"):
                trainer.fit(train, validation, Hooks())
    optimizer = trainer._model.optimizer
    held = {"model": trainer._model, "optimizer": optimizer, "sum": next(iter(optimizer._accumulation._sums.values()))}
    held |= {"rows": train, "array": train.columns["x"], "validation": validation}
    return {name: weakref.ref(value) for name, value in held.items()}


def remaining_after_fit(completes):
    references = fit_once(completes=completes)
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("completes", [True, False], ids=["complete", "lost rank"])
def test_rows_and_model_are_freed_after_a_fit(group, completes):
    assert group.run(remaining_after_fit, completes) == [[], []]


class Waiting(ArraySource):
    """Waits for its rows until it is stopped."""

    def epoch(self, number, first_step=0, stop=None):
        stopped = threading.Event()
        with stop.calling(stopped.set):
            self.reads.set()
            assert stopped.wait(60)
        raise StoppedError
        yield


def error_of_a_reader_at_close():
    source = Waiting(SEQUENCES, sequences(8), [list(range(8))], [8])
    source.reads = threading.Event()
    params = parameters(SEQUENCES, model=masked_network(), loss="mse", metrics=None)
    package = PLUGIN.trainer(PLUGIN.pack(params), spec(SEQUENCES), session.current().world)._package
    data = BatchDataset(source, package.inputs, package.outputs)
    with ThreadPoolExecutor(1) as reader:
        batch = reader.submit(data.__getitem__, 0)
        assert source.reads.wait(60)
        data.close()
        return type(batch.exception(60)).__name__


def test_close_ends_the_wait_of_another_thread_for_rows(group):
    assert group.run(error_of_a_reader_at_close) == ["StoppedError"] * 2
