from __future__ import annotations

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
    with pytest.raises(StoreError, match=r"elastic/job/commit-00000002-0000000010, the last commit .* is not there"):
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


def test_a_publisher_writes_once_per_interval_and_names_a_commit_before_it_deletes_older_ones(folder):
    named: list[list[str]] = []

    def publish(publisher: CommitPublisher, number: int) -> None:
        publisher.publish_if_due(1, number, b"state".upper, lambda path: named.append(folder.store.list("elastic/job")))

    rare = CommitPublisher(folder)
    for number in (1, 2):
        publish(rare, number)
    assert [number_of(path) for path in folder.store.list("elastic/job")] == [1]
    often = CommitPublisher(CommitFolder(folder.store, folder.folder, 0.0))
    for number in (3, 4, 5):
        publish(often, number)
    assert [number_of(path) for path in named[-1]] == [3, 4, 5]
    assert [number_of(path) for path in folder.store.list("elastic/job")] == [4, 5]
