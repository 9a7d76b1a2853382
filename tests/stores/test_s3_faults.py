"""Operations on a faulty S3 server succeed or raise a clear error; they never return wrong data or hang."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid

import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkhvd.data import torch_loader
from sparkhvd.data.external.parquet_files import open_data
from sparkhvd.data.read.blocks import ParquetBlocks
from sparkhvd.data.read.shards import Piece
from sparkhvd.errors import DataError, StoreError
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.training import job_files
from sparkhvd.estimators.training.logs import run_log
from sparkhvd.store import Store
from sparkhvd.store.backends import filesystem
from tests.s3_server import BUCKET, SECRET, options_for
from tests.stores.faulty_s3 import faulty_s3
from tests.waiting import wait_for


@pytest.fixture
def proxy(s3):
    with faulty_s3(s3.endpoint) as running:
        yield running


@pytest.fixture
def store(proxy):
    created = Store.create(
        f"s3://{BUCKET}/{uuid.uuid4().hex}", storage_options=options_for(proxy.endpoint), retry_seconds=30
    )
    yield created
    created._connection.close()


@pytest.fixture
def impatient_store(store):
    """Provide a Store at the same URL that retries for only a second."""
    created = Store.create(store.url, storage_options=store.storage_options, retry_seconds=1)
    yield created
    created._connection.close()


@pytest.mark.parametrize("fault", ["busy", "refuse", "lose"])
def test_transient_failures_are_retried(store, proxy, fault):
    proxy.first(3, fault, "PUT")
    store.publish("m", b"manifest")
    with store.open("x", "wb") as file:
        file.write(b"content")
    proxy.first(3, fault, "GET", "HEAD")
    assert store.list("") == ["m", "x"]
    proxy.first(3, fault, "GET", "HEAD")
    assert store.exists("x")
    assert not store.exists("y")
    proxy.first(3, fault, "GET", "HEAD")
    with store.open("x", "rb") as file:
        assert file.read() == b"content"
    assert len([seen for seen in proxy.seen if fault in seen]) == 3
    proxy.first(3, fault, "POST", "DELETE")
    store.delete("x")
    assert store.list("") == ["m"]


def test_a_publisher_whose_response_is_lost_recognizes_its_own_file(store, proxy):
    proxy.first(1, "lose", "PUT")
    store.publish("m", b"mine")
    assert proxy.seen[0] == "PUT lose"
    assert len([seen for seen in proxy.seen if seen.startswith("PUT")]) > 1
    with pytest.raises(StoreError, match="exists already"):
        store.publish("m", b"mine")


@pytest.mark.parametrize("fault", ["cut", "shorten"])
def test_a_read_is_repeated_when_several_responses_end_too_early(store, proxy, fault):
    content = os.urandom(300_000)
    with store.open("x", "wb") as file:
        file.write(content)
    proxy.first(5, fault, "GET")
    with store.open("x", "rb") as file:
        assert file.read() == content
    proxy.first(5, fault, "GET")
    filesystem, path = store.arrow("x")
    with filesystem.open_input_file(path) as file:
        file.seek(1000)
        assert file.read(5000) == content[1000:6000]
    assert proxy.seen.count(f"GET {fault}") == 5


@pytest.mark.parametrize("fault", ["empty", "cut", "shorten"])
def test_a_truncated_response_is_not_an_empty_list(store, impatient_store, proxy, fault):
    store.publish("folder/a", b"1")
    store.publish("folder/b", b"2")
    proxy.first(3, fault, "GET")
    assert store.list("folder") == ["folder/a", "folder/b"]
    assert proxy.seen.count(f"GET {fault}") == 3
    proxy.first(3, fault, "GET")
    assert store.exists("folder")
    proxy.first(3, fault, "POST")
    store.delete("folder")
    assert store.list("") == []
    proxy.always(fault)
    with pytest.raises(StoreError, match=r"Cannot list s3://.*/folder: .* \(gave up after \d+ attempts\)\.$"):
        impatient_store.list("folder")


def test_a_large_file_is_written_completely_despite_empty_responses(store, proxy):
    content = os.urandom(101 * 1024 * 1024)  # large enough for an upload in parts
    proxy.first(2, "empty", "POST")
    with store.open("x", "wb") as file:
        file.write(content)
    assert proxy.seen.count("POST empty") == 2
    with store.open("x", "rb") as file:
        assert file.read() == content


def test_a_large_file_is_written_even_if_the_responses_to_its_completion_are_lost(store, proxy):
    content = os.urandom(101 * 1024 * 1024)
    proxy.lose_completions(5)  # more than the client's own attempts
    with store.open("x", "wb") as file:
        file.write(content)
    with store.open("x", "rb") as file:
        assert file.read() == content
    proxy.lose_completions(5)
    store.publish("m", content)
    with store.open("m", "rb") as file:
        assert file.read() == content
    with pytest.raises(StoreError, match="exists already"):
        store.publish("m", content)


def test_files_that_the_server_did_not_delete_are_deleted_by_a_retry_or_raise_an_error(store, impatient_store, proxy):
    for name in ("a", "b"):
        store.publish(f"folder/{name}", b"1")
    proxy.first(2, "keep", "POST")
    store.delete("folder")
    assert proxy.seen.count("POST keep") == 2
    assert store.list("") == []
    store.publish("folder/a", b"1")
    proxy.choose = lambda method, _: "keep_forbidden" if method == "POST" else None
    with pytest.raises(StoreError, match=r"Cannot delete s3://.*/folder: No \(file .*/folder.*\)\.$"):
        store.delete("folder")
    proxy.choose = lambda method, _: "keep" if method == "POST" else None
    with pytest.raises(StoreError, match=r"/folder: We encountered an internal error \(file .*gave up after"):
        impatient_store.delete("folder")
    assert store.list("") == ["folder/a"]


@pytest.mark.parametrize("fault", ["cut", "busy", "refuse"])
def test_parquet_is_read_correctly_over_a_faulty_connection(store, proxy, fault):
    table = pa.table({"x": pa.array(range(200_000), pa.int64())})
    with store.open("x.parquet", "wb") as file:
        parquet.write_table(table, file, row_group_size=20_000, use_dictionary=False)
    filesystem, path = store.arrow("x.parquet")
    request_numbers = itertools.count()
    proxy.choose = lambda method, _: fault if method == "GET" and next(request_numbers) % 3 == 0 else None
    with filesystem.open_input_file(path) as file:
        assert parquet.ParquetFile(file).read().equals(table)
    assert f"GET {fault}" in proxy.seen


def write_rows(store, values):
    with store.open("rows/x.parquet", "wb") as file:
        rows = pa.table({"x": pa.array(values, pa.int64())})
        parquet.write_table(rows, file, row_group_size=25, use_dictionary=False, compression="none")


def test_two_lookups_per_row_group_detect_that_a_file_was_replaced(store, proxy):
    """Opening the file is the first; it also tells when the file was modified. The second follows the last row."""
    write_rows(store, range(100))
    files = open_data("rows", ["x"], store=store).manifest
    parquet_blocks = ParquetBlocks(store, files.folder, files.train, files.schema, chunk_rows=100)
    proxy.seen.clear()
    read = [batch for group in range(3) for batch in parquet_blocks.batches(Piece(group, 0, 25))]
    assert pa.Table.from_batches(read).column("x").to_pylist() == [*range(75)]
    assert proxy.seen.count("HEAD passed") == 2 * 3
    second = int(time.time())
    wait_for(lambda: int(time.time()) > second)  # S3 counts in seconds
    write_rows(store, range(100, 200))
    with pytest.raises(DataError, match=r"x\.parquet has another modification time than when the training began"):
        next(parquet_blocks.batches(Piece(3, 0, 25)))


def test_a_server_that_stays_unavailable_causes_a_clear_error(impatient_store, proxy):
    proxy.always("busy")
    message = r"Cannot open s3://.*/x: Service Unavailable \(gave up after \d+ attempts\)\.$"
    with pytest.raises(StoreError, match=message):
        impatient_store.open("x", "rb")
    proxy.always("refuse")
    with pytest.raises(StoreError, match=r"Cannot publish s3://.*/x: .* \(gave up after \d+ attempts\)\.$"):
        impatient_store.publish("x", b"")


def test_a_saved_file_that_cannot_be_replaced_keeps_its_earlier_content(impatient_store, proxy, tmp_path):
    best = tmp_path / "best.keras"
    best.write_bytes(b"best so far")
    job_files.replace_file(impatient_store, "saved/best.keras", best)
    best.write_bytes(b"better")
    proxy.choose = lambda method, _: "busy" if method == "PUT" else None
    with pytest.raises(StoreError, match=r"Cannot write s3://.*/saved/best\.keras: "):
        job_files.replace_file(impatient_store, "saved/best.keras", best)
    with impatient_store.open("saved/best.keras", "rb") as file:
        assert file.read() == b"best so far"
    proxy.choose = lambda method, path: None
    job_files.replace_file(impatient_store, "saved/best.keras", best)
    with impatient_store.open("saved/best.keras", "rb") as file:
        assert file.read() == b"better"


def test_a_history_that_cannot_be_replaced_keeps_its_earlier_epochs(store, impatient_store, proxy):
    records = [EpochRecord(epoch, {"loss": 1.0}, {}, 1.0, 1.0, {}) for epoch in range(2)]
    run_log.write(impatient_store, "a run", records[:1])
    before = store.list("")
    proxy.choose = lambda method, _: "busy" if method == "PUT" else None
    for history in (records[:1], records):  # the first epoch is trained again after a resume
        with pytest.raises(StoreError, match="Cannot write s3://"):
            run_log.write(impatient_store, "a run", history)
    proxy.choose = lambda method, path: None
    assert store.list("") == before
    with store.open("runs/a run/history.json", "rb") as file:
        assert len(json.loads(file.read())) == 1


def test_a_refusal_is_not_retried_and_reported_without_secrets(store, proxy, caplog):
    caplog.set_level(logging.DEBUG, "sparkhvd")
    proxy.always("forbidden")
    with pytest.raises(StoreError, match=r"Cannot publish s3://.*/m: No\.$") as caught:
        store.publish("m", b"1")
    assert proxy.seen == ["PUT forbidden"]
    for action in (lambda: store.open("m", "rb"), lambda: store.list(""), lambda: store.delete("m")):
        with pytest.raises(StoreError, match=r"Cannot .* s3://.*(Forbidden|No)\.$"):
            action()
    assert SECRET not in str(caught.value) + caplog.text
    assert SECRET not in repr(caught.value.__cause__)


@pytest.mark.parametrize("rows_read", [False, True])
def test_a_loader_closes_soon_although_the_server_has_stalled(store, proxy, monkeypatch, rows_read):
    monkeypatch.setattr(filesystem, "SILENCE_SECONDS", 15)  # of the abandoned requests, which the test waits for
    table = pa.table({"x": pa.array(range(200_000), pa.int64())})
    with store.open("rows/x.parquet", "wb") as file:
        parquet.write_table(table, file, row_group_size=10_000, use_dictionary=False)
    impatient = Store.create(store.url, storage_options=store.storage_options, retry_seconds=0.1)
    with torch_loader("rows", 10, store=impatient, rank=0, size=1, prefetch_bytes=200_000, shuffle=False) as loader:
        batches = iter(loader)
        if rows_read:
            next(batches)
        proxy.always("stall")
        if not rows_read:
            timer = threading.Timer(1.0, lambda: None)
            timer.start()
            timer.join()
        began = time.monotonic()
        batches.close()
    assert time.monotonic() - began < 12
    proxy.choose = lambda method, path: None
    impatient._connection.close()


def test_a_silent_server_times_out(s3, monkeypatch):
    monkeypatch.setattr(filesystem, "SILENCE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = options_for(f"http://127.0.0.1:{silent.getsockname()[1]}")
        store = Store.create(f"s3://{BUCKET}/x", storage_options=options, retry_seconds=0.1)
        for action in (lambda: store.publish("m", b"1"), lambda: store.list(""), lambda: store.open("m", "rb")):
            with pytest.raises(StoreError, match=r"Cannot .* s3://.*the server did not answer"):
                action()
        store._connection.close()


def test_the_error_names_an_unreachable_server(s3):
    options = options_for("http://127.0.0.1:1")
    store = Store.create(f"s3://{BUCKET}/x", storage_options=options, retry_seconds=0.5)
    with pytest.raises(StoreError, match=r"Cannot list s3://.*127\.0\.0\.1:1"):
        store.list("")
    store._connection.close()


def test_the_error_names_a_missing_bucket(s3):
    store = Store.create("s3://no-such-bucket/x", storage_options=s3.options)
    with pytest.raises(StoreError, match=r"Cannot publish s3://no-such-bucket/x/m: .*the bucket does not exist"):
        store.publish("m", b"1")
    store._connection.close()


def test_the_error_for_missing_credentials_lists_their_sources(s3, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    without_credentials = Store.create(
        f"s3://{BUCKET}/nobodys", storage_options={"endpoint_url": s3.endpoint}, retry_seconds=5
    )
    try:
        with pytest.raises(StoreError) as caught:
            without_credentials.publish("m", b"manifest")
    finally:
        without_credentials._connection.close()
    assert "Unable to locate credentials. Pass storage_options={'key': ..., 'secret': ...}" in str(caught.value)
    for name in ("spark.hadoop.fs.s3a.access.key", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert name in str(caught.value)
