"""The columns of a prepared dataset, in words that every layer shares (no pyspark, no framework)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["feature", "label", "weight"]


@dataclass(frozen=True)
class ColumnSpec:
    """One column as the readers deliver it.

    Attributes:
        name: the DataFrame's column name.
        dtype: numpy name of the elements: bool, int8, int16, int32, int64, float32 or float64.
        shape: shape of one row: ``()`` for scalars, ``(n,)`` for arrays and vectors; None where it is not known before
            the data have been seen.
        role: what the column is for.
        kind: what it was in Spark, which decides how it is selected and what transform makes of a prediction.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    role: Role
    kind: Literal["scalar", "array", "vector"]


@dataclass(frozen=True)
class DataSchema:
    """The selected columns: features, then labels, then the weight, each in the order that the user gave."""

    columns: tuple[ColumnSpec, ...]

    def of(self, role: Role) -> list[ColumnSpec]:
        return [column for column in self.columns if column.role == role]

    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def __getitem__(self, name: str) -> ColumnSpec:
        return next(column for column in self.columns if column.name == name)

    def replaced(self, columns: Sequence[ColumnSpec]) -> DataSchema:
        """The same schema with the columns of these names exchanged (to fill in shapes that the data told)."""
        by_name = {column.name: column for column in columns}
        return DataSchema(tuple(by_name.get(column.name, column) for column in self.columns))
