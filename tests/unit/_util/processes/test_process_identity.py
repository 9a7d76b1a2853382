from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sparkhvd._util.processes.process_identity import is_running, process_start

# Gives itself a name that the kernel cuts within a character.
_NAMED = "open('/proc/self/comm', 'wb').write('обучение'.encode()); print(flush=True); input()"
# Looks for processes as a user who is not root.
_LOOK = """
import os, sys
from pathlib import Path
from sparkhvd._util.processes import process_identity

process_identity._PROCESSES = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(65534)
print([process_identity.is_running(int(pid), "7") for pid in sys.argv[2:]])
"""


def test_a_process_is_recognized_until_it_ends():
    process = subprocess.Popen([sys.executable, "-c", _NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    start = process_start(process.pid)
    assert is_running(process.pid, start)
    assert not is_running(process.pid, f"{start}0"), "another process with the same id"
    process.stdin.close()
    process.stdout.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(process.pid, start), "a zombie"
    process.wait()
    assert (is_running(process.pid, start), process_start(process.pid)) == (False, "")


def test_a_process_that_this_user_may_not_see_counts_as_running(tmp_path):
    """With ``hidepid``, ``/proc`` looks empty. Process 1 belongs to root, and no process has the largest id."""
    largest = Path("/proc/sys/kernel/pid_max").read_text().strip()
    command = [sys.executable, "-c", _LOOK, str(tmp_path), "1", largest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[True, False]\n"
