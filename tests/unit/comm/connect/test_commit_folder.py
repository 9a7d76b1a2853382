from __future__ import annotations

import threading

import pytest

from sparkhvd.comm.connect.commit_folder import CommitFolder, CommitPublisher, number_of
from sparkhvd.errors import StoreError
from sparkhvd.store import Store


@pytest.fixture
def folder(tmp_path) -> CommitFolder:
    return CommitFolder(Store.create(str(tmp_path)), "elastic/job", 60.0)


def test_the_newest_commit_is_from_the_latest_generation_before_the_current_one(folder):
    assert folder.newest(5, "") == ""
    paths = [folder.publish(*position, b"state") for position in [(1, 9), (2, 8), (2, 10), (10, 11), (11, 3)]]
    assert folder.newest(11, "") == folder.newest(11, paths[2]) == paths[3]
    assert number_of(paths[3]) == 11
    assert folder.newest(3, paths[2]) == paths[2]
    with pytest.raises(StoreError, match=r"elastic/job/commit-00000002-0000000010, the last commit .* is missing"):
        folder.newest(2, paths[2])


def test_a_damaged_commit_is_not_loaded(folder, tmp_path):
    path = folder.publish(1, 1, b"line\nline\n")
    assert folder.read(path) == b"line\nline\n"
    for damage in (b"", b"line", (tmp_path / path).read_bytes()[:-1], (tmp_path / path).read_bytes() + b"x"):
        (tmp_path / path).write_bytes(damage)
        with pytest.raises(StoreError, match=r"commit-00000001-0000000001 is damaged"):
            folder.read(path)


def test_two_commits_and_those_of_later_generations_are_kept(folder):
    paths = [folder.publish(*position, b"") for position in [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3)]]
    folder.delete_before(paths[3])
    assert folder.store.list("elastic/job") == paths[2:]


def test_a_publisher_writes_once_per_interval_or_every_commit(folder):
    reported: list[str] = []
    rare = CommitPublisher(folder)
    for number in (1, 2):
        rare.publish_if_due(1, number, b"state".upper, reported.append)
        rare.finish()
    assert (
        [number_of(path) for path in folder.store.list("elastic/job")] == [number_of(path) for path in reported] == [1]
    )
    often = CommitPublisher(CommitFolder(folder.store, folder.folder, 0.0))
    for number in (3, 4, 5):
        often.publish_if_due(1, number, b"state".upper, reported.append)
    assert [number_of(path) for path in reported] == [1, 3, 4, 5]
    assert [number_of(path) for path in folder.store.list("elastic/job")] == [4, 5]


class SlowStore:
    """A Store that writes only when it is allowed to."""

    url = "slow://"

    def __init__(self, store: Store) -> None:
        self._store = store
        self.may_write = threading.Event()
        self.error: StoreError | None = None

    def publish(self, path: str, content: bytes) -> None:
        assert self.may_write.wait(30)
        if self.error is not None:
            raise self.error
        self._store.publish(path, content)

    def list(self, path: str) -> list[str]:
        return self._store.list(path)

    def delete(self, path: str) -> None:
        self._store.delete(path)


def test_the_training_continues_while_a_commit_is_written(folder, caplog):
    store = SlowStore(folder.store)
    publisher = CommitPublisher(CommitFolder(store, folder.folder, 1e-9))
    reported: list[str] = []
    for number in (1, 2, 3):
        publisher.publish_if_due(1, number, b"state".upper, reported.append)
    assert reported == store.list("elastic/job") == []
    store.may_write.set()
    publisher.finish()
    assert [number_of(path) for path in store.list("elastic/job")] == [1], "later commits did not wait for the first"
    publisher.publish_if_due(1, 4, b"state".upper, reported.append)
    assert [number_of(path) for path in reported] == [1]
    publisher.finish()
    publisher.publish_if_due(2, 5, b"state".upper, reported.append)
    assert len(reported) == 1, "a new generation does not report commits of an old one"
    publisher.finish()
    store.error = StoreError("No space left.")
    for number in (6, 7):
        publisher.publish_if_due(2, number, b"state".upper, reported.append)
        publisher.finish()
    assert "Commit 6 could not be published" in caplog.text
    assert [number_of(path) for path in reported] == [1, 5]
