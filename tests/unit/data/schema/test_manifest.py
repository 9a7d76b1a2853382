from __future__ import annotations

import pytest

from sparkhvd.data import load
from sparkhvd.errors import DataError, StoreError


def test_loading_returns_the_published_manifest(store, make_dataset):
    manifest = make_dataset(train=((3, 4), (5,)), validation=((2,),))
    assert load(store, manifest.path) == manifest
    assert manifest.train.rows == 12
    assert manifest.train.block_rows() == (3, 4, 5)
    assert [(file.path, index) for file, index in manifest.train.blocks()] == [
        ("rows/train-0.parquet", 0),
        ("rows/train-0.parquet", 1),
        ("rows/train-1.parquet", 0),
    ]
    assert manifest.split("validation").rows == 2


def test_a_missing_validation_split_is_reported(store, make_dataset):
    manifest = make_dataset()
    assert load(store, manifest.path).validation is None
    with pytest.raises(DataError, match=r"The dataset \(d\) has no validation rows"):
        manifest.split("validation")


def test_a_missing_manifest_is_reported_with_its_url(store):
    with pytest.raises(StoreError, match=rf"There is no dataset at {store.url}/datasets/x/manifest.json"):
        load(store, "datasets/x/manifest.json")


def test_a_truncated_manifest_is_reported_at_every_length(store, make_dataset):
    content = make_dataset(train=((2,),)).to_json()
    for length in range(len(content)):
        with store.open("m", "wb") as file:
            file.write(content[:length])
        with pytest.raises(DataError, match=r"/m is not a complete manifest"):
            load(store, "m")


@pytest.mark.parametrize("content", [b"[1]", b"{}", b'"text"', b'{"format": "another"}'])
def test_json_that_is_not_a_manifest_is_reported(store, content):
    store.publish("m", content)
    with pytest.raises(DataError, match="/m is not the manifest of a prepared dataset"):
        load(store, "m")


def test_bytes_that_are_not_text_are_reported(store):
    store.publish("m", b"\xff\xfePAR1")
    with pytest.raises(DataError, match="/m is not a complete manifest"):
        load(store, "m")


def test_a_newer_format_is_reported_with_both_versions(store, make_dataset, edit_manifest):
    manifest = make_dataset()
    edit_manifest(manifest, lambda content: content.update(format_version=2))
    with pytest.raises(DataError, match="has format version 2; this version of sparkhvd reads 1"):
        load(store, manifest.path)


@pytest.mark.parametrize("name", ["dataset_id", "schema", "train", "validation", "seed", "validated_by"])
def test_a_missing_entry_is_reported_by_name(store, make_dataset, edit_manifest, name):
    manifest = make_dataset()
    edit_manifest(manifest, lambda content: content.pop(name))
    with pytest.raises(DataError, match=f"is not a complete manifest .*{name}"):
        load(store, manifest.path)


def test_an_invalid_column_is_reported(store, make_dataset, edit_manifest):
    manifest = make_dataset()
    edit_manifest(manifest, lambda content: content["schema"][0].update(shape=None))
    with pytest.raises(DataError, match="is not a complete manifest"):
        load(store, manifest.path)
