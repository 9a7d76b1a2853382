from __future__ import annotations

import pytest

from sparkhvd.errors import StoreError
from sparkhvd.store import layout


def test_names_of_a_dataset_and_of_a_run():
    assert layout.manifest_path("d") == f"{layout.dataset_folder('d')}/manifest.json" == "datasets/d/manifest.json"
    assert layout.dataset_rows_folder("d") == "datasets/d/rows"
    assert layout.checkpoint_path("r", 3) == "runs/r/checkpoints/epoch-00003"
    assert layout.model_folder("r") == "runs/r/model"


def test_paths_of_checkpoints_sort_in_the_order_of_training():
    places = [(0, None), (2, 7), (2, 120), (2, None), (3, 4), (10, None), (99_999, None)]
    paths = [layout.checkpoint_path("r", epoch, step) for epoch, step in places]
    assert sorted(paths, key=layout.checkpoint_position) == paths
    assert sorted(paths) != paths, "names alone do not determine the order"
    assert layout.checkpoint_position(paths[1]) == (2, 7)
    assert layout.checkpoint_position(layout.model_folder("r")) is None


@pytest.mark.parametrize("epoch", [-1, 100_000])
def test_an_epoch_that_would_not_sort_is_refused(epoch):
    with pytest.raises(StoreError, match=rf"epoch of run 'r' must be within 0\.\.99999, got {epoch}:"):
        layout.checkpoint_path("r", epoch)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a\nb", "x" * 201])
def test_an_id_that_is_not_a_folder_name_is_refused(name):
    with pytest.raises(StoreError, match=r"run id .* cannot be a folder name"):
        layout.run_folder(name)
    with pytest.raises(StoreError, match=r"dataset id .* cannot be a folder name"):
        layout.manifest_path(name)
