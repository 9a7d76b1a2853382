"""The end of a worker process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, ctypes, sys, threading
from sparkhvd.task.worker.exit import end_process

class Destroyed:
    def __init__(self, name):
        self.name, self.itself = name, self
    def __del__(self):
        print(self.name, "destroyed", flush=True)

def finish():
    threading.main_thread().join()
    print("thread", flush=True)

text, binary = open(sys.argv[1], "w"), open(sys.argv[2], "wb")
text.write("text")
binary.write(b"binary")
reachable, garbage = Destroyed("reachable"), Destroyed("garbage")
del garbage
threading.Thread(target=finish).start()
atexit.register(print, "exit handler")
ctypes.CDLL(None).printf(b"C\\n")
end_process(3)
"""


def test_a_worker_ends_with_its_exit_handlers_and_flushes_its_files_but_frees_no_objects(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # C code would not buffer its output, either
    files = [tmp_path / "text", tmp_path / "binary"]
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *files], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "thread\nexit handler\ngarbage destroyed\nC\n"
    assert [file.read_text() for file in files] == ["text", "binary"]
