"""Parquet files that something else wrote (Spark, pandas, pyarrow, petastorm), as a dataset that the readers take.

Their footers tell the row groups and the NULLs, the first row the shapes of arrays and vectors. Nothing else is read,
and nothing is written. That all rows have those shapes is checked as they are read.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from sparkhvd.data import arrow_types, codecs, columns, unischema
from sparkhvd.data.facts import too_few_rows
from sparkhvd.data.footers import Footer, LeafFacts, read_footers
from sparkhvd.data.manifest import DataFile, Manifest, Split
from sparkhvd.data.schema import ColumnSpec, DataSchema, Fill, Role
from sparkhvd.data.selection import RESERVED_PREFIX, completed, no_such_column
from sparkhvd.errors import DataError, SchemaError, StoreError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?://([^/]*))?(/.*|)")


@dataclass(frozen=True)
class ExistingFiles:
    """Where the files of a dataset lie, and what they consist of."""

    store: Store
    manifest: Manifest


@dataclass(frozen=True)
class ReadOnlyFolder(Store):
    """A folder of this machine or a mount, to be read only: nothing is made where nothing is."""

    root: str

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def exists(self, path: str) -> bool:
        return Path(self.root, path).exists()

    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO:
        if mode != "rb":
            raise self._refused()
        try:
            return Path(self.root, path).open("rb")
        except OSError as error:
            raise StoreError(f"Cannot open {self.url}/{path}: {error.strerror or error}.") from error

    def list(self, path: str) -> list[str]:
        """Paths of all files below ``path``, or of the file itself, sorted."""
        top = Path(self.root, path)
        if top.is_file():
            return [path]
        found = [Path(folder, name) for folder, _, names in os.walk(top) for name in names]
        return sorted(file.relative_to(self.root).as_posix() for file in found)

    def publish(self, path: str, content: bytes) -> None:  # noqa: ARG002
        raise self._refused()

    def delete(self, path: str) -> None:  # noqa: ARG002
        raise self._refused()

    def spark_url(self, path: str) -> str:
        return f"{self.url}/{path}"

    def spark_options(self) -> dict[str, str]:
        return {}

    def with_spark_settings(self, settings: Mapping[str, str]) -> ReadOnlyFolder:  # noqa: ARG002
        return self

    def at(self, url: str) -> ReadOnlyFolder:
        return ReadOnlyFolder(_parsed(url)[1])

    @property
    def train_path(self) -> str | None:
        return None

    @property
    def val_path(self) -> str | None:
        return None

    @property
    def test_path(self) -> str | None:
        return None

    @property
    def save_runs(self) -> bool:
        return False

    def arrow(self, path: str) -> tuple[fs.FileSystem, str]:
        from pyarrow import fs  # noqa: PLC0415  (heavy)

        return fs.LocalFileSystem(use_mmap=True), str(Path(self.root, path))

    def _refused(self) -> StoreError:
        return StoreError(f"The files in {self.url} are only read; nothing is written there.")


def open_existing(
    train: str,
    validation: str | None = None,
    *,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str],
    weight_col: str | None = None,
    fill: Mapping[str, Fill] | None = None,
    transformed: bool = False,
    num_proc: int = 1,
    near: Store | None = None,
) -> ExistingFiles:
    """The Parquet files at a path or URL, as a dataset.

    Args:
        train: a folder (its files in the order of their names; names that start with ``_`` or a dot do not count), or
            one file, with the rows to train on.
        validation: the same for the rows to validate on; it has to lie on the same file system.
        feature_cols: None means all columns but the others.
        label_cols: columns to learn.
        weight_col: the rows' weights.
        fill: by column, what to read where it is NULL.
        transformed: a transformation function gets the columns first, so they may also be texts, dates and the like.
        num_proc: the number of ranks; there have to be as many training rows at least.
        near: a Store; files on a file system of its kind are reached as it is.

    Raises:
        DataError: nothing is there, a file is no Parquet file or damaged, there are too few rows, or NULL without fill.
        SchemaError: a column is missing or cannot be used, or the files differ in it.
    """
    store, folder, places = _locate([train] if validation is None else [train, validation], near)
    footers = [_footers(store, place) for place in places]
    first = next((footer for footer in footers[0] if any(footer.row_groups)), None)
    if first is None:
        raise DataError(f"There are no rows to train on in {train}: its files are empty.")
    packed = unischema.read(store, places[0], first)
    schema = _selected(first.schema, feature_cols, label_cols, weight_col, packed)
    schema = completed(schema, (), fill or {}, transformed=transformed)
    schema = _with_shapes(store, schema, first)
    for footer in (footer for group in footers for footer in group if any(footer.row_groups)):
        _check(store, footer, first, schema)
    splits = [_split(group, folder) for group in footers]
    if splits[0].rows < num_proc:
        raise DataError(too_few_rows(splits[0].rows, num_proc))
    if validation is not None and not splits[1].rows:
        raise DataError(f"There are no rows to validate on in {validation}: its files are empty.")
    held_out = splits[1] if validation is not None else None
    return ExistingFiles(store, Manifest("existing files", folder, schema, splits[0], held_out, 0, validation))


def _locate(paths: Sequence[str], near: Store | None) -> tuple[Store, str, list[str]]:
    """A Store above all of the paths, the folder in it that holds them, and their places in the Store."""
    parsed = [_parsed(path) for path in paths]
    if len({where for where, _ in parsed}) > 1:
        raise DataError(f"{' and '.join(paths)} do not lie on one file system; put the rows side by side.")
    where = parsed[0][0]
    places = [place for _, place in parsed]
    root, folder = posixpath.split(posixpath.commonpath(places))
    if not folder:
        raise DataError(f"{' and '.join(paths)} have no folder in common; put the rows side by side.")
    return _store_at(where, root, near), folder, [posixpath.relpath(place, root) for place in places]


def _store_at(where: str, root: str, near: Store | None) -> Store:
    if where == "file:":
        return ReadOnlyFolder(root)
    url = f"{where}{root}".rstrip("/")
    same = near is not None and near.url.partition(":")[0] == where.partition(":")[0]
    return near.at(url) if near is not None and same else Store.create(url)


def _parsed(path: str) -> tuple[str, str]:
    """The file system (scheme and server or bucket), and the path on it."""
    match = _URL.fullmatch(path)
    if match is None:
        return "file:", str(Path(path).expanduser().absolute())
    scheme, server, place = match[1].lower(), match[2], "/" + match[3].strip("/")
    if scheme == "file":
        return "file:", place
    return (f"{scheme}:" if server is None else f"{scheme}://{server}"), place


def _footers(store: Store, place: str) -> list[Footer]:
    files = [path for path in store.list(place) if _is_visible(path.removeprefix(place))]
    if not files:
        raise DataError(f"There are no Parquet files in {store.url}/{place}; check the path.")
    return read_footers(store, files)


def _is_visible(inside: str) -> bool:
    return not any(part.startswith(("_", ".")) for part in inside.split("/") if part)


def _selected(
    arrow: pa.Schema,
    feature_cols: Sequence[str] | None,
    label_cols: Sequence[str],
    weight_col: str | None,
    packed: Mapping[str, unischema.Field],
) -> DataSchema:
    others = [*label_cols, *([weight_col] if weight_col is not None else [])]
    if feature_cols is None:
        feature_cols = [name for name in arrow.names if name not in others and not name.startswith(RESERVED_PREFIX)]
    wanted: list[tuple[str, Role]] = [(name, "feature") for name in feature_cols]
    wanted += [(name, "label") for name in label_cols]
    wanted += [(name, "weight") for name in others[len(label_cols) :]]
    return DataSchema(tuple(column for name, role in wanted for column in _columns(arrow, name, role, packed)))


def _columns(arrow: pa.Schema, name: str, role: Role, packed: Mapping[str, unischema.Field]) -> list[ColumnSpec]:
    if name not in arrow.names:
        # What prepare_data wrote has the fields of a struct as columns of their own.
        fields = [other for other in arrow.names if other.startswith(f"{name}.")]
        if not fields:
            raise no_such_column(name, role, arrow.names, "The files have")
        return [column for field in fields for column in _columns(arrow, field, role, packed)]
    if name in packed and packed[name].codec is not None:
        field = packed[name]
        return [ColumnSpec(name, field.dtype, field.shape, role, "array", codec=field.codec)]
    return [
        ColumnSpec(
            ".".join(leaf.path),
            leaf.dtype,
            () if leaf.kind == "scalar" else None,
            role,
            leaf.kind,
            source=leaf.path if len(leaf.path) > 1 else (),
            depth=leaf.depth,
        )
        for leaf in arrow_types.leaves((name,), arrow.field(name).type)
    ]


def _with_shapes(store: Store, schema: DataSchema, first: Footer) -> DataSchema:
    unknown = [column for column in schema.columns if column.shape is None]
    if not unknown:
        return schema
    filesystem, place = store.arrow(first.path)
    group = next(index for index, rows in enumerate(first.row_groups) if rows)
    with filesystem.open_input_file(place) as file:
        row = next(
            columns.open_parquet(file).iter_batches(
                1, row_groups=[group], columns=columns.stored_names(DataSchema(tuple(unknown)))
            )
        )
    return schema.replaced([_with_shape(row, column, f"{store.url}/{first.path}") for column in unknown])


def _with_shape(row: pa.RecordBatch, column: ColumnSpec, url: str) -> ColumnSpec:
    value = columns.stored(row, column)
    if value.null_count:
        raise DataError(f"Column {column.name!r} is NULL in the first row of {url}, which has to show its shape.")
    if column.codec is not None:
        found = codecs.peek(value[0].as_py(), column.codec)
        return replace(column, shape=found.shape, dtype=str(found.dtype))
    shape = []
    for _ in range(column.depth):
        lengths = columns.lengths(value)
        if lengths is None or not len(lengths) or not lengths[0]:
            raise SchemaError(f"Column {column.name!r} has an empty array in the first row of {url}; leave it out.")
        shape.append(int(lengths[0]))
        value = value if column.kind == "vector" else value.flatten()
    return replace(column, shape=tuple(shape))


def _check(store: Store, footer: Footer, first: Footer, schema: DataSchema) -> None:
    """Refuse what the footer tells already: another type, NULL, arrays of other lengths."""
    url = f"{store.url}/{footer.path}"
    for column in schema.columns:
        top = column.path[0]
        if top not in footer.schema.names or footer.schema.field(top).type != first.schema.field(top).type:
            other = footer.schema.field(top).type if top in footer.schema.names else "missing"
            raise SchemaError(
                f"Column {top!r} is {first.schema.field(top).type} in {store.url}/{first.path} and {other} in {url}; "
                "all files need the same columns."
            )
        leaves = [leaf for leaf in footer.columns if _belongs(leaf, column)]
        if column.kind != "vector" and len(leaves) == 1:
            _check_leaf(column, leaves[0], footer.row_groups, url)


def _belongs(leaf: LeafFacts, column: ColumnSpec) -> bool:
    path = ".".join(column.path)
    return leaf.path == path or leaf.path.startswith(f"{path}.")


def _check_leaf(column: ColumnSpec, leaf: LeafFacts, row_groups: Iterable[int], url: str) -> None:
    if column.fill is not None:
        return  # NULL takes the place of a whole array then, so the numbers of values say nothing
    if leaf.nulls:
        raise DataError(
            f"Column {column.name!r} ({column.role}) has {leaf.nulls} NULL values in {url}. Say what to read there "
            "(fill), or write the files without these rows."
        )
    expected = 1 if column.codec is not None else math.prod(column.shape or ())
    for rows, values in zip(row_groups, leaf.values, strict=True):
        if values != rows * expected:
            raise SchemaError(
                f"Column {column.name!r} ({column.role}) has arrays of different lengths in {url}: {values} values in "
                f"{rows} rows, where the first row has {expected}. All rows need one shape; pad or cut them."
            )


def _split(footers: Iterable[Footer], folder: str) -> Split:
    paths = [(footer, posixpath.relpath(footer.path, folder)) for footer in footers]
    return Split(tuple(DataFile(path, footer.row_groups) for footer, path in paths if any(footer.row_groups)))
