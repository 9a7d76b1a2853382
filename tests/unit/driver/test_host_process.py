from __future__ import annotations

import queue
import sys
from pathlib import Path

import psutil
import pytest

from sparkhvd.driver.host_process import HostEnded, HostProcess


def test_a_message_that_cannot_be_read_ends_the_host():
    # The pickle of a class that this machine lacks, after its length of 23 bytes. The host ends with its input.
    message = r"\nsparkhvd is ready\n\0\0\0\027cno_such_module\nThing\n."
    received: queue.SimpleQueue[object] = queue.SimpleQueue()
    process = HostProcess(["/bin/sh", "-c", f"printf '{message}'; cat"], received.put)
    try:
        assert received.get(timeout=60) == HostEnded(
            "it sent a message that this machine cannot read (ModuleNotFoundError: No module named 'no_such_module'). "
            "Install the same version of sparkhvd and its requirements on all hosts"
        )
    finally:
        process.close()


def test_a_host_ends_with_its_launcher_even_if_a_forked_process_holds_its_stdin(tmp_path):
    program = (
        "import os, sys, threading; from pathlib import Path; from sparkhvd.driver.host_process import HostProcess; "
        "host = HostProcess([sys.executable, '-P', '-m', 'sparkhvd.task.host.main'], print); "
        "waits = [threading.Event().wait(0.05) for _ in iter(lambda: host._answered, True)]; "
        "child = os.fork(); child and Path(sys.argv[1]).write_text(f'{host._process.pid} {child}\\n'); "
        "threading.Event().wait()"
    )
    pids = tmp_path / "pids"
    launcher = psutil.Popen([sys.executable, "-c", program, str(pids)], cwd=Path(__file__).parents[3])
    pause = queue.SimpleQueue()
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert launcher.is_running()
        with pytest.raises(queue.Empty):
            pause.get(timeout=0.05)
    host, fork = map(psutil.Process, map(int, pids.read_text().split()))
    launcher.kill()
    launcher.wait()
    try:
        assert psutil.wait_procs([host], timeout=60)[1] == []
    finally:
        for process in (fork, host):
            if process.is_running():
                process.kill()
