from __future__ import annotations

import io
import os
import re
import sys
import threading
import time

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparkhvd.driver.log_stream import LogStream
from sparkhvd.rpc.messages import Output
from sparkhvd.rpc.server import Server
from sparkhvd.task.job import Job
from sparkhvd.task.worker.output import DriverLog, LineBuffer, OutputPump, RankLog

SECRET = b"q" * 32


@example([b"\n\n"])
@given(st.lists(st.binary(max_size=20).map(lambda piece: piece.replace(b"x", b"\n").replace(b"\r", b""))))
def test_lines_are_reassembled_from_any_chunks(pieces):
    buffer = LineBuffer()
    forwarded = [lines for lines in map(buffer.add, pieces) if lines is not None]
    content = b"".join(pieces)
    end = content.rfind(b"\n")
    assert (buffer.flush() or b"") == content[end + 1 :]
    assert b"".join(lines + b"\n" for lines in forwarded) == content[: end + 1]


@given(st.lists(st.text("ab\r\n", max_size=6).map(str.encode)))
def test_lines_that_end_with_carriage_returns_stay_whole(pieces):
    buffer = LineBuffer()
    forwarded = [lines for lines in [*map(buffer.add, pieces), buffer.flush()] if lines is not None]
    assert re.findall(b"[ab]+", b"\n".join(forwarded)) == re.findall(b"[ab]+", b"".join(pieces))


@pytest.mark.parametrize(
    ("pieces", "forwarded"),
    [
        (["1%\r", "2%\r", "\n", "end\n"], ["1%\r", "2%\r", "end"]),
        (["\r1%", "\r2%", "\r3%", "\nend\n"], ["\r1%", "\r2%", "\r3%\nend"]),
        (["line\n\r", "1%", "\r2%\n"], ["line", "\r1%\r2%"]),
        (["one\r\ntwo\r", "\n\n"], ["one\r\ntwo\r", ""]),
        (["\n\n"], ["\n"]),
    ],
)
def test_a_progress_bar_appears_while_it_moves(pieces, forwarded):
    buffer = LineBuffer()
    added = (buffer.add(piece.encode()) for piece in pieces)
    assert [lines.decode() for lines in added if lines is not None] == forwarded


def test_an_endless_line_is_forwarded_in_bounded_pieces():
    buffer = LineBuffer(max_line_bytes=10)
    assert buffer.add(b"123456789") is None
    assert buffer.add(b"0") == b"1234567890"
    assert buffer.flush() is None


class RecordingStream:
    """A text stream that records its text."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        return


def pumped(log: RankLog, stdout: bytes, stderr: bytes) -> OutputPump:
    readers = []
    for content in (stdout, stderr):
        reader, writer = os.pipe()
        threading.Thread(target=lambda w=writer, c=content: (os.write(w, c), os.close(w))).start()
        readers.append(reader)
    pump = OutputPump(*readers, log)
    pump.start()
    pump.finish(seconds=20.0)
    return pump


def test_output_reaches_the_driver_with_its_rank():
    stdout, stderr = RecordingStream(), RecordingStream()
    stream = LogStream(stdout, stderr, timestamps=False)
    with Server(SECRET, stream) as server:
        log = DriverLog(Job(b"", 2, driver_addresses=(("127.0.0.1", server.port),), secret=SECRET))
        log.rank = 1
        log.started()
        pump = pumped(log, "one\n\ntwo ü\nthree".encode(), b"oh\n")
        log.close()
    assert stdout.text == "[1]<stdout>:one\n[1]<stdout>:\n[1]<stdout>:two ü\n[1]<stdout>:three\n"
    assert stderr.text == "[1]<stderr>:oh\n"
    assert pump.stderr_tail() == "oh"
    assert stream.started.is_set()


def test_output_goes_to_the_tasks_stderr_when_no_driver_answers(capsys):
    with Server(SECRET, LogStream(None, None, timestamps=False)) as server:
        address = ("127.0.0.1", server.port)
    log = DriverLog(Job(b"", 1, driver_addresses=(address,), secret=SECRET))
    log.rank = 0
    pumped(log, b"one\ntwo\n", b"")
    log.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("sparkhvd: the driver cannot be reached, so the output of rank 0 is written here: No")
    assert lines[1:] == ["[0]<stdout>:one", "[0]<stdout>:two"]


def test_a_stream_that_is_not_sent_to_the_driver_goes_to_the_tasks_stderr(capsys):
    stdout = RecordingStream()
    with Server(SECRET, LogStream(stdout, None, timestamps=False, shown=False)) as server:
        addresses = (("127.0.0.1", server.port),)
        log = DriverLog(Job(b"", 1, driver_addresses=addresses, secret=SECRET, streamed=("stdout",)))
        log.rank = 0
        pumped(log, b"one\n", b"two\n")
        log.close()
    assert stdout.text == "[0]<stdout>:one\n"
    assert capsys.readouterr() == ("", "[0]<stderr>:two\n")


def test_an_open_pipe_of_another_process_does_not_block_the_task():
    held_open = []
    readers = []
    for _ in range(2):
        reader, writer = os.pipe()
        readers.append(reader)
        held_open.append(writer)
    pump = OutputPump(*readers, DriverLog(Job(b"", 1)))
    pump.start()
    before = time.monotonic()
    pump.finish(seconds=0.01)
    assert time.monotonic() - before < 60
    for writer in held_open:
        with pytest.raises(BrokenPipeError):  # the task has closed its end
            os.write(writer, b"late")
        os.close(writer)


def test_a_driver_without_stdout_and_stderr_drops_the_output_without_a_warning(monkeypatch, caplog):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
        LogStream(None, None, timestamps=False).handle(Output(0, name, b"x"))
    monkeypatch.undo()
    assert not caplog.records


def test_lines_can_be_timestamped():
    stdout = RecordingStream()
    LogStream(stdout, None, timestamps=True).handle(Output(0, "stdout", b"x"))
    stamp, _, rest = stdout.text.partition("[0]")
    assert rest == "<stdout>:x\n"
    assert stamp.count(":") == 2


def test_characters_that_the_drivers_stream_cannot_encode_are_escaped():
    shown = io.TextIOWrapper(io.BytesIO(), encoding="iso8859-2", newline="")
    LogStream(shown, None, timestamps=False).handle(Output(0, "stdout", "before\n10% ━━ für ñ\nafter".encode()))
    lines = shown.buffer.getvalue().decode("iso8859-2").replace("[0]<stdout>:", "").splitlines()
    assert lines == ["before", "10% \\u2501\\u2501 für \\xf1", "after"]


def test_a_progress_bar_keeps_its_prefix_and_counts_as_one_line_of_the_tail():
    shown = RecordingStream()
    stream = LogStream(shown, shown, timestamps=False)
    for content in (b"one\r\n\ntwo\n\r 0%", b"\r 10%\r 20%", b"30%\r"):
        stream.handle(Output(0, "stderr", content))
    assert shown.text.replace("[0]<stderr>:", "|") == "|one\n|\n|two\n| 0%\n| 10%\n| 20%\n|30%\n"
    pump = pumped(DiscardingLog(), b"", b"why\n" + b"".join(b"%d%%\r" % number for number in range(100)) + b"\nend\n")
    assert pump.stderr_tail().split("\n")[::2] == ["why", "end"]


class DiscardingLog:
    """A log that discards everything."""

    rank = 3

    def started(self) -> None:
        return

    def write(self, stream: str, content: bytes) -> None:
        return

    def close(self) -> None:
        return


class FailingLog(DiscardingLog):
    def write(self, stream: str, content: bytes) -> None:
        raise AttributeError("nothing to write to")


def test_a_pipe_is_read_to_its_end_even_if_its_log_fails(caplog):
    pump = pumped(FailingLog(), b"", b"".join(b"%09d\n" % number for number in range(50_000)))
    assert pump.stderr_tail().endswith("\n000049999")
    assert caplog.text.count("Output of rank 3 is lost: nothing to write to") == 1


def test_an_unwritable_folder_affects_only_the_log_files(tmp_path, caplog):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stderr").symlink_to("/dev/full")
    shown = RecordingStream()
    stream = LogStream(shown, shown, timestamps=False, folder=tmp_path)
    for number, name in enumerate(("stdout", "stderr", "stderr", "stdout")):
        stream.handle(Output(0, name, b"%d" % number))
    stream.close()
    assert shown.text == "[0]<stdout>:0\n[0]<stderr>:1\n[0]<stderr>:2\n[0]<stdout>:3\n"
    assert (tmp_path / "rank.0" / "stdout").read_text() == "0\n"
    warning = f"The output of the ranks is no longer saved in {tmp_path}: [Errno 28] No space left on device"
    assert caplog.text.count("saved in") == caplog.text.count(warning) == 1


def test_output_of_many_workers_leaves_few_files_open_and_is_complete(tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").write_text("of an earlier job\n")
    stream = LogStream(None, None, timestamps=False, folder=tmp_path, num_proc=2, shown=False)
    before = psutil.Process().num_fds()
    for line in (b"first", b"second"):
        for number in range(100):
            stream.handle(Output(number, "stdout", line))
    assert psutil.Process().num_fds() - before <= 8
    stream.close()
    assert {path.read_text() for path in tmp_path.glob("rank.*/stdout")} == {"first\nsecond\n"}
