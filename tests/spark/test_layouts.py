"""Folders of Parquet files in every layout have the rows that Spark reads from the same path."""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkhvd import Store
from sparkhvd.data import torch_loader
from sparkhvd.data.external.parquet_files import open_existing
from sparkhvd.errors import DataError

pytestmark = pytest.mark.spark

# By name: files to write, links to create (name and target), and empty files.
LAYOUTS = {
    "flat": (["a.parquet", "b.parquet", "_c.parquet", ".d.parquet", "_x=1.parquet"], {}, ["_SUCCESS", ".a.crc"]),
    "values": (["_p=0/a.parquet", "_p=1/b.parquet", "_p=1/_q/c.parquet"], {}, ["_SUCCESS", "_p=0/_committed"]),
    "hidden values": (["p=0/a.parquet", ".p=1/b.parquet"], {}, []),
    "nested values": (["p=0/_q=1/a.parquet", "p=1/_q=__HIVE_DEFAULT_PARTITION__/b.parquet"], {}, []),
    "escaped values": (["p=a b/1.parquet", "p=x%2Fy/2.parquet", "p=%25 ü/3.parquet", "p=a%3Db/4.parquet"], {}, []),
    "files beside values": (["a.parquet", "p=0/b.parquet"], {}, []),
    "files beside folders": (["a.parquet", "sub/b.parquet", "_temporary/c.parquet"], {}, []),
    "plain folder in a value": (["p=0/sub/a.parquet", "p=1/sub/b.parquet"], {}, []),
    "summaries": (["a.parquet", "_metadata", "_common_metadata"], {}, []),
    "being copied": (["a.parquet", "b.parquet._COPYING_"], {}, []),
    "empty files": (["b.parquet", "d.parquet"], {}, ["a.parquet", "c.parquet"]),
    "empty files of values": (["p=0/b.parquet"], {}, ["p=0/a.parquet", "p=1/a.parquet"]),
    "linked file": (["a.parquet"], {"b.parquet": "else/p=0/a.parquet", "c.parquet": "flat/a.parquet"}, []),
    "linked values": (["p=1/a.parquet"], {"p=0": "else/p=0", "p=2": "else/p=0", "_hidden": "else"}, []),
    "linked tree": (["p=1/q=1/a.parquet"], {"p=0": "deep"}, []),
    "broken link": (["a.parquet"], {"b.parquet": "nothing"}, []),
    "links to above": (["a.parquet"], {"above": "links to above"}, []),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write all layouts; each value of ``x`` occurs once."""
    top, numbers = tmp_path_factory.mktemp("layouts"), count()

    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"x": [float(next(numbers)), float(next(numbers))], "y": [0.0, 1.0]}), path)

    for path in ("else/p=0/a.parquet", "deep/q=0/a.parquet", "deep/q=2/a.parquet"):
        write(top / path)
    for name, (files, links, empty) in LAYOUTS.items():
        for path in files:
            write(top / name / path)
        for path, target in links.items():
            (top / name / path).symlink_to(top / target)
        for path in empty:
            (top / name / path).parent.mkdir(parents=True, exist_ok=True)
            (top / name / path).touch()
    (top / "link").symlink_to(top / "values")
    return top


def read_by(loader):
    with loader:
        return sorted(value for batch in loader for value in batch["x"].tolist())


@pytest.mark.parametrize("name", [*LAYOUTS, "link", "flat/a.parquet"])
def test_the_rows_are_those_that_spark_reads(spark, folders, name):
    wanted = sorted(row.x for row in spark.read.parquet(str(folders / name)).select("x").collect())
    files = open_existing(str(folders / name), feature_cols=["x"], label_cols=["y"])
    assert files.manifest.train.rows == len(wanted) > 0
    assert read_by(torch_loader(str(folders / name), 3, columns=["x"])) == wanted
    store = Store.create(str(folders))
    assert read_by(torch_loader(name, 3, columns=["x"], store=store)) == wanted, "by a path in a Store"


def test_skipped_files_are_named_and_patterns_are_explained(folders, caplog):
    with caplog.at_level(logging.WARNING):
        open_existing(str(folders / "files beside values"), feature_cols=["x"], label_cols=["y"])
    assert "Skipped 1 file in " in caplog.text
    assert ", as Spark does, for example " in caplog.text
    caplog.clear()
    open_existing(str(folders / "values"), feature_cols=["x"], label_cols=["y"])
    assert not caplog.text
    with pytest.raises(DataError, match="Patterns are not expanded; pass a folder"):
        open_existing(str(folders / "flat" / "*.parquet"), feature_cols=["x"], label_cols=["y"])
