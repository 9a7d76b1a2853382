"""Opens existing Parquet files (written by Spark, pandas, pyarrow, petastorm or sparkhvd) as a dataset for the readers.

The footers contain the row groups and the NULL counts. The shapes of arrays and vectors come from the first value that
is not NULL. No other rows are read, and nothing is written. The readers check later that all rows have the same shapes.
"""

from __future__ import annotations

import logging
import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sparkhvd._util.counts import counted
from sparkhvd.data.external import petastorm_schema
from sparkhvd.data.external.folder_layout import partition_columns, shown_files, visible_files
from sparkhvd.data.external.locate import Access, locate
from sparkhvd.data.prepare.footers import Footer, LeafFacts, read_footers
from sparkhvd.data.prepare.prepared_data import with_columns
from sparkhvd.data.prepare.stats import too_few_rows
from sparkhvd.data.reuse import leases
from sparkhvd.data.schema import arrow_types, calendars, codecs, columns
from sparkhvd.data.schema.data_schema import NUMBERS, ColumnSpec, DataSchema, Fill, Role
from sparkhvd.data.schema.manifest import DataFile, Manifest, Split, load
from sparkhvd.data.schema.selection import RESERVED_PREFIX, completed, no_such_column
from sparkhvd.data.schema.spark_types import checked_fill
from sparkhvd.errors import DataError, SchemaError, StoreError
from sparkhvd.store import Store, layout, store_at
from sparkhvd.store.backends.read_only import ReadOnlyFolder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PATTERN = re.compile(r"[*?{\[]")
_SEARCH_ROWS = 16  # the rows per read in the search for a value that is not NULL
# Formats with a log in their folder that alone defines which Parquet files are current: Spark's name of the format, a
# description, and the path of the log.
_LOGS = (
    ("delta", "a Delta table", re.compile(r"(^|/)_delta_log/")),
    ("hudi", "a Hudi table", re.compile(r"(^|/)\.hoodie/")),
    ("iceberg", "an Iceberg table", re.compile(r"(^|/)metadata/[^/]+\.metadata\.json$")),
    ("parquet", "the output of a streaming query", re.compile(r"(^|/)_spark_metadata/")),
)


@dataclass(frozen=True)
class ExistingFiles(leases.Held):
    """The files of a dataset, which ``close`` or the end of ``with`` releases.

    Attributes:
        store: the Store that contains the files.
        manifest: the files and their columns.
        hold: see ``Held``.
    """

    store: Store
    manifest: Manifest
    hold: leases.Hold | None = None


@dataclass(frozen=True)
class ColumnRequest:
    """The columns to read from files, and their roles.

    Attributes:
        features: columns, or ``struct.field``; None means all except ``labels`` and ``weight``.
        labels: columns to predict.
        weight: the rows' weights.
        fill: by column, the value to read in place of NULL.
        transformed: whether a transformation function converts the columns first, so that they may also be strings,
            dates and the like.
    """

    features: Sequence[str] | None
    labels: Sequence[str] = ()
    weight: str | None = None
    fill: Mapping[str, Fill] | None = None
    transformed: bool = False


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
    access: Access | None = None,
) -> ExistingFiles:
    """Open the Parquet files at a path or URL as a dataset to train on.

    Args:
        train: a folder with the rows to train on, or one file. In a folder, the files that Spark would read (see
            ``sparkhvd.data.external.folder_layout``) are read in the order of their names.
        validation: the same for the rows to validate on; it must be on the same file system.
        feature_cols: columns, or ``struct.field``; None means all except ``label_cols`` and ``weight_col``.
        label_cols: columns to predict.
        weight_col: the rows' weights.
        fill: by column, the value to read in place of NULL.
        transformed: whether a transformation function converts the columns first, so that they may also be strings,
            dates and the like.
        num_proc: the number of ranks; there must be at least as many training rows.
        access: how to access the file system.

    Raises:
        DataError: there are no files, a file is not Parquet or is damaged, there are too few rows, or a column
            without a fill has NULL.
        SchemaError: a column is missing, cannot be used, or differs between files.
        StoreError: the file system cannot be reached.
    """
    store, locations = locate([train] if validation is None else [train, validation], access or Access())
    files = _open(store, locations, ColumnRequest(feature_cols, label_cols, weight_col, fill, transformed))
    if files.manifest.train.rows < num_proc:
        with files:
            raise DataError(too_few_rows(files.manifest.train.rows, num_proc))
    return files


def open_data(
    data: str | Manifest,
    names: Sequence[str] | None,
    fill: Mapping[str, Fill] | None = None,
    *,
    store: Store | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ExistingFiles:
    """Open the rows for a loader, with columns of any type.

    Args:
        data: a manifest, or the URL of a Parquet file, of a folder with Parquet files (see
            ``sparkhvd.data.external.folder_layout``) or of a prepared dataset. With ``store``, a path in that Store
            replaces the URL.
        names: the columns in their order; None means all.
        fill: by column, the value to read in place of NULL.
        store: the Store that contains ``data``, or its URL; needed for a manifest.
        storage_options: options for the Store of a URL.

    Raises:
        SparkHvdError: see ``open_existing``.
    """
    if isinstance(names, str):
        raise SchemaError(f"columns is the string {names!r}; pass a list of column names: [{names!r}].")
    if names is not None and len(names) == 0:
        raise SchemaError("columns is empty; name at least one column, or leave columns out to read all.")
    store = None if store is None else store_at("store", store)
    request = ColumnRequest(names, fill=fill, transformed=True)
    if isinstance(data, Manifest):
        if store is None:
            raise StoreError("A manifest does not name the Store that it is in; pass store= as well.")
        return ExistingFiles(store, selected(data, request))
    if store is not None:
        return _open(store, [data.strip("/")], request)
    store, locations = locate([data], Access(storage_options=storage_options))
    return _open(store, locations, request)


def _open(store: Store, locations: Sequence[str], request: ColumnRequest) -> ExistingFiles:
    """Open the prepared dataset or the plain files at a location; a second location has the rows to validate on."""
    manifest_path = locations[0] if locations[0].endswith(_MANIFEST) else f"{locations[0]}/{_MANIFEST}"
    if len(locations) > 1 or not store.exists(manifest_path):
        return ExistingFiles(store, _manifest(store, locations, request))
    with ExitStack() as stack:
        hold = _open_hold(store, manifest_path.removesuffix(_MANIFEST))
        if hold is not None:
            stack.enter_context(hold)
        files = ExistingFiles(store, selected(load(store, manifest_path), request), hold)
        stack.pop_all()
    return files


def _open_hold(store: Store, folder: str) -> leases.Hold | None:
    """Return a hold on the prepared rows in a folder, or None if no driver removes them."""
    dataset = layout.dataset_at(f"{store.url}/{folder}")
    if dataset is None:
        return None
    url, dataset_id = dataset
    try:
        home = store if url == f"{store.url}/" else store.at(url)
        if not home.list(layout.lease_folder(dataset_id)):
            return None  # without a lease, the folder is a copy, which no driver removes
        if isinstance(home, ReadOnlyFolder):
            home = Store.create(url)
        return leases.Hold(leases.borrow(home, dataset_id))
    except StoreError as error:
        logger.info("The prepared rows in %s are read without protection from removal: %s", url, error)
        return None


def _manifest(store: Store, locations: Sequence[str], request: ColumnRequest) -> Manifest:
    """Return a manifest of files that are not a prepared dataset."""
    listed = [_data_files(store, location) for location in locations]
    footers = [read_footers(store, files, digests=True) for files in listed]
    first = next((footer for footer in footers[0] if any(footer.row_groups)), None)
    if first is None:
        raise DataError(f"There are no rows to train on in {store.url}/{locations[0]}: its files are empty.")
    _refuse_repeated(first.schema.names, f"{store.url}/{first.path}")
    in_folders = partition_columns([path.removeprefix(locations[0]) for path in listed[0]])
    _refuse_partition_columns(in_folders, first.schema.names, request, f"{store.url}/{locations[0]}")
    schema = _schema(store, locations[0], [footer for footer in footers[0] if any(footer.row_groups)], request)
    for footer in (footer for group in footers for footer in group if any(footer.row_groups)):
        _check(store, footer, first, schema)
    folders = [
        posixpath.dirname(location) if files == [location] else location
        for location, files in zip(locations, listed, strict=True)
    ]
    folder = posixpath.commonpath(folders)
    splits = [_split(group, folder) for group in footers]
    if len(locations) > 1 and not splits[1].rows:
        raise DataError(f"There are no rows to validate on in {store.url}/{locations[1]}: its files are empty.")
    held_out = splits[1] if len(locations) > 1 else None
    return Manifest(
        "existing files", folder, schema, splits[0], held_out, 0, locations[1] if len(locations) > 1 else None
    )


def selected(manifest: Manifest, request: ColumnRequest) -> Manifest:
    """Return the manifest with the selected columns only.

    Raises:
        SchemaError: a column does not exist, has two uses, or cannot be the weight, or a fill does not fit.
    """
    if request.features is not None:
        manifest = with_columns(manifest, request.features, request.labels, request.weight)
    elif request.labels or request.weight:
        requested = [*request.labels, *([] if request.weight is None else [request.weight])]
        others = {column for name in requested for column in manifest.schema.fields_of(name)}
        features = [name for name in manifest.schema.names() if name not in others]
        manifest = with_columns(manifest, features, request.labels, request.weight)
    if not request.fill:
        return manifest
    names = manifest.schema.names()
    for name in request.fill:
        if name not in names:
            raise SchemaError(f"fill names {name!r}, which is not a selected column; expected one of {names}.")
    filled = [
        replace(manifest.schema[name], fill=checked_fill(manifest.schema[name], value))
        for name, value in request.fill.items()
    ]
    return replace(manifest, schema=manifest.schema.replaced(filled))


def _data_files(store: Store, location: str) -> list[str]:
    listed = store.list(location)
    path_by_name = {path.removeprefix(location).lstrip("/"): path for path in listed}
    for name in path_by_name:
        _refuse_log(name, f"{store.url}/{location}")
    shown = [path_by_name[name] for name in shown_files(list(path_by_name))]
    if not shown:
        pattern = " Patterns are not expanded; pass a folder." if _PATTERN.search(location) else ""
        raise DataError(f"There are no Parquet files in {store.url}/{location}; check the path.{pattern}")
    left_out = sorted({path_by_name[name] for name in visible_files(list(path_by_name))} - set(shown))
    if left_out:
        logger.warning(
            "Skipped %s in %s/%s, as Spark does, for example %s. Read each folder separately, or name every folder by "
            "a column and a value, such as day=1.",
            counted(len(left_out), "file"),
            store.url,
            location,
            left_out[0],
        )
    return shown


def _refuse_log(path: str, url: str) -> None:
    for format_, description, log in _LOGS:
        if log.search(path):
            raise DataError(
                f"{url} is {description}. Only its log ({path.lstrip('/')}) says which files hold its current rows, "
                "so its files may contain rows that were deleted, replaced or never committed. Read it with Spark: "
                f'fit(spark.read.format("{format_}").load(...)), or pass that DataFrame to prepare_data.'
            )


def _refuse_repeated(names: Sequence[str], url: str) -> None:
    repeated = next((name for name, count in Counter(names).items() if count > 1), None)
    if repeated is not None:
        raise SchemaError(f"{url} has several columns named {repeated!r}. Write it again with one name per column.")


def _refuse_partition_columns(names: Iterable[str], in_files: Sequence[str], request: ColumnRequest, url: str) -> None:
    """Refuse columns that Spark reads from folder names, even if the files have other values for them."""
    stored = {name.lower(): name for name in in_files}
    selected = None
    if request.features is not None:
        selected = {name.lower() for name in (*request.features, *request.labels, request.weight) if name is not None}
    for folder in sorted(names):
        name = stored.get(folder.lower(), folder)
        if name.startswith(RESERVED_PREFIX) or not (selected is None or name.lower() in selected):
            continue
        where = "in the files of {} and also" if folder.lower() in stored else "not in the files of {} but"
        raise SchemaError(
            f"Column {name!r} is {where.format(url)} in the names of their folders ({folder}=...), which are not read. "
            "Select the other columns by name, or write the rows without partitionBy."
        )


def _schema(store: Store, location: str, footers: Sequence[Footer], request: ColumnRequest) -> DataSchema:
    packed = petastorm_schema.read(store, location, footers[0])
    schema = _selected(footers[0].schema, request, packed)
    schema = completed(schema, (), request.fill or {}, transformed=request.transformed)
    return _with_shapes(store, schema, footers)


def _selected(arrow: pa.Schema, request: ColumnRequest, packed: Mapping[str, petastorm_schema.Field]) -> DataSchema:
    others = [*request.labels, *([request.weight] if request.weight is not None else [])]
    features = request.features
    if features is None:
        left_out = {top for name in others for top in ([name] if name in arrow.names else _same(name, arrow.names))}
        features = [name for name in arrow.names if name not in left_out and not name.startswith(RESERVED_PREFIX)]
    roles: list[tuple[str, Role]] = [(name, "feature") for name in features]
    roles += [(name, "label") for name in request.labels]
    roles += [(name, "weight") for name in others[len(request.labels) :]]
    stored = dict(zip(arrow.names, arrow.types, strict=True))
    return DataSchema(tuple(column for name, role in roles for column in _columns(stored, name, role, packed)))


def _columns(
    stored: Mapping[str, pa.DataType], name: str, role: Role, packed: Mapping[str, petastorm_schema.Field]
) -> list[ColumnSpec]:
    """Return the column itself, or one per field of a struct; case matters only if names differ by nothing else."""
    if exact := _exact_columns(stored, name, role, packed):
        return exact
    spellings = _spellings(stored, name)
    if len(spellings) > 1:
        raise SchemaError(
            f"Column {name!r} (requested as {role}) is ambiguous: the files have {', '.join(map(repr, spellings))}. "
            "Use the spelling of one of them."
        )
    if not spellings:
        raise no_such_column(name, role, [*stored], "The files have")
    respelled = _exact_columns(stored, spellings[0], role, packed)
    return [replace(column, name=name + column.name[len(name) :], source=column.path) for column in respelled]


def _spellings(stored: Mapping[str, pa.DataType], name: str) -> list[str]:
    """Return the columns, or fields of structs, whose names differ from ``name`` in upper and lower case only."""
    key = name.lower()
    related = [top for top in stored if f"{key}.".startswith(f"{top.lower()}.") or top.lower().startswith(f"{key}.")]
    leaves = [".".join(leaf.path) for top in related for leaf in arrow_types.leaves((top,), stored[top])]
    return list(dict.fromkeys(leaf[: len(name)] for leaf in leaves if f"{leaf.lower()}.".startswith(f"{key}.")))


def _same(name: str, names: Iterable[str]) -> list[str]:
    return [other for other in names if other.lower() == name.lower()]


def _exact_columns(
    stored: Mapping[str, pa.DataType], name: str, role: Role, packed: Mapping[str, petastorm_schema.Field]
) -> list[ColumnSpec]:
    if name in packed and name in stored and packed[name].codec is not None:
        field = packed[name]
        return [ColumnSpec(name, field.dtype, field.shape, role, "array", codec=field.codec)]
    fields = [
        leaf.column(role)
        for top in _stored_columns_of(stored, name)
        for leaf in arrow_types.leaves((top,), stored[top])
    ]
    if len(fields) == 1 and name in packed:
        fields = [_as_declared(fields[0], packed[name], stored[fields[0].name])]
    return [column for column in fields if column.name == name or column.name.startswith(f"{name}.")]


def _as_declared(column: ColumnSpec, field: petastorm_schema.Field, arrow: pa.DataType) -> ColumnSpec:
    """Return the column with the number type that petastorm declares, because Spark may have no such column type."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    is_plain = column.kind == "scalar" and column.is_number and not pa.types.is_decimal(arrow)
    if not is_plain or field.dtype not in NUMBERS or field.dtype == column.dtype:
        return column
    return replace(column, dtype=field.dtype, codec="scalar")


def _stored_columns_of(stored: Mapping[str, pa.DataType], name: str) -> list[str]:
    """Return the stored columns that hold ``name``: the column itself, a column per field, or its struct."""
    if name in stored:
        return [name]
    # prepare_data writes the fields of a struct as columns of their own.
    fields = [other for other in stored if other.startswith(f"{name}.")]
    return fields or [other for other in stored if name.startswith(f"{other}.")]


def _with_shapes(store: Store, schema: DataSchema, footers: Iterable[Footer]) -> DataSchema:
    """Return the schema with the shapes of the first values that are not NULL."""
    unknown = {column.name: column for column in schema.columns if column.shape is None}
    complete_columns = []
    for footer in footers:
        if not unknown:
            break
        filesystem, arrow_path = store.arrow(footer.path)
        names = columns.stored_names(DataSchema(tuple(unknown.values())))
        with filesystem.open_input_file(arrow_path) as file:
            for batch in _batches(columns.open_parquet(file), names):
                for column in list(unknown.values()):
                    values = columns.stored(batch, column).drop_null()
                    if complete := _with_shape(values, column, f"{store.url}/{footer.path}"):
                        complete_columns.append(complete)
                        del unknown[column.name]
                if not unknown:
                    break
    if unknown:
        raise DataError(
            f"Column {next(iter(unknown))!r} or its inner arrays are NULL in all rows, so its shape is unknown. "
            "Leave it out."
        )
    return schema.replaced(complete_columns)


def _batches(file: parquet.ParquetFile, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield small batches of each row group: Arrow cannot read dictionaries in lists across row groups."""
    for index in range(file.num_row_groups):
        yield from file.iter_batches(_SEARCH_ROWS, row_groups=[index], columns=names)


def _with_shape(values: pa.Array, column: ColumnSpec, url: str) -> ColumnSpec | None:
    """Return the column with the lengths of the first arrays that are not NULL; None if there are no such arrays."""
    if not len(values):
        return None
    if column.codec is not None:
        header = codecs.peek(values[0].as_py(), column.codec)
        return replace(column, shape=header.shape, dtype=str(header.dtype))
    shape = []
    for _ in range(column.depth):
        if not len(values):
            return None
        lengths = columns.lengths(values)
        if lengths is None or not lengths[0]:
            raise SchemaError(
                f"Column {column.name!r} has an empty array in {url}, but all its arrays need a length of at least 1. "
                "Leave the column out."
            )
        shape.append(int(lengths[0]))
        values = values if column.kind == "vector" else values.flatten().drop_null()
    return replace(column, shape=tuple(shape))


def _check(store: Store, footer: Footer, first: Footer, schema: DataSchema) -> None:
    """Refuse a file whose footer shows a different type, NULL, or arrays of different lengths."""
    url = f"{store.url}/{footer.path}"
    expected, actual = _types(first), _types(footer)
    leaves = _leaves(footer)
    for column in schema.columns:
        first_type, own_type = _type_at(column.path, expected), _type_at(column.path, actual)
        if first_type is None or own_type is None or not _are_equivalent(own_type, first_type):
            raise SchemaError(
                f"Column {'.'.join(column.path)!r} is {first_type} in {store.url}/{first.path} and "
                f"{own_type or 'missing'} in {url}; all files must have the same columns."
            )
        own_leaves = leaves.get(".".join(column.path), [])
        for leaf in own_leaves:
            if leaf.path in footer.julian and leaf.low is not None:
                calendars.check_calendar(column, leaf.low, url)
        if column.kind != "vector" and len(own_leaves) == 1:
            _check_leaf(column, own_leaves[0], footer.row_groups, url)


def _types(footer: Footer) -> dict[str, pa.DataType]:
    return dict(zip(footer.schema.names, footer.schema.types, strict=True))


def _type_at(path: Sequence[str], types: Mapping[str, pa.DataType]) -> pa.DataType | None:
    """Return the type of a column or of one field of a struct; None if it is missing."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    top, *fields = path
    arrow_type = types.get(top)
    for name in fields:
        arrow_type = None if arrow_type is None else columns.plain_type(arrow_type)
        if arrow_type is None or not pa.types.is_struct(arrow_type) or arrow_type.get_field_index(name) < 0:
            return None
        arrow_type = arrow_type.field(name).type
    return arrow_type


def _are_equivalent(first: pa.DataType, other: pa.DataType) -> bool:
    return bool(first == other or arrow_types.logical_type(first) == arrow_types.logical_type(other))


def _leaves(footer: Footer) -> dict[str, list[LeafFacts]]:
    """Return the leaves at or below each path in the schema of a file."""
    leaves: dict[str, list[LeafFacts]] = {}
    for leaf in footer.columns:
        for path in accumulate(leaf.path.split("."), "{}.{}".format):
            leaves.setdefault(path, []).append(leaf)
    return leaves


def _check_leaf(column: ColumnSpec, leaf: LeafFacts, row_groups: Iterable[int], url: str) -> None:
    if column.fill is not None:
        return  # a NULL array counts as one value, so the counts do not show the lengths
    if leaf.nulls:
        raise DataError(
            f"Column {column.name!r} ({column.role}) has {counted(leaf.nulls, 'NULL value')} in {url}. Set fill for "
            "this column, or write the files without these rows."
        )
    expected = 1 if column.codec is not None else math.prod(column.shape or ())
    for rows, values in zip(row_groups, leaf.values, strict=True):
        if values != rows * expected:
            raise SchemaError(
                f"Column {column.name!r} ({column.role}) has arrays of different lengths in {url}: "
                f"{counted(values, 'value')} in {counted(rows, 'row')}, where the first row has {expected}. All rows "
                "must have the same shape; pad or cut them."
            )


def _split(footers: Iterable[Footer], folder: str) -> Split:
    prefix = f"{folder}/" if folder else ""
    paths = [(footer, footer.path.removeprefix(prefix)) for footer in footers]
    return Split(
        tuple(
            DataFile(path, footer.row_groups, footer.size, footer.digest)
            for footer, path in paths
            if any(footer.row_groups)
        )
    )
