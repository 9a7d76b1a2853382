"""Read a few rows of a DataFrame on the driver, as arrays by column."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from sparkhvd.compat.spark import to_arrow
from sparkhvd.data.prepare.direct_rows import TaskRows, checked, partition_for_ranks
from sparkhvd.data.prepare.stats import SPLIT
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.read.spool import Spool
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.selection import Selection
from sparkhvd.errors import ParamError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def require_spark_dataframe(method: str, table: object) -> None:
    """Raise ``ParamError`` for anything but a Spark DataFrame, such as a pandas DataFrame."""
    if not hasattr(table, "sparkSession"):
        type_name = f"{type(table).__module__.partition('.')[0]}.{type(table).__qualname__}"
        raise ParamError(
            f"{method} takes a Spark DataFrame, not a {type_name}; spark.createDataFrame(pdf) converts a pandas table."
        )


def read_sample(dataset: DataFrame, selection: Selection, rows: int) -> tuple[DataSchema, Arrays]:
    """Return the schema with the shapes of the first rows, and these rows by column.

    Raises:
        DataError: the DataFrame is empty, or its rows cannot be trained on.
    """
    whole = replace(selection, validation=None)
    table = to_arrow(partition_for_ranks(dataset.limit(rows), whole, num_proc=1, seed=0))
    with closing(Spool((tempfile.gettempdir(),), by=SPLIT, otherwise="train")) as spool:
        for batch in table.to_batches():
            spool.write(batch)
        sample = TaskRows(spool.finish(), whole, 0)
        schema = checked(sample.facts(), whole, 1)
        return schema, sample.head(schema, rows)
