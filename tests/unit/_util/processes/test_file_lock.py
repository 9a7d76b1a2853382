"""A lock that processes of a machine hold in turn."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from sparkhvd._util.processes import file_lock
from sparkhvd._util.processes.file_lock import exclusive_on_machine
from sparkhvd.deadline import Deadline


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_threads_hold_the_lock_in_turn_and_leave_no_files(folder):
    inside, most, lock = [], [], threading.Lock()

    def work():
        with exclusive_on_machine("one", Deadline.after(60)):
            with lock:
                inside.append(None)
                most.append(len(inside))
            threading.Event().wait(0.01)
            with lock:
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 5
    assert list(folder.iterdir()) == []


def test_a_wait_for_a_lock_ends_at_the_deadline_and_depends_on_its_name(caplog, monkeypatch):
    monkeypatch.setattr(file_lock, "_REMINDER_SECONDS", 0.0)
    caplog.set_level("INFO")
    with exclusive_on_machine("doing one", Deadline.after(60)), exclusive_on_machine("doing two", Deadline.after(60)):
        assert caplog.text == ""
        with exclusive_on_machine("doing one", Deadline.after(0.2)):
            first, *again, last = caplog.records
    assert (first.levelname, {record.levelname for record in again}) == ("INFO", {"WARNING"})
    assert "Another process on this machine is already doing one; waiting for it (/" in first.message
    assert last.message == ("Another process on this machine is still doing one; continuing without waiting for it.")


def test_a_killed_holder_releases_the_lock(folder):
    script = """
import sys, tempfile
from sparkhvd._util.processes.file_lock import exclusive_on_machine
from sparkhvd.deadline import Deadline
tempfile.tempdir = sys.argv[1]
with exclusive_on_machine("one", Deadline.after(60)):
    print("mine", flush=True)
    sys.stdin.read()
"""
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as other:
        assert other.stdout.readline() == "mine\n"
        os.kill(other.pid, signal.SIGKILL)
        other.wait(60)
    assert len(list(folder.iterdir())) == 1
    deadline = Deadline.after(60)
    with exclusive_on_machine("one", deadline):
        assert not deadline.expired()
    assert list(folder.iterdir()) == []


def test_an_unwritable_folder_does_not_block_work(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    with exclusive_on_machine("one", Deadline.after(60)):
        assert not (folder / "missing").exists()


def test_a_file_system_without_locks_does_not_block_work(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with exclusive_on_machine("one", Deadline.after(60)):
            assert len(list(Path("/proc/self/fd").iterdir())) == before
