"""What a rank does wrong, and when; runs in ranks."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

FAULTY_RANK = 1


def note_pid(folder: Path) -> None:
    """Say which process this is, so that it can be looked for afterwards."""
    (folder / f"pid-{os.getpid()}").touch()


def go_wrong(how: str, folder: Path) -> None:
    """Never returns."""
    (folder / "when").write_text(repr(time.time()))
    if how == "raise":
        raise ValueError("no luck")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
        bytearray(1 << 34)
    if how == "disk":
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"x")
    time.sleep(600)


class BadResult:
    """Goes wrong when the rank has returned it and its process packs it."""

    def __init__(self, how: str, folder: Path) -> None:
        self._how = how
        self._folder = folder

    def __reduce__(self) -> str | tuple[object, ...]:
        go_wrong(self._how, self._folder)
        raise AssertionError


def train(how: str, phase: str, folder_name: str) -> object:
    """A training in which the faulty rank goes wrong in a phase, and the others notice or not."""
    from sparkhvd.comm import session  # noqa: PLC0415

    folder, faulty = Path(folder_name), os.environ["SPARKHVD_RANK"] == str(FAULTY_RANK)
    note_pid(folder)
    if phase == "at rendezvous" and faulty:
        while not (folder / "in init").exists():
            time.sleep(0.01)
        go_wrong(how, folder)
    (folder / "in init").touch()
    session.init()
    for step in range(3):
        session.current().barrier(name=f"step {step}")
        if phase == "in mid-training" and step == 1 and faulty:
            print("last words", file=sys.stderr, flush=True)
            go_wrong(how, folder)
    if phase == "at the end" and faulty:
        return BadResult(how, folder)
    return None
