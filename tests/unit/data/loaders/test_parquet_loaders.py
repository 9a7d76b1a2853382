from __future__ import annotations

import datetime
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader

from sparkhvd.comm import session
from sparkhvd.data import ColumnSpec, DataSchema, Manifest, torch_loader
from sparkhvd.data.schema.manifest import DataFile, Split
from sparkhvd.errors import ConfigError, DataError, SchemaError, StoreError
from sparkhvd.store import LocalStore
from tests.unit.data.conftest import SCHEMA, expected, table_of


@pytest.fixture
def folder(tmp_path):
    """Write files like those of pandas or Spark: 300 rows in three files, and a marker."""
    made = tmp_path / "numbers"
    made.mkdir()
    (made / "_SUCCESS").touch()
    for name, start in (("a.parquet", 0), ("b.parquet", 100), ("c.parquet", 200)):
        parquet.write_table(table_of(range(start, start + 100)), made / name, row_group_size=30)
    return made


def ids_of(batches):
    return [batch["id"].tolist() for batch in batches]


def test_a_loader_returns_tensors_by_column_for_a_folder_of_files(folder):
    batches = list(torch_loader(str(folder), 64, columns=["a.b", "id", "flags"], shuffle=False))
    assert [list(batch) for batch in batches] == [["a.b", "id", "flags"]] * 5
    ids = torch.cat([batch["id"] for batch in batches])
    assert ids.tolist() == list(range(300))
    assert torch.equal(torch.cat([b["a.b"] for b in batches]), torch.from_numpy(expected(ids)["a.b"]))
    assert all(tensor.is_contiguous() for batch in batches for tensor in batch.values())
    assert batches[0]["flags"].dtype is torch.bool


@pytest.mark.parametrize(("columns", "message"), [("id", r"list of column names: \['id'\]"), ([], "at least one")])
def test_columns_must_be_a_list_of_names(folder, columns, message):
    with pytest.raises(SchemaError, match=message):
        torch_loader(str(folder), 64, columns=columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 2.0}, r"^batch_size=2.0 must be a whole number\.$"),
        ({"batch_size": True}, r"^batch_size=True must be a whole number\.$"),
        ({"batch_size": None}, r"^batch_size=None must be a whole number\.$"),
        ({"steps_per_epoch": 1.5}, r"^steps_per_epoch=1.5 must be a whole number or None\.$"),
        ({"seed": "a"}, r"^seed='a' must be a whole number\.$"),
        ({"rank": "0", "size": 2}, r"^rank='0' must be a whole number or None\.$"),
        ({"rank": 0, "size": 2.0}, r"^size=2.0 must be a whole number or None\.$"),
        ({"threads": "many"}, r"^threads='many' must be a whole number\.$"),
        ({"split": "Train"}, r"^split='Train' must be one of 'train', 'validation'\.$"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        torch_loader(str(folder), **{"batch_size": 64, **options})


def test_numbers_of_numpy_are_numbers(folder):
    loader = torch_loader(str(folder), np.int64(64), seed=np.int32(2), steps_per_epoch=np.int16(3), columns=["id"])
    plain = torch_loader(str(folder), 64, seed=2, steps_per_epoch=3, columns=["id"])
    assert ids_of(loader) == ids_of(plain)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_ranks_share_the_rows_and_have_equally_many_batches(folder, shuffle):
    options = {"shuffle": shuffle, "columns": ["id"], "seed": 2}
    ranks = [torch_loader(f"file://{folder}", 7, rank=rank, size=3, **options) for rank in range(3)]
    assert {len(loader) for loader in ranks} == {15}
    found = [ids_of(loader) for loader in ranks]
    assert [len(batches) for batches in found] == [15] * 3
    assert sorted(i for batches in found for batch in batches for i in batch) == list(range(300))


def test_the_rank_of_hvd_init_is_used(folder):
    session.init()
    try:
        assert len(torch_loader(str(folder), 300, columns=["id"])) == 1
    finally:
        session.shutdown()


def test_set_epoch_changes_the_order_and_resumes_at_a_step(folder):
    loader = torch_loader(str(folder), 32, columns=["id"], seed=1)
    first = ids_of(loader)
    assert ids_of(loader) == first
    loader.set_epoch(0, first_step=4)
    assert ids_of(loader) == first[4:]
    assert ids_of(loader) == first
    loader.set_epoch(1)
    assert ids_of(loader) != first


def test_a_dataloader_without_workers_accepts_the_loader(folder):
    loader = torch_loader(str(folder), 100, columns=["id"], shuffle=False)
    assert ids_of(DataLoader(loader, batch_size=None)) == ids_of(loader)


WORKERS = """
import sys
from torch.utils.data import DataLoader
from sparkhvd.data import torch_loader

try:
    loader = torch_loader(sys.argv[1], 100)
    list(DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context=sys.argv[2]))
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_dataloader_with_workers_is_refused(folder, start):
    """Run in a separate process: a fork of this process would end its connections with Spark (through py4j)."""
    command = [sys.executable, "-c", WORKERS, str(folder), start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    assert "use it with DataLoader(..., num_workers=0), or without a DataLoader" in done.stdout, done.stderr


def test_a_transformation_gets_every_batch_as_arrays(folder):
    def halves(columns):
        return {"half": columns["id"] / 2, "length": np.array([len(text) for text in columns["a"]])}

    batches = list(torch_loader(str(folder), 50, columns=["id", "a"], shuffle=False, transformation_fn=halves))
    assert [list(batch) for batch in batches] == [["half", "length"]] * 6
    assert torch.cat([batch["half"] for batch in batches]).tolist() == [n / 2 for n in range(300)]
    assert set(torch.cat([batch["length"] for batch in batches]).tolist()) == {len("not selected")}
    with pytest.raises(DataError, match="transformation_fn returned 1 row of column 'id' for a batch of 50"):
        list(torch_loader(str(folder), 50, transformation_fn=lambda columns: {"id": columns["id"][:1]}))


def test_a_prepared_dataset_is_found_by_its_folder_and_by_its_manifest(store, make_dataset):
    manifest = make_dataset(((10,), (20,)), validation=((5,),))
    for data, more in (
        (f"{store.root}/{manifest.folder}", {}),
        (f"{store.url}/{manifest.path}", {}),
        (manifest.path, {"store": store}),
        (manifest, {"store": store}),
    ):
        assert sum(map(len, ids_of(torch_loader(data, 8, **more)))) == 30
    assert ids_of(torch_loader(manifest, 8, store=store, split="validation", shuffle=False)) == [[0, 1, 2, 3, 4]]
    with pytest.raises(StoreError, match="pass store="):
        torch_loader(manifest, 8)


def test_one_file_with_every_type_that_can_be_read(tmp_path):
    table = pa.table(
        {
            "text": ["a", "b"],
            "raw": [b"x", b"y"],
            "price": pa.array([Decimal("1.25"), Decimal("2.50")], pa.decimal128(6, 2)),
            "count": pa.array([Decimal(7), Decimal(8)], pa.decimal128(6, 0)),
            "day": [datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)],
            "time": pa.array([1, 2], pa.timestamp("us", "UTC")),
            "small": pa.array([1, 2], pa.int8()),
            "nested": pa.array([[[1.0, 2.0]], [[3.0, 4.0]]], pa.list_(pa.list_(pa.float32()))),
            "place": pa.array([{"x": 1.0, "name": "p"}, {"x": 2.0, "name": "q"}]),
            "gaps": pa.array([1, None], pa.int32()),
        }
    )
    parquet.write_table(table, tmp_path / "types.parquet")
    seen = {}

    def numbers(columns):
        seen.update(columns)
        return {name: array for name, array in columns.items() if array.dtype.kind in "biuf"}

    url = str(tmp_path / "types.parquet")
    (batch,) = torch_loader(url, 2, shuffle=False, fill={"gaps": -1}, transformation_fn=numbers)
    assert seen["text"].tolist() == ["a", "b"]
    assert seen["raw"].tolist() == [b"x", b"y"]
    assert seen["day"].dtype == np.dtype("datetime64[D]")
    assert seen["time"].dtype == np.dtype("datetime64[us]")
    assert seen["place.name"].tolist() == ["p", "q"]
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "price": [1.25, 2.5],
        "count": [7, 8],
        "small": [1, 2],
        "nested": [[[1.0, 2.0]], [[3.0, 4.0]]],
        "place.x": [1.0, 2.0],
        "gaps": [1, -1],
    }
    with pytest.raises(SchemaError, match=r"Column 'text' \(object\) cannot become a tensor; leave it out"):
        list(torch_loader(url, 2, columns=["small", "text"]))
    with pytest.raises(DataError, match=r"Column 'gaps' \(feature\) has 1 NULL value in .*Set fill"):
        torch_loader(url, 2, columns=["gaps"])
    (batch,) = torch_loader(url, 2, columns=["place.x", "gaps"], fill={"gaps": -1}, shuffle=False)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {"place.x": [1.0, 2.0], "gaps": [1, -1]}


def test_paths_that_cannot_be_opened_are_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"There are no Parquet files in .*/nowhere; check the path"):
        torch_loader(str(tmp_path / "nowhere"), 8)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "text").write_text("not Parquet")
    with pytest.raises(DataError, match=r"/text cannot be read as a Parquet file"):
        torch_loader(str(tmp_path / "text"), 8)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.csv").write_text("1")
    with pytest.raises(DataError, match=r"/empty/a\.csv cannot be read as a Parquet file"):
        torch_loader(str(tmp_path / "empty"), 8)
    with pytest.raises(SchemaError, match=r"There is no column 'nothing' .*The files have 'id', "):
        torch_loader(str(folder), 8, columns=["nothing"])
    with pytest.raises(ConfigError, match="rank=1 and size=None belong together"):
        torch_loader(str(folder), 8, rank=1)
    parquet.write_table(pa.table({"id": [1.5]}), folder / "z.parquet")
    with pytest.raises(SchemaError, match=r"Column 'id' is int64 in .*a.parquet and double in .*numbers/z.parquet"):
        torch_loader(str(folder), 8, columns=["id"])


@pytest.fixture
def sparse(tmp_path):
    """Write a prepared dataset of four vectors of size 5, two of which are [0, 0, 3, 0, 0] and [1, 0, 0, 0, 2]."""
    entries = [([2], [3.0]), ([], []), ([0, 4], [1.0, 2.0]), ([1], [-1.0])]
    rows = [{"type": 0, "size": 5, "indices": places, "values": values} for places, values in entries]
    fields = [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
    store = LocalStore(str(tmp_path / "sparse"))
    with store.open("datasets/d/rows/0.parquet", "wb") as file:
        parquet.write_table(pa.table({"v": pa.array(rows, pa.struct(fields)), "id": range(4)}), file)
    schema = DataSchema(
        (
            ColumnSpec("v", "float64", (5,), "feature", "vector", sparse=True, entries=2),
            ColumnSpec("id", "int64", (), "label", "scalar"),
        )
    )
    split = Split((DataFile("rows/0.parquet", (4,)),))
    manifest = Manifest("d", "datasets/d", schema, split, None, 0, None)
    store.publish(manifest.path, manifest.to_json())
    return f"{store.root}/datasets/d"


def test_vectors_that_were_prepared_sparse_are_sparse_tensors(sparse):
    first, second = torch_loader(sparse, 3, shuffle=False)
    assert first["v"].is_sparse
    assert first["v"].to_dense().tolist() == [[0, 0, 3, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 2]]
    assert second["v"].shape == (1, 5)
    assert [second["v"].indices().tolist(), second["v"].values().tolist()] == [[[0], [1]], [-1.0]]
    assert [batch["v"].shape for batch in torch_loader(sparse, 3, rank=1, size=2)] == [(2, 5)]


TENSORFLOW = """
import gc
import sys
import tensorflow as tf
from sparkhvd.data import tf_dataset, torch_loader
from sparkhvd.data.read.readers import RowSource

folder, nine, sparse = sys.argv[1:]
data = tf_dataset(folder, 64, epochs=2, columns=["id", "a.b", "a"], seed=4)
assert data.cardinality().numpy() == 10
assert data.map(lambda row: row["id"]).options().autotune.enabled is False
loader = torch_loader(folder, 64, columns=["id"], seed=4)
wanted = [batch["id"].tolist() for batch in loader]
loader.set_epoch(1)
wanted += [batch["id"].tolist() for batch in loader]
assert [batch["id"].numpy().tolist() for batch in data] == wanted
assert next(iter(data))["a"].numpy()[0] == b"not selected"
assert data.element_spec["a.b"].shape.as_list() == [None, 3]
half = lambda columns: {"half": columns["id"] / 2}
assert next(iter(tf_dataset(folder, 2, shuffle=False, transformation_fn=half)))["half"].numpy().tolist() == [0, 0.5]
# A rank without rows in the last step.
data = tf_dataset(nine, 4, rank=1, size=2, columns=["id", "a"], shuffle=False)
assert [len(batch["id"]) for batch in data] == [4, 0]
first, second = tf_dataset(sparse, 3, shuffle=False)
assert tf.sparse.to_dense(first["v"]).numpy().tolist() == [[0, 0, 3, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 2]]
assert second["v"].shape.as_list() == [1, 5] and second["v"].values.numpy().tolist() == [-1]
# An iterator keeps its rows, also for the next epoch; nothing else keeps the rows of pipelines that are gone.
ids = iter(tf_dataset(folder, 64, epochs=2).map(lambda row: row["id"]))
gc.collect()
assert len(list(ids)) == 10
del data, loader, ids
gc.collect()
assert not [source for source in gc.get_objects() if issubclass(type(source), RowSource)]
print("all right")
"""


def test_tensorflow_gets_the_same_batches_in_every_epoch(folder, sparse, tmp_path):
    """Run in a separate process, because TensorFlow leaves threads and environment variables behind."""
    parquet.write_table(table_of(range(9)), tmp_path / "nine.parquet")
    command = [sys.executable, "-c", TENSORFLOW, str(folder), str(tmp_path / "nine.parquet"), sparse]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert "all right" in done.stdout, done.stderr


def test_the_schema_of_these_tests_has_all_columns(folder):
    (batch,) = torch_loader(str(folder), 300, columns=SCHEMA.names())
    assert list(batch) == SCHEMA.names()


def test_a_transformation_gives_batches_without_rows_the_same_columns(tmp_path):
    """The function cannot be called for batches without rows."""
    parquet.write_table(pa.table({"words": ["1", "20", "3", "4"], "id": [0, 1, 2, 3]}), tmp_path / "texts.parquet")

    def numbers(columns):
        return {"words": np.array([[len(text), int(text)] for text in columns["words"]], np.float32)}

    options = {"shuffle": False, "transformation_fn": numbers}
    ranks = [torch_loader(str(tmp_path / "texts.parquet"), 1, rank=rank, size=3, **options) for rank in range(3)]
    shapes = [[(list(batch), batch["words"].shape, batch["words"].dtype) for batch in loader] for loader in ranks]
    full, empty = ((["words"], (rows, 2), torch.float32) for rows in (1, 0))
    assert shapes == [[full, full], [full, empty], [full, empty]]
    (batch,) = torch_loader(str(tmp_path / "texts.parquet"), 1, rank=4, size=5, **options)
    assert (list(batch), batch["words"].shape, batch["words"].dtype) == empty, "a rank without any rows"
