from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from pyarrow import fs

from sparkhvd.errors import StoreError
from sparkhvd.store import LocalStore, Store


def test_a_relative_path_is_resolved_when_the_store_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert LocalStore("here/../there").url == f"file://{tmp_path}/there"


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "file://localhost{}", "FILE://{}"])
def test_all_spellings_of_a_folder_give_the_same_store(tmp_path, form):
    assert Store.create(form.format(tmp_path)) == LocalStore(str(tmp_path))


def test_a_url_is_read_literally_as_in_spark(tmp_path):
    assert LocalStore(f"file://{tmp_path}/a%20b").root == f"{tmp_path}/a%20b"


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LocalStore("~/data").root == f"{tmp_path}/data"


def test_a_folder_is_created_with_its_first_file(tmp_path):
    store = Store.create(str(tmp_path / "deep" / "store"))
    assert (store.list(""), store.exists("x"), list(tmp_path.iterdir())) == ([], False, [])
    store.publish("runs/x", b"1")
    assert Store.create(store.url).list("") == ["runs/x"]


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"^file://{tmp_path}/file is a file, but a Store needs a folder"):
        Store.create(str(tmp_path / "file"))
    with pytest.raises(StoreError, match="Not a directory"):
        Store.create(str(tmp_path / "file" / "below"))


def test_a_folder_that_cannot_be_created_is_refused():
    with pytest.raises(StoreError, match="Cannot use the folder file:///proc/sparkhvd"):
        Store.create("/proc/sparkhvd")


def test_a_folder_that_is_not_writable_is_refused():
    # No user, not even root, may write there.
    with pytest.raises(StoreError, match="The Store file:///proc/sys is not readable and writable for this user"):
        Store.create("/proc/sys")


def test_a_new_folder_that_another_process_removes_after_its_own_check_is_usable(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "store"
    access = os.access

    def access_after_a_removal(path, mode):
        monkeypatch.setattr(os, "access", access)
        folder.rmdir()
        folder.parent.rmdir()
        return access(path, mode)

    monkeypatch.setattr(os, "access", access_after_a_removal)
    assert Store.create(str(folder)).list("") == []
    assert not list(tmp_path.iterdir())


def test_folders_with_links_to_each_other_are_listed_once_per_path(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
        (tmp_path / name / "other").symlink_to(tmp_path / other)
    (tmp_path / "all").symlink_to(tmp_path)
    assert Store.create(str(tmp_path)).list("") == ["a/other/x", "a/x", "b/other/x", "b/x"]


@pytest.mark.parametrize(("url", "message"), [("file://host/x", "names the host 'host'"), ("", "names no folder")])
def test_urls_that_are_not_local_folders_are_refused(url, message):
    with pytest.raises(StoreError, match=message):
        LocalStore(url)


def test_an_unfinished_file_of_a_killed_process_is_not_listed_and_is_deleted_with_its_folder(tmp_path):
    store = LocalStore(str(tmp_path))
    writer = store.open("run/x", "wb")
    (hidden,) = (tmp_path / "run").iterdir()
    assert hidden.name.startswith(".")
    assert store.list("") == []
    store.delete("run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(StoreError, match=r"Cannot write file://.*/run/x: No such file"):
        writer.close()


def test_deleting_a_link_keeps_its_target(tmp_path):
    (tmp_path / "target").mkdir()
    store = LocalStore(str(tmp_path))
    Path(store.root, "link").symlink_to(tmp_path / "target")
    store.delete("link")
    assert (tmp_path / "target").exists()


def test_arrow_maps_files_into_memory(tmp_path):
    filesystem, path = LocalStore(str(tmp_path)).arrow("x")
    assert filesystem.equals(fs.LocalFileSystem(use_mmap=True))
    assert path == f"{tmp_path}/x"


def test_concurrent_removal_of_the_folder_does_not_disturb_writers(tmp_path):
    store = Store.create(str(tmp_path))
    failed, ended = [], threading.Event()

    def write(writer):
        try:
            for number in range(150):
                store.publish(f"leases/one/{writer}-{number}", b"x")
                store.open(f"leases/one/{writer}", "wb")._discard()
        except StoreError as error:
            failed.append(error)

    def remove():
        try:
            while not ended.wait(0.01):
                store.delete("leases/one")
        except StoreError as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    removers = [threading.Thread(target=remove) for _ in range(2)]
    for thread in (*writers, *removers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    for thread in removers:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_mount_without_links_and_without_synced_folders_publishes_once(tmp_path, monkeypatch, number):
    def no_links(source, target):
        raise OSError(number, os.strerror(number))

    synced = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        synced(descriptor)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "fsync", files_only)
    store = LocalStore(str(tmp_path))
    store.publish("m", b"first")
    with pytest.raises(StoreError, match="it exists already, and published files are never changed"):
        store.publish("m", b"second")
    with store.open("x", "wb") as file:
        file.write(b"content")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"m": b"first", "x": b"content"}


def test_a_file_is_published_even_if_nfs_repeats_the_link_after_a_lost_answer(tmp_path, monkeypatch):
    link = os.link

    def link_twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    store = LocalStore(str(tmp_path))
    store.publish("m", b"first")
    with pytest.raises(StoreError, match="it exists already, and published files are never changed"):
        store.publish("m", b"second")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"m": b"first"}


def test_a_file_is_written_even_if_a_mount_repeats_the_rename_after_a_lost_answer(tmp_path, monkeypatch):
    replace = os.replace

    def replace_twice(source, target):
        replace(source, target)
        replace(source, target)

    def no_links(source, target):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "replace", replace_twice)
    monkeypatch.setattr(os, "link", no_links)
    store = LocalStore(str(tmp_path))
    for content in (b"content", b"new content"):
        with store.open("x", "wb") as file:
            file.write(content)
    store.publish("m", b"first")
    with pytest.raises(StoreError, match="it exists already, and published files are never changed"):
        store.publish("m", b"second")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"m": b"first", "x": b"new content"}
    monkeypatch.setattr(os, "replace", lambda source, target: replace(f"{source}.missing", target))
    with pytest.raises(StoreError, match=r"Cannot write file://.*/x: No such file"), store.open("x", "wb") as file:
        file.write(b"lost")
