from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from sparkhvd.data import ColumnSpec, DataSchema, Manifest, clean
from sparkhvd.data.external.locate import Access
from sparkhvd.data.prepare.prepared_data import PreparedData
from sparkhvd.data.reuse import leases
from sparkhvd.data.schema.manifest import DataFile, Split
from sparkhvd.errors import DataError, SchemaError, StoreError
from sparkhvd.estimators.api.parquet_rows import existing_rows
from sparkhvd.estimators.torch import TorchEstimator
from sparkhvd.store import LocalStore, layout

SCHEMA = DataSchema(
    (ColumnSpec("x", "float32", (), "feature", "scalar"), ColumnSpec("y", "float32", (), "label", "scalar"))
)


@pytest.fixture
def store(tmp_path):
    return LocalStore(str(tmp_path / "store"))


@pytest.fixture
def prepared(store):
    """Return a dataset after its preparation, without a time to keep it."""
    train = Split((DataFile("rows/0.parquet", (10,)),))
    manifest = Manifest("d", layout.dataset_folder("d"), SCHEMA, train, None, 3, None)
    lease = leases.take(store, "d", 0.0)
    store.publish(manifest.path, manifest.to_json())
    with PreparedData(store, manifest, lease, reused=False) as data:
        yield data


def rows_of(store, dataset, path=None, **given):
    model = torch.nn.Linear(1, 1)
    fixed = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": len, "store": store}
    estimator = TorchEstimator(**{**fixed, "feature_cols": ["x"], "label_cols": ["y"], "num_proc": 2, **given})
    access = Access(store)
    return existing_rows(estimator._checked_plan(), dataset, path, None, access=access, any_type=False)


@pytest.mark.parametrize("named", ["object", "id", "open here"])
def test_prepared_rows_are_kept_during_training_even_if_their_owner_releases_them(store, prepared, named):
    dataset = {"object": prepared, "id": "d", "open here": None}[named]
    with rows_of(store, dataset) as files:
        prepared.close()
        assert clean(store) == []
        assert store.exists(files.manifest.path)
    assert store.list("") == []


def test_fills_of_the_estimator_apply_to_prepared_rows_too(store, prepared):
    with rows_of(store, prepared, fill={"x": -1.0}) as files:
        assert [column.fill for column in files.manifest.schema.columns] == [-1.0, None]


@pytest.mark.parametrize("origin", ["prepared", "existing file"])
def test_a_sparse_column_that_is_stored_dense_is_refused(store, prepared, tmp_path, origin):
    parquet.write_table(pa.table({"x": [1.0, 2.0], "y": [1.0, 2.0]}), tmp_path / "x.parquet")
    path = None if origin == "prepared" else str(tmp_path / "x.parquet")
    with (
        pytest.raises(SchemaError, match=r"sparse_cols names 'x', but these rows hold that column as a dense array\."),
        rows_of(store, None if path else prepared, path, sparse_cols=["x"]),
    ):
        pass


@pytest.mark.parametrize(
    ("by", "message"),
    [(None, r"prepared without validation\. Leave validation out"), (0.5, r"prepared with validation=0\.5\.")],
)
def test_prepared_rows_are_not_split_again(store, prepared, by, message):
    parts = {"validation": None if by is None else prepared.manifest.train, "validated_by": by}
    store.delete(prepared.manifest.path)
    store.publish(prepared.manifest.path, replace(prepared.manifest, **parts).to_json())
    with (
        pytest.raises(DataError, match=rf"validation=0\.25 cannot split prepared rows; these were {message}"),
        rows_of(store, "d", validation=0.25),
    ):
        pass
    with rows_of(store, "d", validation=by) as files:
        assert files.manifest.validated_by == by


def test_a_fit_that_cannot_start_releases_its_rows(store, prepared):
    with pytest.raises(SchemaError, match="There is no column 'z'"), rows_of(store, prepared, feature_cols=["z"]):
        pass
    prepared.close()
    assert store.list("") == []


def test_rows_that_were_removed_are_refused_by_name(store, prepared):
    prepared.close()
    gone = r"There is no dataset at .*datasets/d/manifest\.json; its preparation failed or it was deleted"
    for dataset in (prepared, "d"):
        with pytest.raises(StoreError, match=gone), rows_of(store, dataset):
            pass
    assert store.list("") == []
