from __future__ import annotations

import pytest

from sparkhvd.errors import StoreError
from sparkhvd.store import layout


def test_names_of_a_dataset_and_of_a_run():
    assert layout.manifest_path("d") == f"{layout.dataset_folder('d')}/manifest.json" == "datasets/d/manifest.json"
    assert layout.dataset_rows_folder("d") == "datasets/d/rows"
    assert layout.checkpoint_path("r", 3) == "runs/r/checkpoints/epoch-00003"
    assert layout.model_folder("r") == "runs/r/model"


def test_checkpoints_sort_by_epoch_and_tell_it():
    paths = [layout.checkpoint_path("r", epoch) for epoch in (0, 2, 10, 99_999)]
    assert sorted(paths) == paths
    assert [layout.checkpoint_epoch(path) for path in paths] == [0, 2, 10, 99_999]
    assert layout.checkpoint_epoch(layout.model_folder("r")) is None


@pytest.mark.parametrize("epoch", [-1, 100_000])
def test_an_epoch_that_would_not_sort_is_refused(epoch):
    with pytest.raises(StoreError, match=f"Epoch {epoch} of run 'r'"):
        layout.checkpoint_path("r", epoch)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\nb", "x" * 201])
def test_an_id_that_is_no_folder_name_is_refused(name):
    with pytest.raises(StoreError, match=r"run id .* cannot be a folder name"):
        layout.run_folder(name)
    with pytest.raises(StoreError, match=r"dataset id .* cannot be a folder name"):
        layout.manifest_path(name)
