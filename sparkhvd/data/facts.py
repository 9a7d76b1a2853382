"""What is known of prepared rows without reading them, and whether they can be trained on.

The numbers come from Parquet footers, or from the Arrow batches of rows that were never written to a Store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparkhvd.data.schema import ColumnSpec, DataSchema
from sparkhvd.data.selection import RESERVED_PREFIX, Selection
from sparkhvd.errors import DataError, SchemaError

SplitValue = Literal["train", "validation", "null", "other"]

SIZE_PREFIX = RESERVED_PREFIX + "size_"


@dataclass(frozen=True)
class ColumnFacts:
    """One column of one file: its NULLs, and the smallest and largest value where they are known."""

    nulls: int
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class FileFacts:
    """One file, or the rows of one split that one rank was given.

    Attributes:
        path: the file.
        split: which rows are in it; "null" and "other" are what a validation column must not hold.
        place: files in this order hold the rows in their order.
        row_groups: rows of each row group.
        columns: the columns of the schema, then the columns of ``size_columns``.
    """

    path: str
    split: SplitValue
    place: tuple[int, int]
    row_groups: tuple[int, ...]
    columns: tuple[ColumnFacts, ...]


def rows_of(files: Sequence[FileFacts], split: SplitValue) -> int:
    """The rows of one split."""
    return sum(sum(file.row_groups) for file in files if file.split == split)


def size_columns(columns: Sequence[ColumnSpec]) -> list[tuple[ColumnSpec, str]]:
    """The columns that hold the lengths of arrays, each with the column that it belongs to."""
    arrays = [column for column in columns if column.kind != "scalar"]
    return [(column, f"{SIZE_PREFIX}{index}") for index, column in enumerate(arrays)]


def check_rows(files: Sequence[FileFacts], selection: Selection, num_proc: int, if_none: str = "") -> None:
    """Refuse rows that cannot be trained on.

    Args:
        files: all that there are.
        selection: what was asked for.
        num_proc: number of ranks.
        if_none: what else to say when there are no rows at all.

    Raises:
        DataError: too few rows in a split, or a validation column with other values than 0 and 1.
    """
    if not files:
        raise DataError(f"The DataFrame has no rows to train on{if_none}.")
    by = selection.validation
    nulls, others = rows_of(files, "null"), rows_of(files, "other")
    if nulls or others:
        raise DataError(
            f"Validation column {by!r} has {nulls} rows with NULL and {others} rows with another value than 0 and 1; "
            "it must be true (1) for the rows to hold out and false (0) for the rows to train on."
        )
    train, held_out = rows_of(files, "train"), rows_of(files, "validation")
    rule = f"validation column {by!r}" if isinstance(by, str) else f"validation={by}"
    if not train:
        raise DataError(f"No row is left to train on: {rule} holds out all {held_out} rows.")
    if by is not None and not held_out:
        raise DataError(
            f"No row is held out: {rule} selects none of {train} rows. Take a larger fraction, a column that is 1 for "
            "some rows, another seed, or validation=None. (A fraction decides by content: equal rows go together.)"
        )
    if train < num_proc:
        raise DataError(
            f"There are {train} rows to train on but num_proc is {num_proc}; every rank needs at least one row. "
            "Lower num_proc or give more rows."
        )


def checked_schema(schema: DataSchema, files: Sequence[FileFacts]) -> DataSchema:
    """The schema with all shapes, or the error that says which column cannot be trained on."""
    size_of = {column.name: len(schema.columns) + i for i, (column, _) in enumerate(size_columns(schema.columns))}
    known = []
    for index, column in enumerate(schema.columns):
        nulls = sum(file.columns[size_of.get(column.name, index)].nulls for file in files)
        if nulls:
            raise DataError(
                f"Column {column.name!r} ({column.role}) has {nulls} NULL values. Drop these rows "
                f"(df.dropna(subset=[{column.name!r}])) or fill them (df.fillna)."
            )
        if column.kind != "scalar":
            known.append(_with_shape(column, [file.columns[size_of[column.name]] for file in files]))
            # Every array has the same length above 0 here, so what is NULL in its elements' column is an element.
            inside = sum(file.columns[index].nulls for file in files)
            if inside:
                raise DataError(
                    f"Column {column.name!r} ({column.role}) has {inside} NULL values inside its arrays. Replace them, "
                    "for example with pyspark.sql.functions.transform and coalesce."
                )
    return schema.replaced(known)


def _with_shape(column: ColumnSpec, sizes: Sequence[ColumnFacts]) -> ColumnSpec:
    low = min(size.low for size in sizes if size.low is not None)
    high = max(size.high for size in sizes if size.high is not None)
    if low != high:
        raise SchemaError(
            f"Column {column.name!r} ({column.role}) has rows of length {low} and {high}; all rows of an array or "
            "vector column need the same length. Pad or cut them."
        )
    if high == 0:
        raise SchemaError(f"Column {column.name!r} ({column.role}) holds only empty arrays. Leave it out.")
    return replace(column, shape=(high,))
