from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkhvd.data import ColumnSpec, DataSchema, Manifest
from sparkhvd.data.schema.manifest import DataFile, Split
from sparkhvd.store import LocalStore, layout

SCHEMA = DataSchema(
    (
        ColumnSpec("id", "int64", (), "feature", "scalar"),
        ColumnSpec("a.b", "float32", (3,), "feature", "array"),
        ColumnSpec("flags", "bool", (2,), "feature", "array"),
        ColumnSpec("y", "bool", (), "label", "scalar"),
    )
)


def table_of(ids):
    """Return rows whose values depend only on their ids, so that a test can check any row anywhere."""
    ids = np.asarray(ids, np.int64)
    return pa.table(
        {
            "id": ids,
            "a.b": pa.array(list(expected(ids)["a.b"]), pa.list_(pa.float32())),
            "flags": pa.array(expected(ids)["flags"].tolist(), pa.list_(pa.bool_())),
            "y": pa.array(expected(ids)["y"]),
            "a": pa.array(["not selected"] * len(ids), pa.string()),
        }
    )


def expected(ids):
    ids = np.asarray(ids, np.int64)
    return {
        "id": ids,
        "a.b": np.stack([ids, ids * 2, -ids], axis=1).astype(np.float32),
        "flags": np.stack([ids % 2 == 0, ids % 3 == 0], axis=1),
        "y": ids % 5 == 0,
    }


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "store"))


@pytest.fixture
def make_dataset(store):
    """Provide a function that writes a dataset from the row groups per file of its training and validation rows."""

    def make(train=((10,),), validation=None, dataset_id="d", schema=SCHEMA):
        folder = layout.dataset_folder(dataset_id)

        def write(name, files):
            first, written = 0, []
            for number, groups in enumerate(files):
                path = f"rows/{name}-{number}.parquet"
                with (
                    store.open(f"{folder}/{path}", "wb") as file,
                    parquet.ParquetWriter(file, table_of([]).schema) as writer,
                ):
                    for rows in groups:
                        writer.write_table(table_of(range(first, first + rows)), row_group_size=max(rows, 1))
                        first += rows
                written.append(DataFile(path, tuple(groups)))
            return Split(tuple(written))

        manifest = Manifest(
            dataset_id, folder, schema, write("train", train), validation and write("val", validation), 3, None
        )
        store.publish(manifest.path, manifest.to_json())
        return manifest

    return make


@pytest.fixture
def edit_manifest(store):
    """Provide a function that changes the JSON of a published manifest."""

    def edit(manifest, change):
        with store.open(manifest.path, "rb") as file:
            content = json.load(file)
        change(content)
        with store.open(manifest.path, "wb") as file:
            file.write(json.dumps(content).encode())

    return edit
