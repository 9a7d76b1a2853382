"""Reads the schema of a petastorm dataset without petastorm.

petastorm stores it as a pickle in the key-value metadata of ``_common_metadata``. A pickle may run any code, so the
unpickler here knows only the few names of such a schema, replaces them with inert classes, and refuses everything else.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkhvd.data.schema.data_schema import NUMBERS, Codec
from sparkhvd.errors import DataError
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from sparkhvd.data.prepare.footers import Footer

KEY = b"dataset-toolkit.unischema.v1"
_FILES = ("_common_metadata", "_metadata")
_CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "NdarrayCodec": "ndarray",
        "CompressedNdarrayCodec": "compressed_ndarray",
        "CompressedImageCodec": "image",
    }
)
# The names of petastorm's package before it was published.
_OLD_PACKAGE = re.compile(r"av\.(experimental\.deepdrive|ml)\.dataset_toolkit\.")
_CURRENT_NAMES: Mapping[str, str] = MappingProxyType({"string_": "bytes_", "unicode_": "str_"})  # names until numpy 2
_NUMPY_NAMES = NUMBERS - {"bool"} | {"bool_", "str_", "bytes_", "string_", "unicode_", "datetime64", "dtype"}


@dataclass(frozen=True)
class Field:
    """A column of a petastorm dataset.

    Attributes:
        dtype: numpy name of the elements' type.
        shape: shape of a row; None where petastorm leaves a dimension open.
        codec: how a value is packed; None for plain Parquet columns.
    """

    dtype: str
    shape: tuple[int, ...] | None
    codec: Codec | None


def read(store: Store, folder: str, footer: Footer) -> dict[str, Field]:
    """Return the fields of the petastorm dataset in a folder; empty for other datasets.

    Raises:
        DataError: the schema is damaged, or petastorm did not write it.
    """
    for name in _FILES:
        path = f"{folder}/{name}"
        if store.exists(path):
            content = _metadata(store, path).get(KEY)
            if content is not None:
                return parse(content, f"{store.url}/{path}")
    content = (footer.schema.metadata or {}).get(KEY)
    return {} if content is None else parse(content, f"{store.url}/{footer.path}")


def parse(content: bytes, where: str) -> dict[str, Field]:
    """Return the fields of a pickled Unischema.

    Raises:
        DataError: it is damaged, or refers to a name that does not belong in a schema.
    """
    try:
        loaded = _Unpickler(content).load()
        fields = vars(loaded)["_fields"]
        return {str(name): _field(field) for name, field in fields.items()}
    except DataError:
        raise
    except _ForbiddenError as error:
        raise DataError(
            f"The petastorm schema in {where} refers to {error}, which does not belong in a schema. It was not loaded, "
            "because a pickle can run any code. Write the dataset again with petastorm, or as plain Parquet."
        ) from None
    except Exception as error:
        raise DataError(
            f"The petastorm schema in {where} cannot be read: {error!r}. The file is damaged; write the dataset again."
        ) from error


def _metadata(store: Store, path: str) -> dict[bytes, bytes]:
    import pyarrow as pa  # noqa: PLC0415  (heavy)
    from pyarrow import parquet  # noqa: PLC0415

    filesystem, arrow_path = store.arrow(path)
    try:
        with filesystem.open_input_file(arrow_path) as file:
            return dict(parquet.read_metadata(file).metadata or {})
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{store.url}/{path} cannot be read: {str(error).rstrip('.')}. It should hold petastorm's schema in the "
            "footer of a Parquet file: repair it, or write the dataset again."
        ) from error


class _ForbiddenError(Exception):
    """A name that does not belong in a schema."""


class _Inert:
    """Stands in for a class of petastorm or pyspark: keeps its arguments and does nothing."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _InertField(tuple[Any, ...]):
    """Stands in for petastorm's named tuple (name, numpy type, shape, codec, nullable)."""

    __slots__ = ()

    def __new__(cls, *values: object) -> _InertField:
        return super().__new__(cls, values)


def _reconstruct(kind: type[Any], base: type[Any], state: Any) -> object:
    """Create an object as pickle protocols 0 and 1 do."""
    if issubclass(kind, _InertField):
        return kind(*state)
    if issubclass(kind, _Inert) and base is object:
        return kind()
    raise _ForbiddenError(f"an object of {kind!r}")


def _restore(name: str, fields: object, values: Any) -> object:  # noqa: ARG001  (as pyspark calls it)
    """Create a named tuple from the form in which pyspark before 3.3 pickled all named tuples of a process."""
    if name != "UnischemaField":
        raise _ForbiddenError(f"a named tuple {name!r}")
    return _InertField(*values)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # These classes serve this pickle only, so that its changes to them do not outlive it.
        plain = type("Plain", (_Inert,), {})
        self._known: dict[tuple[str, str], Any] = {
            ("petastorm.unischema", "Unischema"): type("Unischema", (_Inert,), {}),
            ("petastorm.unischema", "UnischemaField"): type("UnischemaField", (_InertField,), {"__slots__": ()}),
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("copyreg", "_reconstructor"): _reconstruct,
            ("copy_reg", "_reconstructor"): _reconstruct,
            ("pyspark.serializers", "_restore"): _restore,
            ("decimal", "Decimal"): plain,
            **{("petastorm.codecs", name): type(name, (_Inert,), {}) for name in ("ScalarCodec", *_CODECS)},
            **{("numpy", name): getattr(np, _CURRENT_NAMES.get(name, name)) for name in _NUMPY_NAMES},
        }
        for builtins in ("builtins", "__builtin__"):
            for kind in (object, tuple, str, bytes):
                self._known[builtins, kind.__name__] = kind
        self._plain = plain

    def find_class(self, module: str, name: str) -> Any:
        module = _OLD_PACKAGE.sub("petastorm.", module)
        if module == "pyspark.sql.types" and name.isidentifier():
            return self._plain
        if (module, name) not in self._known:
            raise _ForbiddenError(f"{module}.{name}")
        return self._known[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise _ForbiddenError(f"the external object {pid!r}")


def _field(field: tuple[Any, ...]) -> Field:
    name, kind, shape, codec = field[:4]
    packed = _CODECS.get(type(codec).__name__)
    known = all(isinstance(size, int) for size in shape or ())
    dtype = "object" if isinstance(kind, type) and issubclass(kind, _Inert) else np.dtype(kind).name
    if packed is not None and dtype not in NUMBERS:
        raise DataError(
            f"Column {name!r} holds packed arrays of {dtype}, but only arrays of numbers can be read. Write the "
            "dataset again without this column."
        )
    return Field(dtype, tuple(shape or ()) if known else None, packed)
