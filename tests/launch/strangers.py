"""Strangers, clients without the job's secret, that call at every port on which a job listens."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.errors import SparkHvdError
from sparkhvd.rpc.client import connect
from tests.endurance import send
from tests.ports import listening_ports

_SECONDS = 0.3


@contextlib.contextmanager
def calls_of_strangers(folder: Path) -> Iterator[dict[str, int]]:
    """Let strangers call once ``folder`` has a file ``call``; make a file ``called`` after each round.

    Yields:
        The number of calls by kind; "admitted" must stay 0.
    """
    counts = {"ports": 0, "garbage": 0, "endless": 0, "wrong secret": 0, "admitted": 0}
    stop = threading.Event()
    of_others = set(listening_ports(_processes()))  # Spark's own

    def call() -> None:
        while not stop.wait(0.02):
            if not (folder / "call").exists():
                continue
            for port in set(listening_ports(_processes())) - of_others:
                counts["ports"] += 1
                send(port, secrets.token_bytes(200), counts, "garbage")
                send(port, bytes(1 << 20), counts, "endless")
                for enter in (_enter_service, _enter_rendezvous):
                    counts["admitted" if _is_admitted(enter, port) else "wrong secret"] += 1
            (folder / "called").touch()

    thread = threading.Thread(target=call, name="strangers")
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()


def _processes() -> list[int]:
    """Return this process and all its descendants except Spark's JVM and the daemon of Spark's Python workers."""
    pids = [os.getpid()]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name() != "java" and not _starts_workers(process):
                pids.append(process.pid)
    return pids


def _starts_workers(process: psutil.Process) -> bool:
    parent = process.parent()
    return "pyspark.worker" in process.cmdline() and parent is not None and parent.name() == "java"


def _is_admitted(enter: Callable[[int], None], port: int) -> bool:
    try:
        enter(port)
    except (SparkHvdError, OSError):
        return False
    return True


def _enter_service(port: int) -> None:
    connect([("127.0.0.1", port)], b"another secret", Deadline.after(_SECONDS)).close()


def _enter_rendezvous(port: int) -> None:
    RendezvousClient([("127.0.0.1", port)], b"another secret", Deadline.after(_SECONDS)).close()
