"""Shuffles the rows of a window in threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import chain

import numpy as np

from sparkhvd._core import RowOrder
from sparkhvd.data.read import arrow_memory
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.read.plan import RowIds
from sparkhvd.data.schema import columns
from sparkhvd.data.schema.data_schema import OBJECTS, ColumnSpec, DataSchema

# The core picks up to _COLUMNS columns together if a row of each has at most _SMALL_BYTES bytes.
_SMALL_BYTES = 8
_COLUMNS = 4


def shuffle_rows(
    parts: Sequence[Arrays], order: RowIds, schema: DataSchema, threads: Executor, *, release: bool = True
) -> Arrays:
    """Return the rows of all parts with these indices as new arrays.

    With ``release``, each column is removed from ``parts`` as soon as it is picked, to free its memory.
    """
    if not len(order):  # this rank has no rows in these steps
        return columns.no_rows(schema)
    rows = RowOrder(order, sum(len(next(iter(part.values()))) for part in parts))

    def pick(group: Sequence[ColumnSpec]) -> Arrays:
        take = dict.pop if release else dict.__getitem__
        from_parts = {column.name: [take(part, column.name) for part in parts] for column in group}
        if group[0].dtype in OBJECTS:
            return {name: np.concatenate(arrays)[order] for name, arrays in from_parts.items()}
        into = {column.name: arrow_memory.empty(column, len(order)) for column in group}
        rows.pick([(from_parts[name], array) for name, array in into.items()], columns.column_bytes(group[0]))
        return into

    shuffled = dict(chain.from_iterable(arrays.items() for arrays in threads.map(pick, column_groups(schema))))
    return {name: shuffled[name] for name in schema.names()}


def column_groups(schema: DataSchema) -> list[list[ColumnSpec]]:
    """Return groups of columns with rows of the same size; the groups are small, so that memory is freed early."""
    by_size: dict[tuple[bool, int], list[ColumnSpec]] = {}
    for column in schema.columns:
        by_size.setdefault((column.dtype in OBJECTS, columns.column_bytes(column)), []).append(column)
    groups = []
    for (_, size), group in by_size.items():
        count = _COLUMNS if size <= _SMALL_BYTES else 1
        groups += [group[at : at + count] for at in range(0, len(group), count)]
    return groups
