"""Read petastorm's datasets without petastorm; ``tests/petastorm/write_datasets.py`` wrote the one used here."""

from __future__ import annotations

import collections
import os
import pickle
import pickletools
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkhvd.data import ParquetSource, torch_loader
from sparkhvd.data.external import petastorm_schema
from sparkhvd.data.external.parquet_files import open_existing
from sparkhvd.data.external.petastorm_reader import PetastormSource
from sparkhvd.errors import DataError, SchemaError
from sparkhvd.world import World

DATASET = Path(__file__).parents[3] / "petastorm" / "dataset"


def opened(features, **options):
    return open_existing(str(DATASET), feature_cols=features, label_cols=["y"], **options)


def rows_of(files):
    source = ParquetSource(files.store, files.manifest, "train", World(), 4, seed=0, shuffle=False)
    batches = list(source.epoch(0))
    return {name: np.concatenate([batch.columns[name] for batch in batches]) for name in files.manifest.schema.names()}


@pytest.mark.parametrize("decoder", ["PIL", "cv2"])
def test_every_codec_restores_the_written_values(decoder, monkeypatch):
    pytest.importorskip(decoder)
    if decoder == "cv2":
        monkeypatch.setitem(sys.modules, "PIL.Image", None)
    files = opened(["id", "name", "matrix", "packed", "open", "image", "depth"], transformed=True)
    assert {column.name: (column.dtype, column.shape) for column in files.manifest.schema.columns} == {
        "id": ("int32", ()),
        "name": ("str", ()),
        "matrix": ("float32", (2, 3)),
        "packed": ("int16", (4,)),
        "open": ("uint8", (3, 2)),
        "image": ("uint8", (5, 4, 3)),
        "depth": ("uint16", (3, 2)),
        "y": ("float64", ()),
    }
    columns = rows_of(files)
    assert columns["id"].tolist() == list(range(10))
    for i in range(10):
        assert columns["y"][i] == i / 2
        assert columns["name"][i] == f"row {i}"
        np.testing.assert_array_equal(columns["matrix"][i], np.arange(6).reshape(2, 3) + i)
        np.testing.assert_array_equal(columns["packed"][i], [-i] * 4)
        np.testing.assert_array_equal(columns["open"][i], np.full((3, 2), i))
        np.testing.assert_array_equal(columns["image"][i], (np.arange(60).reshape(5, 4, 3) * 4 + i) % 256)
        np.testing.assert_array_equal(columns["depth"][i], np.arange(6).reshape(3, 2) * 10_000 + i)


def test_the_loaders_decode_petastorms_columns_too():
    pytest.importorskip("PIL")
    (batch,) = torch_loader(str(DATASET), 10, columns=["image", "packed", "y"], shuffle=False)
    assert {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in batch.items()} == {
        "image": ("torch.uint8", (10, 5, 4, 3)),
        "packed": ("torch.int16", (10, 4)),
        "y": ("torch.float64", (10,)),
    }
    assert batch["packed"][3].tolist() == [-3] * 4


def test_images_without_a_decoder_name_the_package_to_install(monkeypatch):
    modules = sys.modules
    monkeypatch.setitem(modules, "PIL.Image", None)
    monkeypatch.setitem(modules, "cv2", None)
    with pytest.raises(DataError, match=r"need Pillow or OpenCV, and neither is installed\. Install one of them: pip"):
        rows_of(opened(["image"]))


def metadata():
    return dict(parquet.read_metadata(DATASET / "_common_metadata").metadata)[petastorm_schema.KEY]


def test_the_schema_of_the_dataset_uses_only_allowed_names():
    assert sorted(petastorm_schema.parse(metadata(), "here")) == sorted(
        ["depth", "id", "image", "matrix", "name", "open", "packed", "y"]
    )


def pickled_by_old_versions(package, monkeypatch, tuple_name="UnischemaField"):
    """Return a schema in the form of petastorm with pyspark before 3.3, which pickled named tuples by a function."""

    def made(module, name, *bases, **content):
        return type(name, bases, {"__module__": module, **content})

    def _restore(name, fields, values):
        raise AssertionError("pyspark's own function is not called")

    _restore.__module__, _restore.__qualname__ = "pyspark.serializers", "_restore"

    def reduced(field):
        return _restore, (tuple_name, ("name", "numpy_dtype", "shape", "codec", "nullable"), tuple(field))

    kinds = [
        made(f"{package}.unischema", "Unischema"),
        made(f"{package}.unischema", "UnischemaField", tuple, __reduce__=reduced),
        made(f"{package}.codecs", "NdarrayCodec"),
        made(f"{package}.codecs", "ScalarCodec"),
        made("pyspark.sql.types", "ShortType"),
    ]
    for name in ("pyspark.serializers", "pyspark.sql.types", f"{package}.unischema", f"{package}.codecs"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace())
    for kind in [*kinds, _restore]:
        setattr(sys.modules[kind.__module__], kind.__qualname__, kind)
    unischema_kind, field, ndarray, scalar, short = kinds
    schema, stored_as = unischema_kind(), scalar()
    stored_as._spark_type = short()
    schema._fields = collections.OrderedDict(
        id=field(("id", np.uint8, (), stored_as, False)), x=field(("x", np.float32, (2, 3), ndarray(), False))
    )
    monkeypatch.setattr("builtins.__import__", lambda name, *_: sys.modules[name])  # the packages have no other modules
    content = pickle.dumps(schema, 2)
    monkeypatch.undo()
    return content


@pytest.mark.parametrize("package", ["petastorm", "av.ml.dataset_toolkit", "av.experimental.deepdrive.dataset_toolkit"])
def test_schemas_of_old_versions_are_opened(package, monkeypatch):
    content = pickled_by_old_versions(package, monkeypatch)
    assert b"pyspark.serializers\n_restore" in content
    assert package.encode() in content
    assert petastorm_schema.parse(content, "here") == {
        "id": petastorm_schema.Field("uint8", (), None),
        "x": petastorm_schema.Field("float32", (2, 3), "ndarray"),
    }


def test_other_named_tuples_of_old_versions_are_refused(monkeypatch):
    content = pickled_by_old_versions("petastorm", monkeypatch, tuple_name="Other")
    with pytest.raises(DataError, match=r"refers to a named tuple 'Other', which does not belong in a schema\."):
        petastorm_schema.parse(content, "here")


def with_rows_changed(folder, change, types=None):
    """Return a copy of the dataset whose files have changed values and types."""
    shutil.copytree(DATASET, folder)
    for path in sorted(folder.glob("part-*")):
        schema = parquet.read_schema(path)
        for name, arrow in (types or {}).items():
            schema = schema.set(schema.get_field_index(name), pa.field(name, arrow))
        rows = parquet.read_table(path).to_pylist()
        for row in rows:
            change(row)
        parquet.write_table(pa.Table.from_pylist(rows, schema), path)
    return folder


def test_packed_values_that_are_null_are_filled(tmp_path):
    def drop(row):
        if row["id"] in {0, 3}:
            row.update(packed=None, open=None)

    files = open_existing(
        str(with_rows_changed(tmp_path / "d", drop, {"packed": pa.binary(), "open": pa.binary()})),
        feature_cols=["id", "packed", "open"],
        label_cols=["y"],
        fill={"packed": -7, "open": 9},
    )
    found = rows_of(files)
    for i in range(10):
        np.testing.assert_array_equal(found["packed"][i], [-7 if i in {0, 3} else -i] * 4)
        np.testing.assert_array_equal(found["open"][i], np.full((3, 2), 9 if i in {0, 3} else i))


def test_scalars_have_the_type_that_the_schema_declares(tmp_path):
    stored = {"id": pa.int64(), "y": pa.float32()}
    changed = with_rows_changed(tmp_path / "d", lambda row: None, stored)
    found = rows_of(open_existing(str(changed), feature_cols=["id"], label_cols=["y"]))
    assert {name: array.dtype for name, array in found.items()} == {"id": np.int32, "y": np.float64}
    assert found["id"].tolist() == list(range(10))
    assert found["y"].tolist() == [i / 2 for i in range(10)]


def test_a_scalar_that_does_not_fit_the_declared_type_is_refused(tmp_path):
    def enlarge(row):
        row["id"] += 2**40

    changed = with_rows_changed(tmp_path / "d", enlarge, {"id": pa.int64()})
    files = open_existing(str(changed), feature_cols=["id"], label_cols=["y"])
    with pytest.raises(
        DataError, match=rf"Column 'id' in .* contains {2**40}, which its declared type int32 cannot hold"
    ):
        rows_of(files)


class Evil:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("content", "name"),
    [
        (Evil(os.system, "touch /tmp/sparkhvd-was-here"), r"(posix|os)\.system"),
        (Evil(eval, "1"), r"(__builtin__|builtins)\.eval"),
        (Evil(getattr, "a", "upper"), r"(__builtin__|builtins)\.getattr"),
        (collections.Counter("a"), r"collections\.Counter"),
        (np.zeros(2), r"numpy\..*_reconstruct|numpy\..*_frombuffer|_codecs\.encode"),
    ],
)
def test_a_pickle_with_any_other_content_is_not_opened(protocol, content, name):
    with pytest.raises(DataError, match=f"refers to {name}, which does not belong in a schema. It was not loaded"):
        petastorm_schema.parse(pickle.dumps(content, protocol), "here")


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("petastorm.codecs", "os"), ("pyspark.sql.types", "a.b"), ("numpy", "load")],
)
def test_a_schema_that_refers_to_another_global_is_refused(module, name):
    names = (b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    content = b"\x80\x04" + b"".join(names) + b"\x93."  # the opcodes SHORT_BINUNICODE (twice), STACK_GLOBAL and STOP
    with pytest.raises(DataError, match=re.escape(f"refers to {module}.{name}, which does not belong in a schema")):
        petastorm_schema.parse(content, "here")


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(1), pickle.dumps({"_fields": 1})])
def test_a_damaged_schema_is_reported(content):
    with pytest.raises(DataError, match="The petastorm schema in here cannot be read"):
        petastorm_schema.parse(content, "here")


def test_a_truncated_schema_is_reported():
    content = metadata()
    assert any(opcode.name == "REDUCE" for opcode, _, _ in pickletools.genops(content))
    for length in range(0, len(content), 7):
        with pytest.raises(DataError, match="The petastorm schema in here cannot be read"):
            petastorm_schema.parse(content[:length], "here")


def test_a_packed_value_of_another_shape_is_named(tmp_path):
    folder = tmp_path / "dataset"
    shutil.copytree(DATASET, folder)
    first, *_ = sorted(folder.glob("part-*"))
    rows = parquet.read_table(first).to_pylist()
    rows[1]["open"] = rows[1]["matrix"]
    parquet.write_table(pa.Table.from_pylist(rows, parquet.read_schema(first)), first)
    files = open_existing(str(folder), feature_cols=["open"], label_cols=["y"])
    with pytest.raises(DataError, match=r"'open' in .*: row 1 holds float32 of shape \[2, 3\], expected uint8"):
        rows_of(files)


def test_a_string_column_is_refused():
    with pytest.raises(SchemaError, match="Column 'name' has the type string"):
        opened(["name"])


def test_the_error_for_a_missing_petastorm_names_the_supported_versions(monkeypatch):
    monkeypatch.setitem(sys.modules, "petastorm", None)
    files = opened(["id"])
    with pytest.raises(DataError, match=r"petastorm==0\.13\.1 pyarrow==14\.0\.2 .*reader='native' reads the same"):
        PetastormSource(files.store, files.manifest, "train", World(), 4, seed=0, shuffle=False)


@pytest.mark.parametrize("name", ["a.b", "_id", "class", "x (m)"])
def test_a_column_that_petastorm_cannot_read_is_refused(tmp_path, name):
    parquet.write_table(pa.table({name: [1.0], "y": [2.0]}), tmp_path / "rows.parquet")
    files = open_existing(str(tmp_path), feature_cols=[name], label_cols=["y"])
    with pytest.raises(SchemaError, match=rf"petastorm cannot read column {re.escape(repr(name))}, .* reader='native'"):
        PetastormSource(files.store, files.manifest, "train", World(), 4, seed=0, shuffle=False)
