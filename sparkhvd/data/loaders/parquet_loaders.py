"""The loaders for users of ``sparkhvd.run``: a torch dataset and a ``tf.data.Dataset`` over Parquet.

Both yield prefetched batches of one rank's rows, by default of the rank that ``hvd.init()`` assigned to this process.
All ranks get the same number of batches. Without ``steps_per_epoch``, every row appears once per epoch.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from sparkhvd._util.counts import is_integer
from sparkhvd.comm import session
from sparkhvd.data.external.parquet_files import ExistingFiles, open_data
from sparkhvd.data.read.readers import ParquetSource, ReadOptions, Transformation
from sparkhvd.data.schema.data_schema import Fill
from sparkhvd.data.schema.manifest import Manifest, SplitName
from sparkhvd.errors import ConfigError
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

if TYPE_CHECKING:
    import tensorflow as tf

    from sparkhvd.data.loaders.torch_data import TorchBatches


# Enough to end a hold. A finalizer must not wait long, because it may interrupt a thread that the release needs.
_FINALIZER_SECONDS = 10.0


@dataclass(frozen=True)
class LoaderOptions:
    """The options of both loaders; see ``torch_loader``."""

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
    prefetch_bytes: int = ReadOptions.prefetch_bytes
    threads: int = ReadOptions.threads

    def __post_init__(self) -> None:
        for name in ("batch_size", "rank", "size", "seed", "steps_per_epoch", "prefetch_bytes", "threads"):
            value = getattr(self, name)
            optional = name in {"rank", "size", "steps_per_epoch"}
            if value is None and optional:
                continue
            if not is_integer(value):
                raise ConfigError(f"{name}={value!r} must be a whole number{' or None' if optional else ''}.")
            object.__setattr__(self, name, int(value))  # NumPy's integers overflow
        if self.split not in get_args(SplitName):
            raise ConfigError(f"split={self.split!r} must be one of {', '.join(map(repr, get_args(SplitName)))}.")

    def open(self, data: str | Manifest) -> tuple[ParquetSource, ExistingFiles]:
        """Open the rows of this rank; return them and their files."""
        existing = open_data(data, self.columns, self.fill, store=self.store, storage_options=self.storage_options)
        with ExitStack() as stack:
            stack.enter_context(existing)
            source = self._source(existing)
            stack.pop_all()
        # For users who do not close the loader. The lease of a killed process ends with it or expires.
        if existing.hold is not None:
            weakref.finalize(source, existing.hold.close, _FINALIZER_SECONDS)
        return source, existing

    def _source(self, existing: ExistingFiles) -> ParquetSource:
        reading = ReadOptions(
            prefetch_bytes=self.prefetch_bytes,
            threads=self.threads,
            transformation=self.transformation_fn,
            cache=self.cache,
        )
        return ParquetSource(
            existing.store,
            existing.manifest,
            self.split,
            _world(self.rank, self.size),
            self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            steps_per_epoch=self.steps_per_epoch,
            reading=reading,
        )


def torch_loader(data: str | Manifest, batch_size: int, **options: Any) -> TorchBatches:
    """Return the batches of this rank's rows as a ``torch.utils.data.IterableDataset``: dicts of tensors by column.

    Iterate over it directly, or pass it to ``DataLoader(loader, batch_size=None)``. Its threads prefetch already, so
    ``num_workers`` must be 0; other values raise an error. Call ``set_epoch`` before each epoch for another order.

    Prepared rows that are opened by path or URL cannot be removed by other drivers until ``close``, the end of ``with``
    or the end of the loader. For rows opened by manifest, the process that prepared them prevents the removal.

    Args:
        data: the URL of a Parquet file or of a folder of them, of a prepared dataset, or a prepared dataset's manifest.
        batch_size: rows of this rank in a batch; the last one of an epoch may have fewer, or none.
        **options: by name, for both loaders:

            - ``columns``: the columns to read, also ``struct.field``; all by default.
            - ``split``: of a prepared dataset, ``"train"`` (the default) or ``"validation"``.
            - ``store``: the Store that contains ``data``, or its URL; for a manifest or a path in that Store.
            - ``storage_options``: options for the Store of a URL.
            - ``rank`` and ``size``: the rank whose rows to read; those of ``hvd.init()`` by default, else 0 of 1.
            - ``shuffle`` (True) and ``seed`` (0): whether each epoch has its own order, and the seed of the orders.
            - ``steps_per_epoch``: None means one pass over the rows.
            - ``fill``: by column, the value to read in place of NULL; without it NULL is an error.
            - ``transformation_fn``: converts a dict of numpy arrays to another one with as many rows.
            - ``cache``: ``"memory"`` or ``"disk"`` caches the rows when this rank first reads them. The rank then has
              the same rows in every epoch, unless all rows fit into one window.
            - ``prefetch_bytes`` and ``threads``: see ``sparkhvd.data.read.readers.ReadOptions``.

    Raises:
        DataError: the URL has no Parquet files, or a column without a fill has NULL.
        SchemaError: a column does not exist, has a type that cannot be read, or differs between files.
        StoreError: the URL cannot be reached.

    Examples:
        >>> for batch in torch_loader("/data/numbers.parquet", 1024):  # doctest: +SKIP
        ...     loss = model(batch["features"])
    """
    from sparkhvd.data.loaders.torch_data import TorchBatches  # noqa: PLC0415  (imports torch)

    source, files = LoaderOptions(batch_size, **options).open(data)
    return TorchBatches(source, files.close)


def tf_dataset(data: str | Manifest, batch_size: int, *, epochs: int = 1, **options: Any) -> tf.data.Dataset:
    """Return the batches of this rank's rows as a ``tf.data.Dataset`` of dicts of tensors by column.

    It yields the rows ``epochs`` times, with ``shuffle`` in another order each time. It is batched and prefetched
    already, and its autotuning is off; do not ``shard`` it. A rank without rows in the last step of an epoch gets a
    batch with no rows.

    Args:
        data: see ``torch_loader``.
        batch_size: see ``torch_loader``.
        epochs: the number of passes over the rows.
        **options: see ``torch_loader``. With ``transformation_fn``, the columns are those that it returns for the first
            row.

    Raises:
        SparkHvdError: see ``torch_loader``.

    Examples:
        >>> model.fit(tf_dataset(url, 256, epochs=3).map(lambda row: (row["x"], row["y"])))  # doctest: +SKIP
    """
    from sparkhvd.data.loaders.tf_data import dataset  # noqa: PLC0415  (imports TensorFlow)

    if epochs < 1:
        raise ConfigError(f"epochs is {epochs}; it must be at least 1.")
    source, _ = LoaderOptions(batch_size, **options).open(data)
    return dataset(source, epochs)


def _world(rank: int | None, size: int | None) -> World:
    if (rank is None) != (size is None):
        raise ConfigError(f"rank={rank} and size={size} belong together; pass both or neither.")
    if rank is not None and size is not None:
        return World(rank=rank, size=size, local_rank=rank, local_size=size)
    return session.current().world if session.is_initialized() else World()
