"""Any Parquet as a dataset: which files there are, what their columns are, how many rows.

The shape of an array column is that of its first row; a reader that meets another one says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkhvd.data import columns
from sparkhvd.data.manifest import DataFile, Manifest, Split, load
from sparkhvd.data.schema import ColumnSpec, DataSchema, Fill, Kind
from sparkhvd.errors import DataError, SchemaError, StoreError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

_MANIFEST = "manifest.json"
_DATES = {"date32[day]": "datetime64[D]", "timestamp[us]": "datetime64[us]", "timestamp[ns]": "datetime64[ns]"}


@dataclass(frozen=True)
class _Footer:
    file: DataFile
    schema: pa.Schema


def open_data(
    data: str | Manifest, store: Store | None, storage_options: Mapping[str, Any] | None, fill: Mapping[str, Fill]
) -> tuple[Store, Manifest]:
    """Where rows lie and what they are.

    Args:
        data: a manifest, or a URL (with ``store``: a path in it) of a Parquet file, of a folder with such files in any
            depth, or of a prepared dataset.
        store: the Store in which ``data`` lies; needed for a manifest.
        storage_options: of the Store of a URL.
        fill: by column, what to put where the data have NULL.

    Raises:
        StoreError: there is nothing, or it cannot be read.
        DataError: there is no Parquet, or the files do not fit together.
        SchemaError: a column has a type that cannot be read, or ``fill`` names none.
    """
    if isinstance(data, Manifest):
        if store is None:
            raise StoreError("A manifest says nothing of the Store that it lies in; pass store= with it.")
        return store, _filled(data, fill)
    folder, path = ("", data.strip("/")) if store is not None else _split(data)
    found = store or Store.create(folder, **({} if storage_options is None else {"storage_options": storage_options}))
    return found, _filled(_manifest(found, path), fill)


def _split(url: str) -> tuple[str, str]:
    """The folder of a file or of a dataset, and the name in it."""
    local = Path(url.removeprefix("file://"))
    if "://" not in url.removeprefix("file://") and not local.exists():
        raise StoreError(f"There is nothing at {url}; give the URL of a Parquet file or of a folder of them.")
    folder, _, name = url.rstrip("/").rpartition("/")
    return folder or ".", name


def _manifest(store: Store, path: str) -> Manifest:
    manifest = path if path.endswith(_MANIFEST) else f"{path}/{_MANIFEST}"
    if store.exists(manifest):
        return load(store, manifest)
    folder, files = _files(store, path)
    with ThreadPoolExecutor(16, thread_name_prefix="sparkhvd-footers") as pool:
        footers = list(pool.map(lambda file: _footer(store, folder, file), files))
    first = footers[0]
    for other in footers[1:]:
        if not other.schema.equals(first.schema):
            raise SchemaError(
                f"{store.url}/{folder}/{other.file.path} has other columns than {first.file.path}: "
                f"{_difference(first.schema, other.schema)}. Read one kind of files at a time."
            )
    rows = _first_row(store, f"{folder}/{next((f.file for f in footers if any(f.file.row_groups)), first.file).path}")
    schema = DataSchema(tuple(spec for field in first.schema for spec in _specs(field, rows)))
    split = Split(tuple(footer.file for footer in footers))
    return Manifest(path, folder, schema, split, None, 0, None)


def _files(store: Store, path: str) -> tuple[str, list[str]]:
    try:
        found = [file for file in store.list(path) if not _hidden(file.removeprefix(path))]
    except StoreError:  # not a folder
        found = []
    if found and found != [path]:
        wanted = [file.removeprefix(f"{path}/") for file in found if file.endswith((".parquet", ".parq"))]
        if not wanted:
            raise DataError(f"There is no .parquet file in {store.url}/{path}; the first file there is {found[0]}.")
        return path, wanted
    if not store.exists(path):
        raise StoreError(f"There is nothing at {store.url}/{path}; give a Parquet file or a folder of them.")
    folder, _, name = path.rpartition("/")
    return folder, [name]


def _hidden(path: str) -> bool:
    return any(part.startswith(("_", ".")) for part in path.split("/"))


def _opened(store: Store, path: str) -> parquet.ParquetFile:
    import pyarrow as pa  # noqa: PLC0415  (heavy)
    from pyarrow import parquet  # noqa: PLC0415

    try:
        filesystem, place = store.arrow(path)
        return parquet.ParquetFile(place, filesystem=filesystem, coerce_int96_timestamp_unit="us")
    except pa.ArrowInvalid as error:
        raise DataError(f"{store.url}/{path} cannot be read as Parquet: {error}.") from error
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"Cannot read {store.url}/{path}: {error}.") from error


def _footer(store: Store, folder: str, file: str) -> _Footer:
    with _opened(store, f"{folder}/{file}".lstrip("/")) as opened:
        groups = range(opened.metadata.num_row_groups)
        rows = tuple(opened.metadata.row_group(index).num_rows for index in groups)
        return _Footer(DataFile(file, rows), opened.schema_arrow)


def _first_row(store: Store, path: str) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415

    with _opened(store, path.lstrip("/")) as opened:
        batch = next(opened.iter_batches(1, use_threads=False), None)
        return batch if batch is not None else pa.RecordBatch.from_pylist([], opened.schema_arrow)


def _specs(field: pa.Field, rows: pa.RecordBatch) -> list[ColumnSpec]:
    """A column, or the fields of a struct as columns."""
    import pyarrow as pa  # noqa: PLC0415

    if not pa.types.is_struct(field.type):
        return [_spec(field.name, field.type, (field.name,), rows)]
    names = [inner.name for inner in field.type]
    if tuple(names) == columns.VECTOR_FIELDS:
        spec = ColumnSpec(field.name, "float64", None, "feature", "vector")
        (size,) = columns.lengths(rows.column(field.name)) if rows.num_rows else (1,)  # type: ignore[misc]
        return [replace(spec, shape=(int(size),))]
    return [_spec(f"{field.name}.{i.name}", i.type, (field.name, i.name), rows) for i in field.type]


def _spec(name: str, arrow: pa.DataType, source: tuple[str, ...], rows: pa.RecordBatch) -> ColumnSpec:
    import pyarrow as pa  # noqa: PLC0415

    shape: list[int] = []
    spec = ColumnSpec(name, "float64", None, "feature", "scalar", source=source)
    value: Any = columns.stored(rows, spec)[0].as_py() if rows.num_rows else None
    element = arrow
    while pa.types.is_list(element) or pa.types.is_large_list(element) or pa.types.is_fixed_size_list(element):
        shape.append(len(value) if value is not None else 1)
        value = value[0] if value else None
        element = element.value_type
    kind: Kind = "array" if shape else "scalar"
    return replace(spec, dtype=_dtype(name, element), shape=tuple(shape), kind=kind, depth=len(shape))


def _dtype(name: str, arrow: pa.DataType) -> str:
    import pyarrow as pa  # noqa: PLC0415

    types = pa.types
    if types.is_boolean(arrow):
        return "bool"
    if types.is_integer(arrow) or types.is_floating(arrow):
        return str(arrow.to_pandas_dtype().__name__)
    if types.is_decimal128(arrow):
        return columns.decimal_dtype(arrow.precision, arrow.scale)
    if types.is_string(arrow) or types.is_large_string(arrow):
        return "str"
    if types.is_binary(arrow) or types.is_large_binary(arrow) or types.is_fixed_size_binary(arrow):
        return "bytes"
    known = _DATES.get(str(arrow).partition(",")[0].rstrip("]") + "]")
    if known is None:
        raise SchemaError(
            f"Column {name!r} has the type {arrow}, which cannot be read. Numbers, booleans, decimals, strings, "
            "binary, dates, timestamps, lists and structs of these and ML vectors can; write the file without it."
        )
    return known


def _filled(manifest: Manifest, fill: Mapping[str, Fill]) -> Manifest:
    unknown = [name for name in fill if name not in manifest.schema.names()]
    if unknown:
        raise SchemaError(f"fill names {unknown[0]!r}; there are {', '.join(map(repr, manifest.schema.names()))}.")
    if not fill:
        return manifest
    filled = [replace(manifest.schema[name], fill=value) for name, value in fill.items()]
    return replace(manifest, schema=manifest.schema.replaced(filled))


def _difference(one: pa.Schema, other: pa.Schema) -> str:
    ours, theirs = ({f"{field.name}: {field.type}" for field in schema} for schema in (one, other))
    differing = sorted(ours ^ theirs)
    return ", ".join(differing[:4]) if differing else "in another order"
