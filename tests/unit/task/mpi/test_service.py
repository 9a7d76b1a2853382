from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from sparkhvd.rpc.messages import Executed, ExecuteOrted, Rejected
from sparkhvd.task.mpi import orted as orted_module
from sparkhvd.task.mpi import service as service_module
from sparkhvd.task.mpi.service import TaskService
from tests.waiting import wait_for

SECRET = b"s" * 32


@pytest.fixture
def service():
    service = TaskService(SECRET)
    yield service
    service.close()


def test_an_orted_that_cannot_start_counts_as_ended(service):
    service.allow_start({})
    answer = service.handle(ExecuteOrted(("rm", "-rf", "/")))
    assert isinstance(answer, Executed)
    assert answer.returncode == 127
    code, output = service.orted_ended()
    assert code == 127
    assert "executes only orted" in output
    start = time.monotonic()
    service.await_orted_end(200.0)
    assert time.monotonic() - start < 100.0


def test_an_orted_whose_output_cannot_be_read_is_killed_and_counts_as_ended(service, monkeypatch, tmp_path):
    program = tmp_path / "orted"
    started = tmp_path / "started"  # its process leaves the process group and holds the output open
    background = f"setsid sleep 600 &\necho $! >{started}.new; mv {started}.new {started}"
    program.write_text(f"#!/bin/sh\n{background}\nexec sleep 60\n")
    program.chmod(0o755)
    processes = []
    start_process = orted_module.subprocess.Popen

    def record_process(*arguments, **options):
        processes.append(start_process(*arguments, **options))
        wait_for(started.exists)
        return processes[-1]

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(orted_module.subprocess, "Popen", record_process)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    service.allow_start({"PATH": "/bin:/usr/bin"})
    try:
        answer = service.handle(ExecuteOrted((str(program),)))
    finally:
        os.kill(int(started.read_text()), signal.SIGKILL)
    assert isinstance(answer, Executed)
    assert service.orted_ended() == (127, "orted cannot be started: can't start new thread.")
    assert processes[0].poll() is not None


def test_orted_does_not_start_in_a_task_that_is_ending(service, monkeypatch):
    started = []

    class EventOfEndingTask:
        """The event that permits the start of orted; the task ends while a request waits for it."""

        def wait(self, seconds):
            service.close()
            service._task_ended.clear()  # the task is about to report its end
            return True

        def set(self):
            pass

    monkeypatch.setattr(service, "_can_execute", EventOfEndingTask())
    monkeypatch.setattr(service_module, "Orted", lambda *arguments: started.append(arguments))
    assert isinstance(service.handle(ExecuteOrted(("orted",))), Rejected)
    assert not started
