from __future__ import annotations

import threading

import pytest

from sparkhvd.driver.log_stream import LogStream
from sparkhvd.errors import StoreError
from sparkhvd.rpc.messages import Output
from sparkhvd.store import Store
from sparkhvd.task import log_files
from sparkhvd.task.job import Job
from sparkhvd.task.log_files import LogFiles, LogFileWriter
from sparkhvd.task.worker.output import DriverLog
from tests.waiting import wait_for


@pytest.fixture
def files(tmp_path) -> LogFiles:
    return LogFiles(Store.create(str(tmp_path)), "logs")


def content(files: LogFiles, path: str) -> bytes:
    with files.store.open(path, "rb") as file:
        return file.read()


def test_lines_are_written_to_numbered_files_that_a_new_writer_does_not_replace(files):
    for text in (b"first", b"second\nthird"):
        writer = LogFileWriter(files, 3, "stdout")
        writer.write(text)
        writer.close()
    assert files.store.list("logs") == ["logs/rank.3/stdout.000000", "logs/rank.3/stdout.000001"]
    assert content(files, "logs/rank.3/stdout.000001") == b"second\nthird\n"


def test_a_new_writer_replaces_no_file_although_earlier_ones_were_deleted(files):
    for text in (b"first", b"second", b"third"):
        writer = LogFileWriter(files, 0, "stdout")
        writer.write(text)
        writer.close()
        if text == b"second":
            files.store.delete("logs/rank.0/stdout.000000")
    assert files.store.list("logs") == ["logs/rank.0/stdout.000001", "logs/rank.0/stdout.000002"]
    assert content(files, "logs/rank.0/stdout.000001") == b"second\n"


def test_large_output_is_split_into_files_and_not_kept_in_memory(files, monkeypatch):
    monkeypatch.setattr(log_files, "_PART_BYTES", 1000)
    writer = LogFileWriter(files, 0, "stderr")
    for number in range(300):
        writer.write(b"%09d" % number)
        assert sum(map(len, writer._lines)) < 1000
    writer.close()
    paths = files.store.list("logs/rank.0")
    assert len(paths) == 3
    assert b"".join(content(files, path) for path in paths) == b"".join(b"%09d\n" % number for number in range(300))


def test_lines_are_written_while_the_rank_still_runs(files, monkeypatch):
    monkeypatch.setattr(log_files, "_PART_SECONDS", 0.01)
    writer = LogFileWriter(files, 0, "stdout")
    writer.write(b"early")
    wait_for(lambda: not writer.unwritten())
    assert content(files, "logs/rank.0/stdout.000000") == b"early\n"
    writer.close()


def test_a_task_writes_its_log_files_and_reports_a_failing_store(files, capsys, tmp_path):
    job = Job(b"", 1, log_files=(("stdout", files),), driver_addresses=(), secret=b"s" * 32)
    log = DriverLog(job)
    log.rank = 0
    log.write("stdout", b"kept")
    log.write("stderr", b"not kept")
    log.close()
    assert content(files, "logs/rank.0/stdout.000000") == b"kept\n"
    assert capsys.readouterr().err == "[0]<stderr>:not kept\n"
    blocked = LogFiles(files.store, "blocked")
    (tmp_path / "blocked").write_text("a file where a folder should be")
    log = DriverLog(Job(b"", 1, log_files=(("stdout", blocked),)))
    log.rank = 0
    log.write("stdout", b"lost")
    log.close()
    message = capsys.readouterr().err
    assert "the stdout of rank 0 cannot be written to the Store, so it is shown here: " in message
    assert message.endswith("[0]<stdout>:lost\n")


def test_the_driver_writes_the_log_files_of_local_ranks(files):
    stream = LogStream(files, None, timestamps=False)
    stream.handle(Output(1, "stdout", b"said"))
    stream.close()
    assert content(files, "logs/rank.1/stdout.000000") == b"said\n"


def test_output_of_many_workers_leaves_few_threads_and_is_complete(files):
    stream = LogStream(files, None, timestamps=False, num_proc=2)
    for line in (b"first", b"second"):
        for number in range(20):
            stream.handle(Output(number, "stdout", line))
    assert sum(thread.name == "sparkhvd-log-files" for thread in threading.enumerate()) <= 8
    stream.close()
    for number in range(20):
        assert content(files, f"logs/rank.{number}/stdout.000000") == b"first\n"
        assert content(files, f"logs/rank.{number}/stdout.000001") == b"second\n"


def test_the_driver_shows_output_that_the_store_rejects_with_one_warning(files, capsys, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(log_files, "_PART_BYTES", 1)
    (tmp_path / "logs").write_text("a file where a folder should be")
    stream = LogStream(files, None, timestamps=False, shown=False)
    for number in range(300):
        stream.handle(Output(1, "stdout", b"%d" % number))
    stream.close()
    assert capsys.readouterr().out == "".join(f"[1]<stdout>:{number}\n" for number in range(300))
    (message,) = caplog.messages
    assert message.startswith("The stdout of rank 1 cannot be written to the Store, so it is shown here: ")


def test_the_next_write_raises_the_error_of_a_failing_store(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "_PART_BYTES", 1)
    (tmp_path / "blocked").write_text("")
    writer = LogFileWriter(LogFiles(Store.create(str(tmp_path)), "blocked"), 0, "stdout")
    writer.write(b"x")
    reason = r"Cannot list file://\S+/blocked/rank\.0: Not a directory\."
    with pytest.raises(StoreError, match=reason):
        writer.write(b"y")
    assert writer.unwritten() == b"x\n"
    with pytest.raises(StoreError, match=reason):
        writer.close()


def test_lines_are_kept_if_a_store_raises_an_error_of_its_own(files, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no route to the server")

    monkeypatch.setattr(type(files.store), "open", fail)
    writer = LogFileWriter(files, 2, "stdout")
    writer.write(b"x")
    with pytest.raises(StoreError, match=r"Cannot write logs/rank\.2: RuntimeError: no route to the server\."):
        writer.close()
    assert writer.unwritten() == b"x\n"
