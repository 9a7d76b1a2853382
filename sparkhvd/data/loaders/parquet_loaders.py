"""The readers for users of ``sparkhvd.run``: a torch dataset and a ``tf.data.Dataset`` over Parquet.

Both have the rows of one rank, by default the one that ``hvd.init()`` made of this process, in batches that are decoded
ahead. All ranks get the same number of batches, and every row comes once per epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkhvd.comm import session
from sparkhvd.data.external.parquet_files import ExistingFiles, open_data
from sparkhvd.data.read.readers import ParquetSource, Reading, Transformation
from sparkhvd.data.schema.data_schema import Fill
from sparkhvd.data.schema.manifest import Manifest, SplitName
from sparkhvd.errors import ConfigError
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

if TYPE_CHECKING:
    import tensorflow as tf

    from sparkhvd.data.loaders.torch_data import TorchBatches


# Enough to end a hold. A finalizer may have interrupted what is needed for that, so it cannot wait for long.
_FINALIZER_SECONDS = 10.0


@dataclass(frozen=True)
class Loading:
    """What both loaders can be told; see ``torch_loader``."""

    batch_size: int
    columns: Sequence[str] | None = None
    split: SplitName = "train"
    store: Store | str | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    rank: int | None = None
    size: int | None = None
    shuffle: bool = True
    seed: int = 0
    steps_per_epoch: int | None = None
    fill: Mapping[str, Fill] | None = None
    transformation_fn: Transformation | None = None
    cache: str | None = None
    prefetch_bytes: int = Reading.prefetch_bytes
    threads: int = Reading.threads

    def open(self, data: str | Manifest) -> tuple[ParquetSource, ExistingFiles]:
        """The rows of this rank, and the files that they lie in."""
        found = open_data(data, self.columns, self.fill, store=self.store, storage_options=self.storage_options)
        try:
            source = self._source(found)
        except BaseException:
            found.close()
            raise
        # For those who close nothing. A process that is killed before leaves a hold that goes with it or grows old.
        if found.hold is not None:
            weakref.finalize(source, found.hold.close, _FINALIZER_SECONDS)
        return source, found

    def _source(self, found: ExistingFiles) -> ParquetSource:
        reading = Reading(
            prefetch_bytes=self.prefetch_bytes,
            threads=self.threads,
            transformation=self.transformation_fn,
            cache=self.cache,
        )
        return ParquetSource(
            found.store,
            found.manifest,
            self.split,
            _world(self.rank, self.size),
            self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            steps_per_epoch=self.steps_per_epoch,
            reading=reading,
        )


def torch_loader(data: str | Manifest, batch_size: int, **options: Any) -> TorchBatches:
    """Batches of this rank's rows as a ``torch.utils.data.IterableDataset``: dicts of tensors by column.

    Iterate over it directly, or hand it to ``DataLoader(loader, batch_size=None)``. Its threads decode ahead already,
    so ``num_workers`` has to be 0; it says so otherwise. Call ``set_epoch`` before each epoch for another order.

    Prepared rows that are opened by their path or URL cannot be removed by other drivers until ``close``, the end of
    ``with``, or the loader's own end; those of a manifest are held by whoever prepared them.

    Args:
        data: the URL of a Parquet file or of a folder of them, of a prepared dataset, or a prepared dataset's manifest.
        batch_size: rows of this rank in a batch; the last one of an epoch may have fewer, or none.
        **options: by name, for both loaders:

            - ``columns``: the columns to read, also ``struct.field``; all by default.
            - ``split``: of a prepared dataset, ``"train"`` (the default) or ``"validation"``.
            - ``store``: the Store in which ``data`` lies, or its URL, if it is a manifest or a path in that Store.
            - ``storage_options``: of the Store of a URL.
            - ``rank`` and ``size``: whose rows; those of ``hvd.init()`` by default, else 0 of 1.
            - ``shuffle`` (True) and ``seed`` (0): whether each epoch has an order of its own.
            - ``steps_per_epoch``: None is one pass over the rows.
            - ``fill``: by column, what to put where the data have NULL; without it NULL is an error.
            - ``transformation_fn``: makes a dict of numpy arrays into another one with as many rows.
            - ``cache``: ``"memory"`` or ``"disk"`` keeps this rank's rows near it after the first epoch.
            - ``prefetch_bytes`` and ``threads``: see ``sparkhvd.data.read.readers.Reading``.

    Raises:
        DataError: there is nothing at the URL, or no Parquet, or NULL without a fill.
        SchemaError: a column does not exist, has a type that cannot be read, or is not the same in all files.
        StoreError: the URL cannot be reached.

    Example:
        >>> for batch in torch_loader("/data/numbers.parquet", 1024):  # doctest: +SKIP
        ...     loss = model(batch["features"])
    """
    from sparkhvd.data.loaders.torch_data import TorchBatches  # noqa: PLC0415  (imports torch)

    source, files = Loading(batch_size, **options).open(data)
    return TorchBatches(source, files.close)


def tf_dataset(data: str | Manifest, batch_size: int, *, epochs: int = 1, **options: Any) -> tf.data.Dataset:
    """Batches of this rank's rows as a ``tf.data.Dataset`` of dicts of tensors by column.

    It goes over the rows ``epochs`` times, in another order each time with ``shuffle``. It is batched and prefetched
    already; do not ``shard`` it. A rank without rows in the last step of an epoch gets a batch of no rows.

    Args:
        data: see ``torch_loader``.
        batch_size: see ``torch_loader``.
        epochs: how often to go over the rows.
        **options: see ``torch_loader``. With ``transformation_fn``, the columns are those that it makes of the first
            rows.

    Raises:
        SparkHvdError: see ``torch_loader``.

    Example:
        >>> model.fit(tf_dataset(url, 256, epochs=3).map(lambda row: (row["x"], row["y"])))  # doctest: +SKIP
    """
    from sparkhvd.data.loaders.tf_data import dataset  # noqa: PLC0415  (imports TensorFlow)

    if epochs < 1:
        raise ConfigError(f"epochs is {epochs}; it must be at least 1.")
    source, _ = Loading(batch_size, **options).open(data)
    return dataset(source, epochs)


def _world(rank: int | None, size: int | None) -> World:
    if (rank is None) != (size is None):
        raise ConfigError(f"rank={rank} and size={size} belong together; pass both or neither.")
    if rank is not None and size is not None:
        return World(rank=rank, size=size, local_rank=rank, local_size=size)
    return session.current().world if session.is_initialized() else World()
