"""A rank's batches as a dataset for ``model.fit``."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import keras
import numpy as np

from sparkhvd._util.counts import counted
from sparkhvd.data.read.batches import Arrays, Batch, BatchSource
from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.data.schema import columns
from sparkhvd.errors import DataError
from sparkhvd.estimators.keras.inputs import Ports


class BatchDataset(keras.utils.PyDataset):  # type: ignore[misc]  # keras has no types
    """The batches of one split, in order; requesting batch 0 starts the epoch numbered ``epoch``.

    Keras may prefetch batches, so methods identify a batch by its index in the epoch. Keras has no empty steps, so a
    rank without rows in a batch gets a placeholder row. The rank's share of the step is then 0, and ``was_empty``
    returns True.

    Args:
        source: the batches.
        inputs: maps columns to inputs.
        outputs: maps columns to targets.
        passes: batches per optimizer step; the last step of an epoch may have fewer.
        sample: the placeholder row until this rank has a row of its own; None uses zeros, which may be invalid values.
    """

    def __init__(
        self, source: BatchSource, inputs: Ports, outputs: Ports, passes: int = 1, sample: Arrays | None = None
    ) -> None:
        super().__init__()
        self.epoch = 0
        self.first_step = 0  # the step at which this part of the epoch begins
        self.rows = 0  # rows of this rank that have been delivered in the epoch
        self._batches_left: int | None = None
        self._ready: list[float] = []  # monotonic time at which each batch of the epoch was ready
        self._rows_of_all: list[int] = []  # rows of all ranks in each batch of the epoch
        self._counts: list[int] = []  # rows of this rank up to and including each batch of the epoch
        self._source = source
        self._inputs = inputs
        self._outputs = outputs
        self._weights = [column.name for column in source.schema.of("weight")]
        self._stop_signal = StopSignal()
        self._lock = threading.Lock()
        self._batches: Iterator[Batch] | None = None
        self._next = 0
        self._passes = passes
        self._read: deque[Batch] = deque()  # batches of the current step that are not delivered yet
        self._rows_of_step = 0
        self._shares: list[float] = []  # the result of ``share_of`` for every batch of the epoch
        self._empty: set[int] = set()
        # Later, a row of the previous batch replaces it, because a synthetic row may have invalid values.
        self._placeholder = sample or {column.name: columns.blank(column, 1) for column in source.schema.columns}

    def __len__(self) -> int:
        if self._batches_left is not None:
            return self._batches_left
        return self.steps() - self.first_step

    def steps(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._source.steps()

    def begins_within(self) -> bool:
        """Return whether the next epoch is the rest of an epoch that an earlier run began."""
        return self.first_step > 0 or self._batches_left is not None

    def begin_within(self, first_step: int, batches: int | None) -> None:
        """Begin the next epochs at a step; ``batches`` is their number of batches, or None for all that follow."""
        self.first_step, self._batches_left = first_step, batches

    def rows_until(self, batch: int) -> int:
        """Return the number of this rank's rows up to and including a batch of the epoch."""
        with self._lock:
            return self._counts[batch]

    def rows_of(self, batch: int) -> tuple[int, int]:
        """Return the rows of this rank and of all ranks in a batch of the epoch."""
        with self._lock:
            before = self._counts[batch - 1] if batch else 0
            return self._counts[batch] - before, self._rows_of_all[batch]

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        with self._lock:
            if index == 0:
                self._start()
            if index != self._next or self._batches is None:
                raise DataError(
                    f"Keras requested batch {index} after batch {self._next - 1}; batches can only be read in order."
                )
            self._next += 1
            batch = self._next_batch(self._batches)
            arrays, rows = batch.columns, batch.rows
            self.rows += rows
            self._counts.append(self.rows)
            self._rows_of_all.append(batch.global_rows)
            self._shares.append(rows / self._rows_of_step)
            if rows == 0:
                self._empty.add(index)
                arrays, rows = self._placeholder, 1
            self._placeholder = {name: array[:1] for name, array in arrays.items()}
            arranged = self._arranged(arrays, rows)
            self._ready.append(time.monotonic())
            return arranged

    def waited(self, batch: int, since: float) -> float:
        """Return how many seconds after ``since`` a batch of the epoch became ready, at least 0.

        Keras may fetch the batch within the step, or prefetch it in another thread.
        """
        with self._lock:
            return max(self._ready[batch] - since, 0.0)

    def share_of(self, batch: int) -> float:
        """Return this rank's rows in a batch of the epoch, as a fraction of all ranks' rows in the batch's step."""
        with self._lock:
            return self._shares[batch]

    def begins_step(self, index: int) -> bool:
        """Return whether a batch of the epoch is the first one of a step."""
        return index % self._passes == 0

    def is_end_of_step(self, index: int) -> bool:
        """Return whether a batch of the epoch is the last one of a step."""
        return (index + 1) % self._passes == 0 or index + 1 == len(self)

    def may_be_empty(self, index: int) -> bool:
        """Return whether this rank may have no rows in a step of the epoch; does not read the step."""
        return not self._source.has_rows(self.first_step + index)

    def was_empty(self, index: int) -> bool:
        """Return whether this rank had no rows in a step of the epoch."""
        with self._lock:
            return index in self._empty

    def close(self) -> None:
        """Stop reading; a thread of TensorFlow that waits for a batch raises an error."""
        self._stop_signal.stop()
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        self._batches = iter(self._source.epoch(self.epoch, self.first_step, self._stop_signal))
        self._next = self.rows = 0
        self._counts.clear()
        self._rows_of_all.clear()
        self._ready.clear()
        self._read.clear()
        self._shares.clear()
        self._empty.clear()

    def _stop(self) -> None:
        batches, self._batches = self._batches, None
        if (close := getattr(batches, "close", None)) is not None:
            close()

    def _next_batch(self, batches: Iterator[Batch]) -> Batch:
        """Return the next batch; read its whole step, whose number of rows is needed."""
        if not self._read:
            self._read.extend(islice(batches, self._passes))
            self._rows_of_step = sum(batch.global_rows for batch in self._read)
        if not self._read:
            raise DataError(
                f"The data module's loaders have only {counted(self._next - 1, 'batch', 'batches')} with rows in this "
                f"epoch, although Keras expects {len(self)}. Return from __len__ the number of batches that have rows."
            )
        return self._read.popleft()

    def _arranged(self, arrays: Arrays, rows: int) -> tuple[Any, ...]:
        pair = (self._inputs.arrays(arrays, rows), self._outputs.arrays(arrays, rows))
        if not self._weights:
            return pair
        weights = arrays[self._weights[0]].astype(np.float32, copy=False)
        return (*pair, self._outputs.arranged([weights] * len(self._outputs.ports)))


def as_input_of_fit(data: BatchDataset) -> Any:
    """Return the dataset as an argument for one call of ``model.fit``; on TensorFlow, a ``tf.data.Dataset``.

    Keras would create almost the same dataset. But that one would tune itself (``without_tuning`` says why it must
    not), and it would keep the rows in memory, because TensorFlow keeps the Python functions of pipelines until the
    process ends. This dataset holds only a weak reference, so the caller must keep ``data`` until ``fit`` has returned.
    """
    if keras.config.backend() != "tensorflow":
        return data
    import tensorflow as tf  # noqa: PLC0415  (only the backend in use is imported)
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter  # noqa: PLC0415  (not exported)

    from sparkhvd.data.loaders.tf_data import without_tuning  # noqa: PLC0415  (imports TensorFlow)

    dataset = PyDatasetAdapter(weakref.proxy(data)).get_tf_dataset()
    return without_tuning(dataset.apply(tf.data.experimental.assert_cardinality(len(data))))
