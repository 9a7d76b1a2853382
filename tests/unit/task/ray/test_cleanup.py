from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from sparkhvd.task.ray.cleanup import Cleanup
from tests.waiting import wait_for

_KILLED = """
import os, signal, sys
from sparkhvd.task.ray.cleanup import Cleanup
Cleanup(int(sys.argv[1]), sys.argv[2])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killing_the_process_ends_its_session_and_removes_its_folder(tmp_path):
    folder = tmp_path / "scratch folder"
    folder.mkdir()
    # ``timeout`` makes a process group of its own.
    with psutil.Popen(["/bin/sh", "-c", "timeout 60 sleep 60; true"], start_new_session=True) as child:
        wait_for(lambda: any(os.getpgid(process.pid) != child.pid for process in child.children()))
        others = child.children(recursive=True)
        subprocess.run([sys.executable, "-c", _KILLED, str(child.pid), str(folder)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert psutil.wait_procs(others, timeout=60)[1] == []
    wait_for(lambda: not folder.exists())


def test_nothing_is_touched_after_the_end(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    Cleanup(os.getpid(), str(tmp_path)).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert Path(tmp_path).exists()
