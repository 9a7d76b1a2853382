"""The description of a dataset's columns that all layers share, without pyspark or a framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Role = Literal["feature", "label", "weight"]
Kind = Literal["scalar", "array", "vector"]
Codec = Literal["scalar", "ndarray", "compressed_ndarray", "image"]
Fill = bool | int | float | str

# The numpy names of types that a model takes without conversion.
NUMBERS = frozenset(
    {"bool", "float16", "float32", "float64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)  # fmt: skip
# Types that are not numbers: a transformation function or the user of a loader converts them.
OBJECTS = frozenset({"str", "bytes", "decimal"})


@dataclass(frozen=True)
class ColumnSpec:
    """One column as the readers deliver it.

    Attributes:
        name: the column's name; the field of a struct is ``struct.field``.
        dtype: the type of the elements: the numpy name of a number (bool, int8 to int64, uint8 to uint64, float16 to
            float64), ``datetime64[D]``, ``datetime64[ms]``, ``datetime64[us]`` or ``datetime64[ns]``, or ``str``,
            ``bytes`` or ``decimal`` for Python objects.
        shape: shape of one row: ``()`` for scalars, ``(n,)`` for arrays and vectors, ``(n, m, ...)`` for nested arrays;
            None while it is unknown, before the data have been read.
        role: what the column is for.
        kind: its kind in Spark, which determines how it is selected and the type of a prediction in ``transform``.
        fill: the value that the readers put in place of NULL; None refuses NULL. A date or time is its ISO text.
        sparse: deliver a vector as its stored entries (see ``columns``) instead of all its elements.
        entries: for a sparse column, the most entries of a row; None while it is unknown.
        source: the path to read it from, if that differs from ``name``: a column, then the fields of structs.
        codec: how a value is packed into bytes (in petastorm's datasets); ``scalar`` is a number that is stored as
            another number type.
        depth: the levels of nested arrays; 0 for scalars.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    role: Role
    kind: Kind
    fill: Fill | None = None
    sparse: bool = False
    entries: int | None = None
    source: tuple[str, ...] = ()
    codec: Codec | None = None
    depth: int = -1

    def __post_init__(self) -> None:
        if self.depth < 0:
            known = len(self.shape) if self.shape else 1
            object.__setattr__(self, "depth", 0 if self.kind == "scalar" else known)

    @property
    def is_number(self) -> bool:
        """Return whether a model can take the values without conversion."""
        return self.dtype in NUMBERS

    @property
    def path(self) -> tuple[str, ...]:
        """Return the path to the values: the column, then the fields of structs."""
        return self.source or (self.name,)


@dataclass(frozen=True)
class DataSchema:
    """The selected columns: features, then labels, then the weight, each in the user's order."""

    columns: tuple[ColumnSpec, ...]

    def of(self, role: Role) -> list[ColumnSpec]:
        return [column for column in self.columns if column.role == role]

    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def __getitem__(self, name: str) -> ColumnSpec:
        return self._by_name[name]

    def fields_of(self, name: str) -> list[str]:
        """Return the columns for a column of the DataFrame: itself, or one per field of a struct."""
        if name in self._by_name:
            return [name]
        return [other for other in self._by_name if other.startswith(f"{name}.")]

    @cached_property
    def _by_name(self) -> dict[str, ColumnSpec]:
        return {column.name: column for column in self.columns}

    def replaced(self, columns: Sequence[ColumnSpec]) -> DataSchema:
        """Return the schema with these columns in place of those with the same names, for example with known shapes."""
        by_name = {column.name: column for column in columns}
        return DataSchema(tuple(by_name.get(column.name, column) for column in self.columns))
