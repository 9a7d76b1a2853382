"""Base classes for users' own loaders, for the estimators' parameter ``data_module``.

A data module is created on every rank and returns loaders of that rank's batches: dicts of numpy arrays by column, with
the rows as the first dimension. Ranks may have different numbers of rows and of batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import numpy as np
import numpy.typing as npt

from sparkhvd._util.counts import counted
from sparkhvd.comm import objects
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.data.read.batches import Batch
from sparkhvd.data.read.prefetch import Prefetcher, StopSignal
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.errors import DataError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from types import TracebackType

Columns = Mapping[str, npt.NDArray[np.generic]]

_BATCH_SECONDS = 600.0


@dataclass(frozen=True)
class DataContext:
    """The arguments of a data module.

    Attributes:
        store: the Store that contains the prepared rows.
        train_files: paths in the Store of the Parquet files with the training rows, the same on every rank.
        val_files: the same for the validation rows; empty without validation.
        schema: the columns to deliver.
        rank: this rank.
        size: the number of ranks.
        batch_size: rows of a training batch.
        val_batch_size: rows of a validation batch.
        shuffle: whether every epoch should have its own order.
        seed: the seed of the order.
    """

    store: Store
    train_files: tuple[str, ...]
    val_files: tuple[str, ...]
    schema: DataSchema
    rank: int
    size: int
    batch_size: int
    val_batch_size: int
    shuffle: bool
    seed: int


class BaseDataLoader(ABC):
    """Batches of one rank; iterating over it once is one epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of an epoch, the same in every epoch."""

    @abstractmethod
    def _iterate(self) -> Iterator[Columns]:
        """Yield the batches of an epoch."""

    def _process_batch(self, batch: Columns) -> Columns:
        """Transform a batch before training uses it."""
        return batch

    def set_epoch(self, epoch: int) -> None:  # noqa: B027  (optional)
        """Prepare the order of the next epoch (from 0); called before every epoch."""

    def __iter__(self) -> Iterator[Columns]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Prefetches batches in a thread; list it before the loader's base class.

    Args:
        *args: arguments of the loader.
        async_loader_queue_size: the most batches to prefetch; 0 loads each batch on demand.
        **kwargs: arguments of the loader.

    Examples:
        >>> class Ahead(AsyncDataLoaderMixin, MyLoader):  # doctest: +SKIP
        ...     pass
    """

    def __init__(self, *args: Any, async_loader_queue_size: int = 64, **kwargs: Any) -> None:
        self._queue_size = async_loader_queue_size
        self._stop_signal = StopSignal()
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Columns]:
        batches: Iterable[Columns] = super().__iter__()  # type: ignore[misc]  # of the loader
        if self._queue_size < 1:
            yield from batches
            return
        ahead = Prefetcher(
            [lambda: ((batch, 1) for batch in batches)],
            limit=self._queue_size,
            threads=1,
            name="sparkhvd-loader",
            timeout=_BATCH_SECONDS,
            waiting_for="the next batch of the data module's loader",
        )
        try:
            with self._stop_signal.calling(ahead.stop):
                yield from ahead
        finally:
            ahead.stop()
            ahead.join()

    def stop_waiting(self) -> None:
        """Stop the iterations, for the time after the training; a thread that waits for a batch raises an error."""
        self._stop_signal.stop()


class DataModule(ABC):
    """Creates the loaders of a rank; a context manager that is entered before the training and exited after it.

    Args:
        context: the files, the columns and this rank.
    """

    def __init__(self, context: DataContext) -> None:
        self.context = context

    @abstractmethod
    def train_data(self) -> BaseDataLoader:
        """Return the loader of this rank's training batches."""

    def val_data(self) -> BaseDataLoader | None:
        """Return the loader of this rank's validation batches; None means no validation."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(  # noqa: B027  (optional)
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release the resources of the module."""


def loads_rows(value: object) -> TypeGuard[type[DataModule]]:
    """Return whether ``data_module`` replaces the readers; frameworks may accept other kinds of data modules."""
    return isinstance(value, type) and issubclass(value, DataModule)


class LoaderSource:
    """The batches of a loader as a ``BatchSource`` for estimators; construction is collective.

    The ranks agree on the number of steps once, and on the number of rows in every step.
    """

    def __init__(self, loader: BaseDataLoader, schema: DataSchema, split: str, communicator: Communicator) -> None:
        self._loader = loader
        self._schema = schema
        self._split = split
        self._communicator = communicator
        self._steps = max(objects.allgather_object(communicator, len(loader), name=f"batches of {split} loaders"))
        if self._steps < 1:
            raise DataError(
                f"The data module's {split} loaders have no batches on any rank: len() is 0 for all of them. Check "
                "what __len__ of the loader returns."
            )

    @property
    def schema(self) -> DataSchema:
        """Return the columns of every batch."""
        return self._schema

    def steps(self) -> int:
        """Return the number of steps per epoch: the largest number of batches of a rank."""
        return self._steps

    def rows(self) -> int:
        """Return 0, since the number is unknown before the batches are loaded."""
        return 0

    def has_rows(self, step: int) -> bool:  # noqa: ARG002
        """Return False, since the rows are unknown before the batches are loaded."""
        return False

    def epoch(self, number: int, first_step: int = 0, stop: StopSignal | None = None) -> Iterator[Batch]:
        """Yield the batches of an epoch from a step on; ranks that have run out of them get empty ones.

        Steps without rows on any rank are neither yielded nor counted.
        A stop ends the wait for an ``AsyncDataLoaderMixin``; it cannot interrupt the code of the user's loader.
        """
        self._loader.set_epoch(number)
        stopping: AbstractContextManager[None] = nullcontext()
        if stop is not None and isinstance(self._loader, AsyncDataLoaderMixin):
            stopping = stop.calling(self._loader.stop_waiting)
        with stopping, closing(_generator(self._loader)) as batches:
            to_skip = first_step
            for step in range(self._steps):
                batch = next(batches, None)
                if step == self._steps - 1:
                    self._refuse_more(batches)
                arrays = columns.no_rows(self._schema) if batch is None else self._checked(batch)
                rows = len(next(iter(arrays.values())))
                total = self._communicator.allreduce(
                    np.array([rows], np.int64), ReduceOp.SUM, name=f"rows of {self._split} step {step}"
                )
                if total[0] == 0:
                    continue
                if to_skip > 0:
                    to_skip -= 1
                else:
                    yield Batch(arrays, rows, int(total[0]))

    def _refuse_more(self, batches: Iterator[Columns]) -> None:
        if next(batches, None) is not None:
            raise DataError(
                f"The data module's {self._split} loader yielded more than {counted(self._steps, 'batch', 'batches')} "
                f"in an epoch, although its len() is {len(self._loader)} and the largest len() of all ranks is "
                f"{self._steps}. The rest would be ignored: return the number of batches from __len__, or end _iterate "
                "after that many."
            )

    def _checked(self, batch: Columns) -> dict[str, npt.NDArray[np.generic]]:
        missing = [name for name in self._schema.names() if name not in batch]
        if missing:
            raise DataError(
                f"The data module's {self._split} loader yielded the columns {list(batch)} without {missing[0]!r}; "
                "every batch must have all selected columns."
            )
        arrays = {name: np.require(batch[name], requirements=["C", "W"]) for name in self._schema.names()}
        if len({len(array) for array in arrays.values()}) > 1:
            sizes = {name: len(array) for name, array in arrays.items()}
            raise DataError(
                f"The data module's {self._split} loader yielded columns of different lengths: {sizes}. All columns of "
                "a batch must have one value per row."
            )
        return arrays


def _generator(loader: BaseDataLoader) -> Generator[Columns]:
    yield from loader
