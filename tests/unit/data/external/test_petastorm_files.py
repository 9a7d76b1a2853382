from __future__ import annotations

import pytest

from sparkhvd.data.external.petastorm_files import StoreFolder
from sparkhvd.store import LocalStore


@pytest.fixture
def folder(tmp_path):
    store = LocalStore(str(tmp_path / "store"))
    for path in ("data/_common_metadata", "data/part-0", "data/day=1/part-1", "data/day=1/hour=2/part-2", "database/x"):
        with store.open(path, "wb") as file:
            file.write(path.encode())
    return StoreFolder(store, "data")


def test_a_folder_of_a_store_is_walked_level_by_level(folder):
    assert list(folder.walk("/store")) == [
        ("/store", ["day=1"], ["_common_metadata", "part-0"]),
        ("/store/day=1", ["hour=2"], ["part-1"]),
        ("/store/day=1/hour=2", [], ["part-2"]),
    ]


def test_files_and_folders_are_distinguished(folder):
    assert [folder.isdir(path) for path in ("/store", "/store/", "/store/day=1", "/store/part-0", "/store/day")] == [
        *[True] * 3,
        *[False] * 2,
    ]
    assert [folder.isfile(path) for path in ("/store/part-0", "/store/day=1/part-1", "/store/day=1")] == [
        True,
        True,
        False,
    ]
    assert folder.exists("/store/day=1")
    assert folder.exists("/store/part-0")
    assert not folder.exists("/store/part-1")


def test_files_are_opened_in_the_store_and_nothing_is_written(folder):
    with folder.open("/store/day=1/hour=2/part-2") as file:
        assert file.read() == b"data/day=1/hour=2/part-2"
    for path, mode in (("/store/part-9", "rb"), ("/store/part-0", "wb"), ("/database/x", "rb")):
        with pytest.raises(FileNotFoundError, match=f"Cannot open {path} for reading in file://"):
            folder.open(path, mode)
