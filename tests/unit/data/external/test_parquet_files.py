from __future__ import annotations

import datetime
import hashlib
import os
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkhvd.data import ParquetSource, torch_loader
from sparkhvd.data.external.parquet_files import ColumnRequest, open_existing, selected
from sparkhvd.data.read import blocks
from sparkhvd.data.read.blocks import ParquetBlocks
from sparkhvd.data.read.readers import ReadOptions
from sparkhvd.data.read.shards import Piece
from sparkhvd.data.schema import columns
from sparkhvd.errors import DataError, SchemaError, StoreError
from sparkhvd.store import LocalStore
from sparkhvd.world import World


def table(first, rows):
    ids = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int32()),
            "x": pa.array([[[float(i), 1.0], [2.0, 3.0]] for i in ids], pa.list_(pa.list_(pa.float32()))),
            "fixed": pa.array([[i, i + 1] for i in ids], pa.list_(pa.uint8(), 2)),
            "s": pa.array([{"a": i, "b": {"c": -i}} for i in ids]),
            "text": pa.array([f"row {i}" for i in ids]).dictionary_encode(),
            "at": pa.array([datetime.datetime(2024, 1, 1 + i % 9) for i in ids], pa.timestamp("ns")),  # noqa: DTZ001
            "y": pa.array([i * 0.5 for i in ids]),
        }
    )


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    parquet.write_table(table(0, 5), folder / "part-0.parquet", row_group_size=2)
    parquet.write_table(table(5, 0), folder / "part-1.parquet")
    parquet.write_table(table(5, 3), folder / "part-2.parquet")
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.crc").write_bytes(b"x")
    return folder


def opened(path, features=("id",), labels=("y",), **options):
    return open_existing(str(path), feature_cols=features and list(features), label_cols=list(labels), **options)


def rows_of(files, split="train"):
    source = ParquetSource(files.store, files.manifest, split, World(), 3, seed=0, shuffle=False)
    batches = list(source.epoch(0))
    return {name: np.concatenate([batch.columns[name] for batch in batches]) for name in files.manifest.schema.names()}


def test_files_of_pyarrow_are_read_in_the_order_of_their_names(folder):
    files = opened(folder, ["id", "x", "fixed", "s", "text", "at"], transformed=True)
    assert files.manifest.train.block_rows() == (2, 2, 1, 3)
    assert [column.shape for column in files.manifest.schema.columns] == [(), (2, 2), (2,), (), (), (), (), ()]
    columns = rows_of(files)
    assert list(columns) == ["id", "x", "fixed", "s.a", "s.b.c", "text", "at", "y"]
    assert columns["id"].tolist() == list(range(8))
    assert columns["x"].tolist() == [[[i, 1], [2, 3]] for i in range(8)]
    assert columns["fixed"].tolist() == [[i, i + 1] for i in range(8)]
    assert columns["s.b.c"].tolist() == [-i for i in range(8)]
    assert columns["text"].tolist() == [f"row {i}" for i in range(8)]
    assert columns["at"].dtype == np.dtype("datetime64[ns]")
    assert {name: columns[name].dtype for name in ("id", "x", "fixed", "s.a", "y")} == {
        "id": np.int32,
        "x": np.float32,
        "fixed": np.uint8,
        "s.a": np.int64,
        "y": np.float64,
    }


@pytest.mark.parametrize(
    ("log", "description", "format_"),
    [
        ("_delta_log/00000000000000000000.json", "a Delta table", "delta"),
        (".hoodie/hoodie.properties", "a Hudi table", "hudi"),
        ("metadata/v1.metadata.json", "an Iceberg table", "iceberg"),
        ("metadata/00001-5c1e.metadata.json", "an Iceberg table", "iceberg"),
        ("_spark_metadata/0", "the output of a streaming query", "parquet"),
    ],
)
def test_a_folder_with_a_transaction_log_is_refused(folder, log, description, format_):
    (folder / log).parent.mkdir()
    (folder / log).touch()
    for open_it in (lambda: opened(folder), lambda: torch_loader(str(folder), 4)):
        with pytest.raises(DataError, match=rf"is {description}\. .*read\.format\(\"{format_}\"\)"):
            open_it()


def test_extension_types_and_views_are_read_as_the_types_that_store_them(tmp_path):
    tensors = pa.FixedSizeListArray.from_arrays(pa.array(range(8), pa.float32()), 4)
    stored = {
        "tensor": pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), (2, 2)), tensors),
        "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1], pa.int8())),
        "id": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, b"b" * 16], pa.binary(16))),
        "text": pa.array(["a", "text that does not fit into a view"], pa.string_view()),
        "bytes": pa.array([b"a", b"b"], pa.binary_view()),
        "pair": pa.array([[1, 2], [3, 4]], pa.list_view(pa.int64())),
        "pairs": pa.array([[[1, 2]], [[3, 4]]], pa.large_list_view(pa.list_(pa.int64()))),
        "s": pa.StructArray.from_arrays([pa.array(["u", "v"], pa.string_view())], ["view"]),
        "y": pa.array([0.5, 1.5]),
    }
    parquet.write_table(pa.table(stored), tmp_path / "rows.parquet")
    rows = rows_of(opened(tmp_path, None, transformed=True))
    assert {name: array.tolist() for name, array in rows.items()} == {
        "tensor": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "flag": [0, 1],
        "id": [b"a" * 16, b"b" * 16],
        "text": ["a", "text that does not fit into a view"],
        "bytes": [b"a", b"b"],
        "pair": [[1, 2], [3, 4]],
        "pairs": [[[1, 2]], [[3, 4]]],
        "s.view": ["u", "v"],
        "y": [0.5, 1.5],
    }


def test_a_file_with_two_columns_of_one_name_is_refused(tmp_path):
    parquet.write_table(pa.table([[1, 2], [3, 4], [5, 6]], names=["x", "x", "y"]), tmp_path / "rows.parquet")
    with pytest.raises(SchemaError, match=r"rows\.parquet has several columns named 'x'\. Write it again"):
        torch_loader(str(tmp_path), 2, columns=["x"])


def test_a_pipe_in_the_folder_is_not_read(folder):
    os.mkfifo(folder / "pipe")
    assert "pipe" not in LocalStore(str(folder)).list("")
    assert opened(folder).manifest.train.rows == 8


def test_a_folder_named_metadata_is_not_a_table(folder):
    (folder / "part-0.parquet").rename(folder / "_keep")
    (folder / "metadata" / "n=1").mkdir(parents=True)
    (folder / "_keep").rename(folder / "metadata" / "n=1" / "part-0.parquet")
    assert opened(folder).manifest.train.rows == 5


def test_selecting_a_partition_column_is_refused(tmp_path):
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        parquet.write_table(table(5 * day, 5), tmp_path / f"day={day}" / "part-0.parquet")
    message = r"Column 'day' is not in the files of .* but in the names of their folders \(day=\.\.\.\)"
    for features in (["id", "day"], None):
        with pytest.raises(SchemaError, match=message):
            opened(tmp_path, features, transformed=True)
    assert rows_of(opened(tmp_path))["id"].tolist() == list(range(5, 15))
    (tmp_path / "day=1").rename(tmp_path / "ID=1")
    message = r"Column 'id' is in the files of .* and also in the names of their folders \(ID=\.\.\.\)"
    with pytest.raises(SchemaError, match=message):
        opened(tmp_path, ["id"])


def test_the_first_array_that_is_not_null_shows_the_shape(tmp_path):
    schema = pa.schema({"a": pa.list_(pa.int32()), "y": pa.float64()})
    nothing, something = {"a": None, "y": 1.0}, {"a": [1, 2], "y": 2.0}
    parquet.write_table(pa.Table.from_pylist([nothing] * 20, schema), tmp_path / "0.parquet", row_group_size=7)
    with pytest.raises(DataError, match="Column 'a' or its inner arrays are NULL in all rows, so its shape is unknown"):
        opened(tmp_path, ["a"], fill={"a": 7})
    rows = [nothing] * 18 + [something, nothing]
    parquet.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "1.parquet", row_group_size=3)
    found = rows_of(opened(tmp_path, ["a"], fill={"a": 7}))["a"]
    assert found.tolist() == [[7, 7]] * 38 + [[1, 2], [7, 7]]
    with pytest.raises(DataError, match=r"Column 'a' \(feature\) has 20 NULL values"):
        opened(tmp_path, ["a"])


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_times_of_any_unit_are_refused_with_a_conversion(tmp_path, unit):
    at = pa.array([datetime.datetime(2024, 1, 1)], pa.timestamp(unit))  # noqa: DTZ001
    parquet.write_table(pa.table({"at": at, "y": [1.0]}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=r"Column 'at' has the type timestamp, .*: turn it into a number first"):
        opened(tmp_path, ["at"])
    assert rows_of(opened(tmp_path, ["at"], transformed=True))["at"].dtype == np.dtype(f"datetime64[{unit}]")


@pytest.mark.parametrize("row_group_size", [1, 2])
def test_times_beyond_those_of_python_and_invalid_text_may_be_in_a_file(tmp_path, row_group_size):
    years = np.array(["-0044-03-15", "9999-12-31T23:59:59"], "datetime64[us]") + np.timedelta64(5, "h")
    text = pa.array([b"\xff", b"x"])
    content = {
        "at": pa.array(years.astype(np.int64)).cast(pa.timestamp("us", "America/New_York")),
        "day": pa.array(years.astype("datetime64[D]").astype(np.int32)).cast(pa.date32()),
        "text": pa.Array.from_buffers(pa.string(), 2, text.buffers()),
        "y": [1.0, 2.0],
    }
    parquet.write_table(pa.table(content), tmp_path / "x.parquet", row_group_size=row_group_size)
    rows = rows_of(opened(tmp_path, ["at", "day"], transformed=True))
    assert rows["at"].tolist() == years.tolist()
    assert rows["day"].tolist() == years.astype("datetime64[D]").tolist()
    assert rows["y"].tolist() == [1.0, 2.0]


def test_a_field_of_a_struct_is_a_column_too(folder):
    files = opened(folder, ["s.b.c", "id"], labels=["s.a"])
    assert files.manifest.schema.names() == ["s.b.c", "id", "s.a"]
    assert rows_of(files)["s.b.c"].tolist() == [-i for i in range(8)]
    assert opened(folder, ["s.b"]).manifest.schema.names() == ["s.b.c", "y"]
    with pytest.raises(SchemaError, match=r"There is no column 's.x' \(requested as feature\)"):
        opened(folder, ["s.x"])


def test_names_are_found_in_any_case_unless_they_differ_in_nothing_else(tmp_path, folder):
    files = opened(folder, ["S.B", "ID"], labels=["Y"])
    assert files.manifest.schema.names() == ["S.B.c", "ID", "Y"]
    rows = rows_of(files)
    assert (rows["S.B.c"].tolist(), rows["ID"].tolist()) == ([-i for i in range(8)], list(range(8)))
    assert "y" not in opened(folder, None, labels=["Y"], transformed=True).manifest.schema.names()
    parquet.write_table(pa.table({"a": [1], "A": [2], "y": [0.5]}), tmp_path / "x.parquet")
    assert opened(tmp_path / "x.parquet", None, labels=["A"]).manifest.schema.names() == ["a", "y", "A"]
    parquet.write_table(pa.table({"bb": [1], "bB": [2], "y": [0.5]}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=r"Column 'BB' .* is ambiguous: the files have 'bb', 'bB'\."):
        opened(tmp_path / "x.parquet", ["BB"])


def test_a_single_file_of_any_name_is_read(folder):
    files = opened(folder / "part-0.parquet")
    assert [file.path for file in files.manifest.train.files] == ["part-0.parquet"]
    assert files.manifest.folder == ""
    assert rows_of(files)["id"].tolist() == list(range(5))


def test_a_folder_of_a_prepared_dataset_is_recognized(store, make_dataset):
    manifest = make_dataset(((10,), (20,)), validation=((5,),))
    files = opened(f"{store.root}/{manifest.folder}", ["a.b"], fill={"a.b": 0.5})
    assert [(column.name, column.role, column.fill) for column in files.manifest.schema.columns] == [
        ("a.b", "feature", 0.5),
        ("y", "label", None),
    ]
    assert (files.manifest.train.rows, files.manifest.validation.rows) == (30, 5)
    assert opened(f"{store.root}/{manifest.folder}", None).manifest.schema.names() == ["id", "a.b", "flags", "y"]
    with pytest.raises(SchemaError, match=r"The fill value 'x' does not fit column 'a.b'"):
        opened(f"{store.root}/{manifest.folder}", ["a.b"], fill={"a.b": "x"})
    with pytest.raises(DataError, match="There are 30 rows to train on but num_proc is 31"):
        opened(f"{store.root}/{manifest.folder}", ["a.b"], num_proc=31)


def test_files_of_pandas_serve_as_training_and_validation_rows(tmp_path):
    for name, rows in [("train", 4), ("held_out", 2)]:
        pd.DataFrame({"x": np.arange(rows, dtype="float32"), "y": [True] * rows}).to_parquet(tmp_path / f"{name}.pq")
    files = open_existing(
        str(tmp_path / "train.pq"), (tmp_path / "held_out.pq").as_uri(), feature_cols=None, label_cols=["y"]
    )
    assert files.manifest.schema.names() == ["x", "y"]
    assert rows_of(files)["x"].tolist() == [0, 1, 2, 3]
    assert rows_of(files, "validation")["y"].tolist() == [True, True]


def test_vectors_written_by_spark_are_recognized(tmp_path):
    vectors = [
        {"type": 1, "size": None, "indices": None, "values": [1.0, 2.0]},
        {"type": 0, "size": 2, "indices": [1], "values": [3.0]},
    ]
    parquet.write_table(pa.table({"v": vectors, "y": [0, 1]}), tmp_path / "v.parquet")
    swapped = pa.table({"v": pa.array(vectors).cast(VECTOR), "y": [0, 1]})
    parquet.write_table(swapped, tmp_path / "v.parquet")
    files = opened(tmp_path / "v.parquet", ["v"])
    assert files.manifest.schema["v"] == columns_of_vector(files)
    assert rows_of(files)["v"].tolist() == [[1, 2], [0, 3]]


VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def columns_of_vector(files):
    found = files.manifest.schema["v"]
    assert (found.kind, found.shape, found.dtype) == ("vector", (2,), "float64")
    return found


def test_missing_and_other_files_are_reported_with_the_path(tmp_path, folder):
    with pytest.raises(DataError, match=r"There are no Parquet files in file://.*/nowhere; check the path"):
        opened(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (folder / "part-3.csv").write_text("id,y\n1,2\n")
    with pytest.raises(
        DataError, match=r"part-3.csv cannot be read as a Parquet file .* is damaged, was cut off, or is"
    ):
        opened(folder)


def test_the_shape_of_a_column_comes_from_the_first_inner_array_that_is_not_null(tmp_path):
    values = [[None]] * 20 + [[[1, 2]], None]
    column = pa.array(values, pa.list_(pa.list_(pa.int32())))
    parquet.write_table(pa.table({"x": column, "y": [0.5] * 22}), tmp_path / "a.parquet", row_group_size=7)
    files = opened(tmp_path, ("x",), fill={"x": 7})
    assert files.manifest.schema["x"].shape == (1, 2)
    assert rows_of(files)["x"].tolist() == [[[7, 7]]] * 20 + [[[1, 2]], [[7, 7]]]
    parquet.write_table(pa.table({"x": column[:20], "y": [0.5] * 20}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'x' or its inner arrays are NULL in all rows, so its shape is unknown"):
        opened(tmp_path, ("x",), fill={"x": 7})


def test_a_warning_names_a_broken_link_because_its_rows_are_missing(folder, caplog):
    (folder / "part-3.parquet").symlink_to(folder / "elsewhere.parquet")
    opened(folder)
    assert f"Skipped {folder}/part-3.parquet, a link to something that does not exist." in caplog.text


def test_a_truncated_file_is_named_before_any_row_is_read(folder):
    content = (folder / "part-2.parquet").read_bytes()
    (folder / "part-2.parquet").write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"part-2.parquet cannot be read as a Parquet file"):
        opened(folder)


def test_missing_and_unusable_columns_are_named(folder):
    with pytest.raises(SchemaError, match=r"There is no column 'idd' .* Did you mean 'id'\? The files have 'id', 'x'"):
        opened(folder, ["idd"])
    with pytest.raises(SchemaError, match=r"There is no column '`id`' .* Write 'id', without backticks"):
        opened(folder, ["`id`"])
    with pytest.raises(SchemaError, match="Column 'text' has the type string, which cannot be a feature of a model"):
        opened(folder, ["text"])
    parquet.write_table(
        pa.table(
            {"m": [[("a", 1)]], "y": [1]}, pa.schema([("m", pa.map_(pa.string(), pa.int64())), ("y", pa.int64())])
        ),
        folder / "m.parquet",
    )
    with pytest.raises(SchemaError, match=r"Column 'm' has the type map<.*cannot be used. The supported types are"):
        opened(folder / "m.parquet", ["m"])


def test_files_that_differ_in_a_selected_column_are_refused(folder):
    other = table(8, 1).drop_columns(["id"])
    parquet.write_table(other, folder / "part-3.parquet")
    assert rows_of(opened(folder, ["x"]))["y"].tolist()[-1] == 4.0
    with pytest.raises(SchemaError, match=r"Column 'id' is int32 in .*part-0.parquet and missing in .*part-3.parquet"):
        opened(folder)


def write(path, **content):
    parquet.write_table(pa.table(content), path)
    return path


@pytest.mark.parametrize("cache", [None, "memory", "disk"])
def test_files_may_store_the_same_type_in_different_ways(tmp_path, cache):
    lists = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64()))
    texts = pa.array(["1", "2"])
    structs = pa.array([{"a": 1}, {"a": 2}], pa.struct([("a", pa.int64())]))
    required = pa.list_(pa.field("element", pa.int64(), nullable=False))
    whole = pa.struct([pa.field("a", pa.int64(), nullable=False)])
    for number, columns_of_file in enumerate(
        [
            (lists, texts, structs),
            (lists.cast(required), texts.cast(pa.large_string()), structs.cast(whole)),
            (lists.cast(pa.large_list(pa.int64())), texts.dictionary_encode(), structs),
            (lists.cast(pa.list_(pa.int64(), 2)), texts, structs),
        ]
    ):
        parquet.write_table(pa.table(dict(zip("lts", columns_of_file, strict=True))), tmp_path / f"{number}")

    with torch_loader(str(tmp_path), 3, shuffle=False, transformation_fn=_as_numbers, cache=cache) as loader:
        for _ in range(2):
            batches = list(loader)
            assert np.concatenate([batch["l"] for batch in batches]).tolist() == [[1, 2], [3, 4]] * 4
            assert np.concatenate([batch["t"] for batch in batches]).tolist() == [1, 2] * 4
            assert np.concatenate([batch["s.a"] for batch in batches]).tolist() == [1, 2] * 4


WORDS = pa.dictionary(pa.int32(), pa.string())
PAIRS_OF_WORDS = pa.list_(WORDS, 2)


@pytest.mark.parametrize(
    "kind",
    [pa.list_(PAIRS_OF_WORDS), pa.list_(PAIRS_OF_WORDS, 2), pa.list_(pa.list_(WORDS)), pa.large_list(PAIRS_OF_WORDS)],
)
def test_nested_lists_of_encoded_strings_may_have_several_row_groups(tmp_path, kind):
    rows = [[["a", f"b{row}"], [f"c{row}", "a"]] for row in range(5)]
    content = pa.table({"t": pa.array(rows, kind), "y": pa.array([0.5] * 5)})
    parquet.write_table(content, tmp_path / "rows.parquet", row_group_size=2)
    assert rows_of(opened(tmp_path, ["t"], transformed=True))["t"].tolist() == rows


def test_the_first_inner_arrays_may_be_null_if_the_column_has_a_fill(tmp_path):
    nested = pa.array([[None, None], [None, [1.0, 2.0]]], pa.list_(pa.list_(pa.float64())))
    parquet.write_table(pa.table({"x": nested, "y": [0.0, 0.0]}), tmp_path / "rows.parquet")
    rows = rows_of(opened(tmp_path, ["x"], fill={"x": 0.5}))
    assert rows["x"].tolist() == [[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [1.0, 2.0]]]


# The rows of a file in another order within each row group: the footer stays the same.
_REORDERED = np.concatenate([np.arange(149.0, 99, -1), np.arange(199.0, 149, -1)])


def write_in_two_row_groups(path, values):
    rows = pa.table({"id": pa.array(values), "y": pa.array([0.0] * len(values))})
    new = path.with_name("new")
    parquet.write_table(rows, new, row_group_size=len(rows) // 2, use_dictionary=False, compression="none")
    new.rename(path)


@pytest.mark.parametrize(
    ("epochs_before", "values", "difference"),
    [
        (0, 1000.0 + np.arange(100.0), "has another footer than"),
        (1, np.arange(200.0), r"has \d+ bytes, but had \d+"),
        (1, 1000.0 + np.arange(100.0), "has another footer than"),
        (1, _REORDERED, "has another modification time than"),
    ],
)
def test_a_file_that_is_replaced_during_the_training_is_named(tmp_path, epochs_before, values, difference):
    for number in range(2):
        write_in_two_row_groups(tmp_path / f"{number}.parquet", np.arange(100.0) + 100 * number)
    files = opened(tmp_path)
    reading = ReadOptions(window_bytes=800)  # so small that each epoch reads the files again
    source = ParquetSource(files.store, files.manifest, "train", World(), 10, seed=0, shuffle=True, reading=reading)
    for epoch in range(epochs_before):
        assert sum(batch.columns["id"].sum() for batch in source.epoch(epoch)) == sum(range(200))
    write_in_two_row_groups(tmp_path / "1.parquet", values)
    with pytest.raises(DataError, match=rf"/1\.parquet {difference} when the training began: it was replaced"):
        list(source.epoch(epochs_before))


def test_the_digest_of_a_footer_is_that_of_its_bytes(tmp_path, monkeypatch):
    write_in_two_row_groups(tmp_path / "0.parquet", np.arange(100.0))
    content = (tmp_path / "0.parquet").read_bytes()
    footer = content[-8 - int.from_bytes(content[-8:-4], "little") :]
    assert blocks.footer_digest(pa.BufferReader(content), len(content)) == hashlib.sha256(footer).digest()
    monkeypatch.setattr(blocks, "_TAIL_BYTES", 100)
    assert blocks.footer_digest(pa.BufferReader(content), len(content)) == hashlib.sha256(footer).digest()


@pytest.mark.parametrize("row_group", [0, 1])
def test_a_file_that_is_replaced_within_an_epoch_is_named(tmp_path, row_group):
    """Its footer is read once per epoch, so a changed modification time is the only sign."""
    write_in_two_row_groups(tmp_path / "0.parquet", np.arange(100.0, 200.0))
    files = opened(tmp_path)
    parquet_blocks = ParquetBlocks(files.store, files.manifest.folder, files.manifest.train, files.manifest.schema, 20)
    first = parquet_blocks.batches(Piece(0, 0, 50))
    assert next(first).column("id").to_pylist() == [*range(100, 120)]
    write_in_two_row_groups(tmp_path / "0.parquet", _REORDERED)
    with pytest.raises(DataError, match=r"/0\.parquet has another modification time than when the training began"):
        list(first if row_group == 0 else parquet_blocks.batches(Piece(1, 0, 50)))


def test_files_may_name_different_time_zones(tmp_path):
    """Spark names UTC, pandas the zone in which it shows the times; both store the same numbers."""
    for name, zone in (("0", "UTC"), ("1", "+00:00"), ("2", "Europe/Berlin")):
        times = pa.array([[10**6, 2 * 10**6]], pa.list_(pa.timestamp("us", zone)))
        parquet.write_table(pa.table({"t": times.flatten(), "ts": pa.concat_arrays([times, times])}), tmp_path / name)
    rows = rows_of(opened(tmp_path, ["t", "ts"], (), transformed=True))
    assert rows["t"].dtype == "datetime64[us]"
    assert rows["t"].astype(np.int64).tolist() == [10**6, 2 * 10**6] * 3
    assert rows["ts"].astype(np.int64).tolist() == [[10**6, 2 * 10**6]] * 6


@pytest.mark.parametrize(
    ("version", "day"), [("2.4.8", "1500-01-01"), ("2.4.8", "2024-05-06"), ("3.5.0", "1500-01-01")]
)
def test_old_dates_in_files_of_spark_2_are_refused(tmp_path, version, day):
    rows = pa.table({"day": pa.array([datetime.date.fromisoformat(day)]), "y": [1.0]})
    noted = rows.replace_schema_metadata({"org.apache.spark.version": version})
    parquet.write_table(noted, tmp_path / "rows.parquet")
    url, wanted = str(tmp_path / "rows.parquet"), {"feature_cols": ["day"], "label_cols": ["y"], "transformed": True}
    if version > "3" or day > "1582":
        assert open_existing(url, **wanted).manifest.train.rows == 1
        return
    with pytest.raises(DataError, match=r"values before 1582-10-15 in .*in the Julian calendar \(before Spark 3\.1"):
        open_existing(url, **wanted)


@pytest.mark.parametrize(
    ("note", "is_julian"),
    [
        ({"org.apache.spark.version": "3.0.3"}, True),
        ({"org.apache.spark.version": "3.5.0", "org.apache.spark.legacyINT96": ""}, True),
        ({"org.apache.spark.version": "3.5.0", "org.apache.spark.legacyDateTime": ""}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["at", "s.at", "times"])
def test_old_96_bit_timestamps_in_the_julian_calendar_are_refused_when_they_are_read(tmp_path, note, is_julian, name):
    """Such timestamps have no statistics in the footer."""
    for year in (1850, 1950):
        times = [datetime.datetime(2024, 5, 6), datetime.datetime(year, 1, 1)]  # noqa: DTZ001
        rows = {
            "at": times,
            "s": [{"at": time} for time in times],
            "times": [[time] for time in times],
            "y": [1.0, 2.0],
        }
        table = pa.table(rows).replace_schema_metadata(note)
        parquet.write_table(table, tmp_path / "rows.parquet", use_deprecated_int96_timestamps=True)
        files = opened(tmp_path, [name], transformed=True)
        if not is_julian or year == 1950:
            assert rows_of(files)[name].ravel().tolist() == times
        else:
            with pytest.raises(DataError, match=rf"Column '{name}' .*has values before 1900-01-01 in .*int96"):
                rows_of(files)


@pytest.mark.parametrize(
    ("stored", "dtype", "expected"),
    [
        (pa.decimal32(9, 0), "int64", [12, -7]),
        (pa.decimal64(12, 2), "float64", [12.0, -7.0]),
        (pa.decimal256(10, 1), "float64", [12.0, -7.0]),
        (pa.decimal256(30, 1), "object", [Decimal(12), Decimal(-7)]),
    ],
)
def test_decimals_of_any_width_are_read_like_those_of_128_bits(tmp_path, stored, dtype, expected):
    numbers = pa.array([Decimal(12), Decimal(-7)], stored)
    rows = pa.table({"d": numbers, "ds": pa.FixedSizeListArray.from_arrays(pa.concat_arrays([numbers] * 2), 2)})
    parquet.write_table(rows, tmp_path / "0")
    wide = pa.decimal128(stored.precision, stored.scale)
    parquet.write_table(rows.cast(pa.schema({"d": wide, "ds": pa.list_(wide)})), tmp_path / "1")
    found = rows_of(opened(tmp_path, ["d", "ds"], (), transformed=True))
    assert found["d"].dtype == dtype
    assert found["d"].tolist() == expected * 2
    assert found["ds"].tolist() == [expected] * 4


def test_decimals_of_more_than_38_digits_are_refused(tmp_path):
    parquet.write_table(pa.table({"d": pa.array([Decimal(1)], pa.decimal256(39, 0))}), tmp_path / "0")
    with pytest.raises(SchemaError, match=r"'d' has the type decimal256\(39, 0\), which cannot be used"):
        opened(tmp_path, ["d"], ())


def test_files_may_order_the_fields_of_a_struct_differently(tmp_path):
    one = pa.struct({"a": pa.float64(), "b": pa.float64()})
    parquet.write_table(pa.table({"s": pa.array([{"a": 1.0, "b": 2.0}], one)}), tmp_path / "0")
    other = pa.struct({"c": pa.string(), "b": pa.float64(), "a": pa.float64()})
    parquet.write_table(pa.table({"s": pa.array([{"a": 10.0, "b": 20.0}], other)}), tmp_path / "1")
    rows = rows_of(opened(tmp_path, ["s"], ()))
    assert {name: array.tolist() for name, array in rows.items()} == {"s.a": [1.0, 10.0], "s.b": [2.0, 20.0]}
    parquet.write_table(pa.table({"s": pa.array([{"a": 100.0}])}), tmp_path / "2")
    assert rows_of(opened(tmp_path, ["s.a"], ()))["s.a"].tolist() == [1.0, 10.0, 100.0]
    with pytest.raises(SchemaError, match=r"Column 's\.b' is double in .*/0 and missing in .*/2; all files must"):
        opened(tmp_path, ["s"], ())


def _as_numbers(arrays):
    return {**arrays, "t": arrays["t"].astype(np.int64)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us"), pa.timestamp("ms")),
        (pa.list_(pa.int32()), pa.list_(pa.int64())),
        (pa.decimal128(30, 2), pa.decimal128(30, 4)),
    ],
)
def test_files_with_different_types_are_refused(tmp_path, one, other):
    for name, type_ in (("0", one), ("1", other)):
        array = pa.array([[1, 2]] if pa.types.is_list(type_) else [1]).cast(type_)
        parquet.write_table(pa.table({"v": array}), tmp_path / name)

    with pytest.raises(SchemaError, match=r"'v' is .* and .* in .*/1; all files must have the same columns"):
        torch_loader(str(tmp_path), 3)


def test_arrays_of_different_lengths_are_refused_from_the_footers(tmp_path):
    path = write(tmp_path / "p", x=[[1.0, 2.0], [1.0, 2.0, 3.0]], y=[0, 1])
    with pytest.raises(
        SchemaError, match=r"has arrays of different lengths in .*: 5 values in 2 rows, where the first"
    ):
        opened(path, ["x"])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1.0, 2.0], [1.0], [1.0, 2.0, 3.0]], "arrays of length 1 to 3, expected 2. All arrays of"),
        ([[[1, 2], [3, 4]], [[1], [2, 3, 4]]], "inner arrays of length 1 to 3, expected 2. All inner arrays of"),
    ],
)
def test_arrays_whose_lengths_have_the_expected_sum_are_refused_when_they_are_read(tmp_path, x, message):
    path = write(tmp_path / "p", x=x, y=list(range(len(x))))
    with pytest.raises(DataError) as raised:
        rows_of(opened(path, ["x"]))
    assert str(raised.value) == (
        f"Column 'x' in row group 0 of file://{path} has {message} a column must have the same length: pad or cut "
        "them, or leave the column out."
    )


def test_null_is_refused_or_filled(tmp_path):
    path = write(tmp_path / "p", x=[1.0, None], a=[[1, 2], None], y=[0, 1])
    with pytest.raises(DataError, match=r"Column 'x' \(feature\) has 1 NULL value in .*Set fill"):
        opened(path, ["x"])
    with pytest.raises(DataError, match=r"Column 'a' \(feature\) has 1 NULL"):
        opened(path, ["a"])
    found = rows_of(opened(path, ["x", "a"], fill={"x": -1.0, "a": 0}))
    assert (found["x"].tolist(), found["a"].tolist()) == ([1, -1], [[1, 2], [0, 0]])


def test_too_few_rows_are_reported_with_both_numbers(tmp_path, folder):
    with pytest.raises(DataError, match="There are 8 rows to train on but num_proc is 9"):
        opened(folder, num_proc=9)
    with pytest.raises(DataError, match="There are no rows to train on in"):
        opened(write(tmp_path / "p", id=pa.array([], pa.int32()), y=pa.array([], pa.int32())))
    with pytest.raises(DataError, match="There are no rows to validate on"):
        open_existing(str(folder), str(folder / "part-1.parquet"), feature_cols=["id"], label_cols=["y"])


def test_a_weight_must_be_a_number(folder):
    files = opened(folder, ["x"], weight_col="id")
    assert [column.name for column in files.manifest.schema.of("weight")] == ["id"]
    with pytest.raises(SchemaError, match=r"Column 'fixed' is not a number; a weight is one number per row"):
        opened(folder, ["x"], weight_col="fixed")
    manifest = opened(folder, ["x", "fixed"]).manifest  # such as that of prepared rows
    with pytest.raises(SchemaError, match=r"Column 'fixed' is not a number; a weight is one number per row"):
        selected(manifest, ColumnRequest(["x"], ["y"], "fixed"))


@pytest.mark.parametrize("request_", [ColumnRequest(["x", "y"], ["y"]), ColumnRequest(["x"], ["y"], "y")])
def test_a_column_has_one_use(folder, request_):
    manifest = opened(folder, ["x"]).manifest
    with pytest.raises(SchemaError, match=r"Column 'y' is selected more than once among features, labels, weight"):
        selected(manifest, request_)


def test_existing_files_are_never_written_to(folder):
    store = opened(folder).store
    before = sorted(Path(folder).iterdir())
    for write_to in (lambda: store.publish("x", b""), lambda: store.delete("x"), lambda: store.open("x", "wb")):
        with pytest.raises(StoreError, match="are read-only; sparkhvd never writes there"):
            write_to()
    assert sorted(Path(folder).iterdir()) == before
    assert columns.row_bytes(opened(folder).manifest.schema) == 12


def test_ten_thousand_columns_are_opened_and_chosen_in_seconds(tmp_path):
    names = [f"c{number}" for number in range(10_000)]
    parquet.write_table(pa.table({name: [0.5] for name in names}), tmp_path / "wide.parquet")
    start = time.process_time()
    files = opened(tmp_path, names[1:], labels=names[:1])
    chosen = selected(files.manifest, ColumnRequest(names[2:], names[:1]))
    assert time.process_time() - start < 5
    assert (len(files.manifest.schema.columns), len(chosen.schema.columns)) == (10_000, 9_999)


def test_a_column_is_not_confused_with_the_struct_of_another_column(tmp_path):
    manifest = opened(write(tmp_path / "p", y=[1.0], **{"a": [1.0], "a.b": [2.0], "s.u": [3.0]}), None).manifest
    assert selected(manifest, ColumnRequest(["a", "s"], ["y"])).schema.names() == ["a", "s.u", "y"]
    assert selected(manifest, ColumnRequest(None, ["s"])).schema.names() == ["a", "a.b", "y", "s.u"]
