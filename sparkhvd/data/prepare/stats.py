"""Statistics of prepared rows, and the checks that the rows can be trained on.

The statistics come from Parquet footers, or from the Arrow batches of rows that were not written to a Store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparkhvd._util.counts import counted
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.data.schema.manifest import LabelRanges
from sparkhvd.data.schema.selection import RESERVED_PREFIX, Selection
from sparkhvd.errors import DataError, SchemaError

SplitValue = Literal["train", "validation", "null", "other"]

# The column with the split of a row, while rows of several splits are in one DataFrame.
SPLIT = RESERVED_PREFIX + "split"
SIZE_PREFIX = RESERVED_PREFIX + "size_"

_NULL_ROWS_ADVICE = "Drop these rows (df.dropna(subset=[{name!r}])), fill them (df.fillna), or set fill for the column."
_NULL_ELEMENTS_ADVICE = (
    "Replace them, for example with pyspark.sql.functions.transform and coalesce, or set fill for the column."
)


@dataclass(frozen=True)
class ColumnFacts:
    """One column of one file: its NULLs, and the smallest and largest value if they are known.

    The NULLs of an array column are those of its innermost elements. The NULLs of a vector column are not counted here
    but in its ``length``.
    """

    nulls: int
    low: Any = None
    high: Any = None


@dataclass(frozen=True)
class FileFacts:
    """One file, or the rows of one split on one rank.

    Attributes:
        path: the file.
        split: the split of the rows; "null" and "other" are values that a validation column must not have.
        position: the sort key of the file in the order of the rows.
        row_groups: the number of rows in each row group.
        columns: the columns of the schema, then the columns of ``size_columns``.
    """

    path: str
    split: SplitValue
    position: tuple[int, int]
    row_groups: tuple[int, ...]
    columns: tuple[ColumnFacts, ...]


def rows_of(files: Sequence[FileFacts], split: SplitValue) -> int:
    """Return the number of rows of one split."""
    return sum(sum(file.row_groups) for file in files if file.split == split)


@dataclass(frozen=True)
class Measure:
    """An integer column with the sizes of another column; its smallest and largest value determine that column's shape.

    Attributes:
        name: the name of the measure's column in the data.
        column: the measured column.
        what: ``length`` of arrays and vectors; ``shortest`` and ``longest`` of the arrays inside an array, ``level``
            arrays deep; ``entries`` of vectors that are delivered sparse.
        level: 0 for the column's own arrays.
    """

    name: str
    column: ColumnSpec
    what: Literal["length", "shortest", "longest", "entries"]
    level: int = 0


def size_columns(columns: Sequence[ColumnSpec]) -> list[Measure]:
    """Return the measures for the shapes of arrays and vectors; a scalar needs none."""
    measures: list[Measure] = []

    def add(column: ColumnSpec, what: Literal["length", "shortest", "longest", "entries"], level: int = 0) -> None:
        measures.append(Measure(f"{SIZE_PREFIX}{len(measures)}", column, what, level))

    for column in columns:
        if column.kind != "scalar":
            add(column, "length")
        for level in range(1, column.depth):
            add(column, "shortest", level)
            add(column, "longest", level)
        if column.sparse:
            add(column, "entries")
    return measures


def is_ranged(column: ColumnSpec) -> bool:
    """Return whether a column is a label whose range matters: a class number may be too large for the model."""
    return column.role == "label" and column.kind == "scalar" and column.dtype.startswith(("int", "uint", "float"))


def label_ranges(schema: DataSchema, files: Sequence[FileFacts]) -> LabelRanges:
    """Return the ranges of the labels that are known for all files."""
    ranges = []
    for index, column in enumerate(schema.columns):
        ends = [(file.columns[index].low, file.columns[index].high) for file in files if is_ranged(column)]
        if ends and all(low is not None and high is not None for low, high in ends):
            ranges.append((column.name, _number(min(low for low, _ in ends)), _number(max(high for _, high in ends))))
    return tuple(ranges)


def with_extreme_labels(rows: Arrays, ranges: LabelRanges) -> Arrays:
    """Return the rows with the smallest and the largest label of the dataset in place of the first and the last.

    A loss that rejects one of them, such as a class number without an output, then fails before the training.
    """
    changed = {}
    for name, low, high in ranges:
        if name in rows:
            changed[name] = rows[name].copy()
            changed[name][0] = low
            changed[name][-1] = high
    return {**rows, **changed}


def _number(value: Any) -> float:
    return value if isinstance(value, int) else float(value)


def check_rows(files: Sequence[FileFacts], selection: Selection, num_proc: int) -> None:
    """Refuse rows that cannot be trained on.

    Args:
        files: all files.
        selection: the requested columns and split.
        num_proc: number of ranks.

    Raises:
        DataError: a split has too few rows, or a validation column has values other than 0 and 1.
    """
    if not files:
        raise no_rows()
    by = selection.validation
    nulls, others = rows_of(files, "null"), rows_of(files, "other")
    if nulls or others:
        raise DataError(
            f"Validation column {by!r} has {counted(nulls, 'row')} with NULL and {counted(others, 'row')} with values "
            "other than 0 and 1; it must be true (1) for held-out rows and false (0) for training rows."
        )
    train, held_out = rows_of(files, "train"), rows_of(files, "validation")
    rule = f"validation column {by!r}" if isinstance(by, str) else f"validation={by}"
    if not train:
        raise DataError(f"No row is left to train on: {rule} holds out every row ({held_out}).")
    if by is not None and not held_out:
        raise DataError(
            f"No row is held out: {rule} selects none of {counted(train, 'row')}. Choose a larger fraction, a column "
            "that is 1 for some rows, another seed, or validation=None. (A fraction hashes the content, so equal rows "
            "stay together.)"
        )
    if train < num_proc:
        raise DataError(too_few_rows(train, num_proc))


def no_rows() -> DataError:
    """Return the error for an empty DataFrame."""
    return DataError("The DataFrame has no rows to train on. Check the filters and joins that it comes from.")


def too_few_rows(train: int, num_proc: int) -> str:
    """Return the message for fewer training rows than ranks."""
    return (
        f"There {'is' if train == 1 else 'are'} {counted(train, 'row')} to train on but num_proc is {num_proc}; every "
        "rank needs at least one row. Lower num_proc or provide more rows."
    )


def checked_schema(schema: DataSchema, files: Sequence[FileFacts]) -> DataSchema:
    """Return the schema with all shapes, or refuse columns that cannot be trained on.

    Raises:
        DataError: NULL in a column without a fill.
        SchemaError: arrays or vectors of different lengths, or empty ones.
    """
    measures = size_columns(schema.columns)
    known = []
    for index, column in enumerate(schema.columns):
        own = [file.columns[index] for file in files]
        measured: dict[tuple[str, int], list[ColumnFacts]] = {
            (measure.what, measure.level): [file.columns[len(schema.columns) + offset] for file in files]
            for offset, measure in enumerate(measures)
            if measure.column.name == column.name
        }
        whole = measured.get(("length", 0), own)
        _refuse_null(column, sum(facts.nulls for facts in whole), "", _NULL_ROWS_ADVICE)
        if column.kind != "scalar":
            known.append(_with_shape(column, measured))
            # All arrays have the same length above 0 here, so every NULL in the elements' column is an element.
            inside = 0 if column.kind == "vector" else sum(facts.nulls for facts in own)
            _refuse_null(column, inside, " inside its arrays", _NULL_ELEMENTS_ADVICE)
    return schema.replaced(known)


def _refuse_null(column: ColumnSpec, count: int, where: str, next_step: str) -> None:
    if count and column.fill is None:
        raise DataError(
            f"Column {column.name!r} ({column.role}) has {counted(count, 'NULL value')}{where}. "
            f"{next_step.format(name=column.name)}"
        )


def _with_shape(column: ColumnSpec, measured: Mapping[tuple[str, int], list[ColumnFacts]]) -> ColumnSpec:
    shape = [_common_length(column, measured["length", 0], measured["length", 0], "rows")]
    shape += [
        _common_length(column, measured["shortest", level], measured["longest", level], "inner arrays")
        for level in range(1, column.depth)
    ]
    entries = max((facts.high or 0 for facts in measured.get(("entries", 0), [])), default=0)
    return replace(column, shape=tuple(shape), entries=max(1, entries) if column.sparse else None)


def _common_length(
    column: ColumnSpec, shortest: Sequence[ColumnFacts], longest: Sequence[ColumnFacts], what: str
) -> int:
    low = min((facts.low for facts in shortest if facts.low is not None), default=0)
    high = max((facts.high for facts in longest if facts.high is not None), default=0)
    if low != high:
        raise SchemaError(
            f"Column {column.name!r} ({column.role}) has {what} of length {low} and {high}; all {what} of an array or "
            "vector column must have the same length. Pad or cut them."
        )
    if high == 0:
        raise SchemaError(f"Column {column.name!r} ({column.role}) holds only empty arrays or NULL. Leave it out.")
    return high
