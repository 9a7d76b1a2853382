"""The Store that serves the URLs of existing files, without any connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkhvd.data.external.locate import Access, locate
from sparkhvd.errors import ConfigError, DataError
from sparkhvd.store import HDFSStore, S3Store


@pytest.mark.parametrize(
    ("urls", "store", "places"),
    [
        (["/a/b/train"], "file:///a/b", ["train"]),
        (["file:///a/b/train", "/a/c/held out"], "file:///a", ["b/train", "c/held out"]),
        (["dbfs:/a/train/"], "file:///dbfs/a", ["train"]),
        (["dbfs:/Volumes/c/s/v/train"], "file:///Volumes/c/s/v", ["train"]),
        (["hdfs://h:1/train"], "hdfs://h:1", ["train"]),
        (["hdfs:///a/train", "hdfs:///a/val/x.parquet"], "hdfs:///a", ["train", "val/x.parquet"]),
        (["s3://bucket/train", "s3://bucket/val"], "s3://bucket", ["train", "val"]),
        (["s3a://bucket/a/train"], "s3://bucket/a", ["train"]),
        (["memory://x/train"], "memory:///x", ["train"]),
    ],
)
def test_the_store_is_the_common_parent_of_all_urls(urls, store, places):
    found, inside = locate(urls, Access())
    assert (found.url, inside) == (store, places)


def test_a_relative_path_starts_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, paths = locate(["rows"], Access())
    assert (store.url, paths) == (f"file://{tmp_path}", ["rows"])


def test_urls_use_the_options_of_a_store_of_their_kind_or_those_of_spark():
    configured = []
    near = S3Store("s3://one/x", storage_options={"key": "k", "secret": "s"})
    access = Access(near, configure=lambda store: configured.append(store.url) or store)
    found, _ = locate(["s3a://two/rows/train"], access)
    assert (found.url, dict(found.storage_options)) == ("s3://two/rows", {"key": "k", "secret": "s"})
    assert configured == []
    found, _ = locate(["hdfs://h:1/rows/train"], access)
    assert isinstance(found, HDFSStore)
    assert configured == ["hdfs://h:1/rows"]


def test_files_on_two_file_systems_and_whole_file_systems_are_refused():
    with pytest.raises(DataError, match="s3://b/train and /val are on different file systems"):
        locate(["s3://b/train", "/val"], Access())
    with pytest.raises(DataError, match="There is no folder above s3://b/; put"):
        locate(["s3://b/"], Access())


@pytest.mark.parametrize("path", [Path("/data/rows"), ["/data/a", "/data/b"], None, b"/data"])
def test_a_path_that_is_not_a_string_is_refused(path):
    with pytest.raises(ConfigError, match=rf"must be a string, got {type(path).__name__}: .*Pass one folder or file"):
        locate([path], Access())
