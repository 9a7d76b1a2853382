"""What every Store promises; run for every entry of the registry."""

from __future__ import annotations

import pickle
import threading

import pytest

from sparkhvd.errors import StoreError
from sparkhvd.store import Store
from sparkhvd.store.registry import STORES


def _local_url(tmp_path):
    return f"file://{tmp_path}/a store"


# A backend without a place to test it here fails the first test below.
PLACES = {"file": _local_url}


def test_every_scheme_of_the_registry_has_a_place_to_test_it():
    assert set(PLACES) == set(STORES)


@pytest.fixture(params=sorted(STORES))
def store(request, tmp_path):
    return Store.create(PLACES[request.param](tmp_path))


def test_it_is_a_store_with_the_url_that_it_was_made_from(store):
    assert isinstance(store, Store)
    assert Store.create(store.url).url == store.url


def test_what_is_written_is_read_back_and_listed(store):
    with store.open("runs/a b/x.bin", "wb") as file:
        file.write(b"one")
        file.write(b"two")
    with store.open("runs/a b/x.bin", "rb") as file:
        assert file.read() == b"onetwo"
    store.publish("runs/manifest", b"m")
    assert store.list("runs") == ["runs/a b/x.bin", "runs/manifest"]
    assert store.list("runs/a b") == store.list("")[:1] == ["runs/a b/x.bin"]
    assert store.list("nothing/here") == []
    assert store.exists("runs/manifest")
    assert not store.exists("runs/other")


def test_a_file_appears_only_when_it_is_closed(store):
    file = store.open("x", "wb")
    file.write(b"half")
    assert not store.exists("x")
    assert store.list("") == []
    file.close()
    file.close()
    assert store.list("") == ["x"]


def test_a_file_that_fails_never_appears_and_leaves_nothing(store):
    def write_half():
        with store.open("x", "wb") as file:
            file.write(b"half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_half()
    abandoned = store.open("y", "wb")
    abandoned.write(b"half")
    del abandoned
    assert not store.exists("x")
    assert not store.exists("y")
    assert store.list("") == []


def test_a_file_written_again_replaces_the_old_one_on_close(store):
    for content in (b"first", b"second"):
        with store.open("x", "wb") as file:
            file.write(content)
            if content == b"second":
                with store.open("x", "rb") as old:
                    assert old.read() == b"first"
    with store.open("x", "rb") as file:
        assert file.read() == b"second"


def test_publish_refuses_to_overwrite_and_says_so(store):
    store.publish("m", b"1")
    with pytest.raises(StoreError, match=r"Cannot publish .*/m: it exists already"):
        store.publish("m", b"2")
    with store.open("m", "rb") as file:
        assert file.read() == b"1"
    assert store.list("") == ["m"]


def test_of_publishers_in_a_race_exactly_one_wins(store):
    count = 8
    barrier = threading.Barrier(count)
    outcomes = []

    def publish(index):
        barrier.wait(30)
        try:
            store.publish("m", bytes([index]) * 1000)
            outcomes.append(index)
        except StoreError:
            pass

    threads = [threading.Thread(target=publish, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (winner,) = outcomes
    with store.open("m", "rb") as file:
        assert file.read() == bytes([winner]) * 1000
    assert store.list("") == ["m"]


def test_delete_removes_a_file_or_a_whole_folder_and_ignores_what_is_not_there(store):
    for path in ("a/b/c", "a/d", "e"):
        store.publish(path, b"")
    store.delete("a")
    store.delete("a")
    assert store.list("") == ["e"]
    store.delete("e")
    assert store.list("") == []


def test_it_crosses_a_process_boundary(store):
    store.publish("x", b"1")
    copy = pickle.loads(pickle.dumps(store))
    assert copy == store
    assert copy.list("") == ["x"]
    assert len(pickle.dumps(store)) < 1000


def test_arrow_reads_what_was_written(store):
    store.publish("folder/x", b"content")
    filesystem, path = store.arrow("folder/x")
    with filesystem.open_input_file(path) as file:
        assert file.read() == b"content"


def test_the_spark_url_lies_below_the_store(store):
    assert store.spark_url("a/b").endswith("/a/b")


@pytest.mark.parametrize("path", ["../x", "a/../x", "/etc/passwd", "a//b", "a/", "./x", "", "a\0b"])
@pytest.mark.parametrize("method", ["exists", "open", "publish", "delete", "spark_url", "arrow"])
def test_a_path_that_could_leave_the_store_is_refused(store, method, path):
    arguments = {"open": ("wb",), "publish": (b"",)}.get(method, ())
    with pytest.raises(StoreError, match="is not a path inside the Store"):
        getattr(store, method)(path, *arguments)


def test_a_missing_file_is_named_with_its_url(store):
    with pytest.raises(StoreError, match=rf"Cannot open {store.spark_url('gone')}: No such file"):
        store.open("gone", "rb")


def test_an_unknown_mode_is_refused(store):
    with pytest.raises(StoreError, match="with mode 'ab'; a Store knows 'rb' and 'wb'"):
        store.open("x", "ab")
