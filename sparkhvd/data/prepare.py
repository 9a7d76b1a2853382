"""From a DataFrame to a prepared dataset, in one evaluation of its lineage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkhvd.data.manifest import Manifest
from sparkhvd.data.selection import Selection
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def prepare(df: DataFrame, selection: Selection, store: Store, *, num_proc: int, seed: int) -> Manifest:
    """Write the selected columns of ``df`` to ``store`` as a new dataset.

    The lineage of ``df`` is evaluated once. The dataset has an id of its own, is never changed, and becomes visible
    when its manifest is published as the last step; a failure leaves nothing behind.

    Args:
        df: the rows; their order is kept.
        selection: what ``select(df.schema, ...)`` returned.
        store: where the dataset goes.
        num_proc: the number of ranks that will train.
        seed: decides which rows a validation fraction holds out: a hash of the row's content and the seed, whatever
            the partitioning. Equal rows fall on the same side.

    Returns:
        The manifest as published, with all shapes known.

    Raises:
        DataError: NULL in a column or an array, no rows, no training rows, fewer training rows than ``num_proc``, no
            validation rows though some were asked for, or a validation column with other values than 0 and 1.
        SchemaError: an array or vector column has rows of different lengths.
        StoreError: the Store could not be written or read.
    """
    raise NotImplementedError
