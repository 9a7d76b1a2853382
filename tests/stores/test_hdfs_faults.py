"""Faults and refusals of HDFS: operations succeed or raise a clear error; they never return wrong data or hang."""

from __future__ import annotations

import io
import signal
import socket
import threading
import uuid
from contextlib import contextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkhvd.errors import StoreError
from sparkhvd.store import HDFSStore, Store
from sparkhvd.store.backends import filesystem
from sparkhvd.store.backends import hdfs as module
from tests.hdfs_server import running_hdfs


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """Run a separate HDFS, whose nodes the tests stop and kill one after the other."""
    with running_hdfs(tmp_path_factory.mktemp("hdfs"), data_nodes=2) as running:
        yield running


@pytest.mark.soak
def test_reading_continues_when_data_nodes_fail_and_ends_with_an_error_without_any(two_nodes):
    table = pa.table({"x": pa.array(range(1_000_000), pa.int64())})
    settings = {"dfs.client.socket-timeout": "2000"}
    store = Store.create(f"{two_nodes.url}/data", storage_options=settings, retry_seconds=20)
    with store.open("x.parquet", "wb") as file:
        parquet.write_table(table, file, row_group_size=100_000, use_dictionary=False, compression="none")
    first, second = two_nodes.data_nodes
    files, path = store.arrow("x.parquet")
    with files.open_input_file(path) as file:
        opened = parquet.ParquetFile(file)
        assert opened.read_row_group(0).equals(table.slice(0, 100_000))

        first.send_signal(signal.SIGSTOP)  # it accepts connections and never answers
        assert opened.read_row_groups([1, 2]).equals(table.slice(100_000, 200_000))
        first.send_signal(signal.SIGCONT)

        first.kill()
        assert opened.read_row_groups([3, 4]).equals(table.slice(300_000, 200_000))
        assert parquet.read_table(path, filesystem=files).equals(table)

        second.kill()
        impatient = Store.create(store.url, storage_options=settings, retry_seconds=1)
        with pytest.raises(StoreError, match=r"Cannot read hdfs://.*/x\.parquet: .*DataNodes failed"):
            impatient.open("x.parquet", "rb").read()
        impatient._connection.close()
    store._connection.close()


@pytest.mark.soak
def test_writing_without_a_data_node_fails_and_leaves_no_files(two_nodes):
    for node in two_nodes.data_nodes:
        node.kill()
    store = Store.create(f"{two_nodes.url}/write", retry_seconds=1)
    with pytest.raises(StoreError, match=r"Cannot publish hdfs://.*/write/m: .* \(gave up after \d+ attempts\)"):
        store.publish("m", b"content")
    assert store.list("") == []
    store._connection.close()


def test_an_unreachable_name_node_is_named():
    store = Store.create("hdfs://127.0.0.1:1/x", retry_seconds=0.5)
    with pytest.raises(StoreError, match=r"Cannot list hdfs://127\.0\.0\.1:1/x: Connection refused.*\(gave up after"):
        store.list("")
    store._connection.close()


def test_a_silent_name_node_times_out(monkeypatch):
    monkeypatch.setattr(filesystem, "SILENCE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = Store.create(f"hdfs://127.0.0.1:{silent.getsockname()[1]}/x", retry_seconds=0.1)
        for action in (
            lambda: store.publish("m", b"1"),
            lambda: store.exists("m"),
            lambda: store.list(""),
            lambda: store.delete("m"),
            lambda: store.open("m", "rb"),
            lambda: store.open("m", "wb").close(),
        ):
            with pytest.raises(StoreError, match=r"Cannot .* hdfs://.*the server did not answer in time"):
                action()
    store._connection.close()


def test_an_abandoned_write_does_not_replace_a_file_later(hdfs, monkeypatch):
    store = Store.create(f"{hdfs.url}/{uuid.uuid4().hex}")
    written = module._write

    def slowly(client, place, content):
        written(client, place, content)
        store._connection.abandon()  # as if the write had taken too long

    monkeypatch.setattr(module, "_write", slowly)
    late = store._filesystem()
    with pytest.raises(TimeoutError):
        store._send(late, f"{store._folders.root}/x", io.BytesIO(b"late"), 4)
    assert store.list("") == []
    store._connection.close()


def copy_until_lost(method, lost, source, sink, losing, *, is_call):
    """Forward the calls or answers of a connection; drop its answers once ``losing`` is set.

    No deletion arrives between the first call of ``method`` and the second.
    """
    with suppress(OSError):
        while content := source.recv(1 << 16):
            if is_call and method in content:
                if not lost:
                    losing.set()
                lost.append(method)
            if is_call and b"delete" in content and len(lost) == 1:
                break
            if not is_call and losing.is_set():
                break
            sink.sendall(content)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_that_loses_an_answer(url, method):
    """Run a relay to a name node that closes the connection after the first call of ``method`` instead of answering."""
    target, lost, sockets, threads = urlsplit(url), [], [], []
    copy = partial(copy_until_lost, method, lost)

    def accept():
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                node = socket.create_connection((target.hostname, target.port))
                sockets.extend([client, node])
                losing = threading.Event()
                for ends, is_call in (((client, node), True), ((node, client), False)):
                    threads.append(threading.Thread(target=copy, args=(*ends, losing), kwargs={"is_call": is_call}))
                    threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accept)
        acceptor.start()
        try:
            yield f"hdfs://127.0.0.1:{listener.getsockname()[1]}", lost
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for end in sockets:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for end in sockets:
                end.close()


@pytest.mark.parametrize("method", [b"create", b"complete", b"rename"])
def test_a_file_is_written_once_when_the_answer_of_the_name_node_is_lost(hdfs, method):
    direct = Store.create(f"{hdfs.url}/{uuid.uuid4().hex}")
    with relay_that_loses_an_answer(hdfs.url, method) as (url, lost):
        store = Store.create(f"{url}{direct._folders.root}")
        store.publish("m", b"content")
        store._connection.close()
        assert lost[0] == method
    assert direct.list("") == ["m"]
    with direct.open("m", "rb") as file:
        assert file.read() == b"content"
    direct._connection.close()


class RepeatingClient:
    """A client that repeats each creation and rename of a file, like one that did not receive the first response."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    def create(self, path, options):
        self._client.create(path, options)
        return self._client.create(path, options)

    def rename(self, source, target, overwrite):
        self._client.rename(source, target, overwrite=overwrite)
        self._client.rename(source, target, overwrite=overwrite)


def test_repeated_requests_to_create_and_rename_a_file_are_a_success(hdfs):
    store = Store.create(f"{hdfs.url}/{uuid.uuid4().hex}")
    filesystem = store._filesystem()
    filesystem.client = RepeatingClient(filesystem.client)
    store.publish("m", b"content")
    for content in (b"first", b"second"):
        with store.open("x", "wb") as file:
            file.write(content)
        with store.open("x", "rb") as file:
            assert file.read() == content
    with pytest.raises(StoreError, match="exists already"):
        store.publish("m", b"others")
    assert store.list("") == ["m", "x"]
    store._connection.close()


def test_a_missing_default_file_system_is_an_error(monkeypatch):
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreError, match=r"Cannot list hdfs:///user/x: .*No fs.defaultFS"):
        HDFSStore("/user/x").list("")


def test_a_path_without_a_scheme_is_on_the_default_file_system(hdfs, monkeypatch):
    monkeypatch.setenv("HADOOP_CONF_DIR", str(hdfs.conf))
    folder = f"/user/{uuid.uuid4().hex}"
    store = HDFSStore(folder)
    store.publish("x", b"1")
    other = Store.create(f"{hdfs.url}{folder}")
    assert store.url == f"hdfs://{folder}"
    assert other.list("") == ["x"]
    paths = HDFSStore(train_path=f"{folder}/train", val_path=f"{folder}/validation")
    assert paths.list("") == ["x"]
    for one in (store, other, paths):
        one._connection.close()


def test_a_file_that_may_not_be_written_is_refused_at_once_with_the_reason(hdfs, monkeypatch):
    theirs = Store.create(f"{hdfs.url}/theirs")
    theirs.publish("x", b"1")
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    mine = Store.create(theirs.url)
    message = r"Cannot publish hdfs://.*/theirs/m: Permission denied: user=somebody, access=WRITE, inode="
    with pytest.raises(StoreError, match=message) as caught:
        mine.publish("m", b"1")
    assert "attempts" not in str(caught.value)
    assert "\n" not in str(caught.value)
    with mine.open("x", "rb") as file:
        assert file.read() == b"1"
    for one in (theirs, mine):
        one._connection.close()


def test_another_user_than_hadoops_is_refused_with_the_variable_to_set(hdfs, monkeypatch):
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    with pytest.raises(StoreError, match=r"HADOOP_USER_NAME is 'somebody'.*spark\.executorEnv\.HADOOP_USER_NAME"):
        HDFSStore(f"{hdfs.url}/x", user="me").list("")
    store = HDFSStore(f"{hdfs.url}/x", user="somebody")
    assert store.list("") == []
    store._connection.close()


def test_leftovers_of_a_killed_writer_are_removed_by_a_later_one(hdfs):
    store = Store.create(f"{hdfs.url}/{uuid.uuid4().hex}")
    client = store._filesystem().client
    folder = store._folders.root
    for name, age in (("old", 25 * 3600), ("listed", 25 * 3600), ("new", 3600)):
        if name == "listed":
            store.publish("x", b"1")
            assert [status.path.rpartition("/")[2] for status in client.list_status(folder)] == ["x"]
        with client.create(f"{folder}/.{name}.unfinished") as file:
            file.write(b"half")
        written = client.get_file_info(f"{folder}/.{name}.unfinished").modification_time - age * 1000
        client.set_times(f"{folder}/.{name}.unfinished", written, written)
    assert store.list("") == ["x"]
    left = [status.path.rpartition("/")[2] for status in client.list_status(folder)]
    assert left == [".new.unfinished", "x"]
    store._connection.close()
