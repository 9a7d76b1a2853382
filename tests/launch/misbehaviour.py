"""The faults of a rank or its task, by kind and phase; runs in ranks and in Spark tasks."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkhvd.task.job import Job
    from sparkhvd.task.mpi.job import MpiJob

_CALL_SECONDS = 60.0
# The time for a task to report its rank's progress to the driver before the task is lost.
_REPORT_SECONDS = 1.0


def note_pid(folder: Path) -> None:
    """Record this process, so that a test can look for it afterwards."""
    (folder / f"pid-{os.getpid()}").touch()


def note_time(folder: Path) -> None:
    """Record the time of the fault; if Spark runs the tasks again, the first time counts."""
    if not (folder / "when").exists():
        (folder / "when").write_text(repr(time.time()))


def go_wrong(how: str, folder: Path) -> None:
    """Cause the fault; return only if the job must continue or fails a little later."""
    if how == "executor killed once" and (folder / "when").exists():
        return
    note_time(folder)
    if how == "stranger":
        await_stranger(folder)
        return
    if how == "wrong secret":
        take_another_secret()
        return
    if how == "port taken":
        take_all_ports()
        return
    if how == "host cut off" or how.startswith(("executor ", "Spark ", "task ")):
        time.sleep(_REPORT_SECONDS)
    if how == "host cut off":
        cut_off()
        return
    if how.startswith(("driver ", "executor ", "Spark ", "task ")):
        lose(how, folder)
    else:
        fail(how)
    time.sleep(600)


def fail(how: str) -> None:
    """Make this process fail; return if it must hang."""
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


def lose(how: str, folder: Path) -> None:
    """Kill or stop another process: the driver, or the JVM or task of this one."""
    if how.startswith("driver "):
        driver, number = int((folder / "driver").read_text()), signal.SIGKILL
        if how == "driver interrupted":
            number = signal.SIGINT
            if "SPARKHVD_RANK" in os.environ:  # interrupt the driver again while it ends this rank
                signal.signal(signal.SIGTERM, lambda *_: os.kill(driver, number))
        os.kill(driver, number)
        return
    import psutil  # noqa: PLC0415

    if how == "task stopped":
        own = psutil.Process()
        next(one for one in (own, *own.parents()) if "pyspark.worker" in one.cmdline()).suspend()
        return
    if how == "Spark of a cluster killed":
        driver = psutil.Process(int((folder / "driver").read_text()))
        next(one for one in driver.children() if one.name() == "java").kill()
        return
    # The executor's JVM; on a local master, that is all of Spark.
    next(one for one in psutil.Process().parents() if one.name() == "java").kill()


def await_stranger(folder: Path) -> None:
    """Wait until strangers have called at every open port of the job."""
    (folder / "call").touch()
    deadline = time.monotonic() + _CALL_SECONDS
    while not (folder / "called").exists():
        assert time.monotonic() < deadline, "no stranger called"
        time.sleep(0.01)


def take_another_secret() -> None:
    """Make this rank's next ``init()`` use a wrong secret."""
    from sparkhvd.comm import session  # noqa: PLC0415

    session.set_launch_context(replace(session.launch_context(), token=secrets.token_bytes(32)))


def take_all_ports() -> None:
    """Take every port that the kernel assigns for an address of this host, for as long as this process lives."""
    while True:
        listener = socket.socket()
        # Ports of closed connections would become free a little later.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
        except OSError:
            listener.close()
            return
        listener.detach()


def cut_off() -> None:
    """Disconnect the cable of this host, which must be one of ``hosts``; its processes continue."""
    network = subprocess.run(["ip", "netns", "identify"], capture_output=True, text=True, check=True).stdout
    assert network.startswith("shvd"), "this is no host of the tests"
    cable = next(name for _, name in socket.if_nameindex() if name.startswith("ens"))
    subprocess.run(["ip", "link", "set", cable, "down"], check=True)


class BadResult:
    """A result whose pickling goes wrong after the rank has returned it."""

    def __init__(self, how: str, folder: Path) -> None:
        self._how = how
        self._folder = folder

    def __reduce__(self) -> str | tuple[object, ...]:
        go_wrong(self._how, self._folder)
        return str, ("packed",)


def train(how: str, phase: str, folder_name: str) -> object:
    """Run a job whose faulty rank goes wrong in a phase."""
    from sparkhvd.comm import session  # noqa: PLC0415

    folder = Path(folder_name)

    def is_faulty() -> bool:
        return os.environ.get("SPARKHVD_RANK") == os.environ["FAULT_RANK"]  # elastic ranks have none before init()

    note_pid(folder)
    if phase == "at rendezvous" and is_faulty():
        while not (folder / "in init").exists():
            time.sleep(0.01)
        go_wrong(how, folder)
    (folder / "in init").touch()
    session.init()
    for step in range(3):
        session.current().barrier(name=f"step {step}")
        if phase == "in mid-training" and step == 1 and is_faulty():
            print("last words", file=sys.stderr, flush=True)
            go_wrong(how, folder)
    if phase == "at the end" and is_faulty():
        return BadResult(how, folder)
    return None


def barrier_task(job: Job, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run a task of the barrier launcher."""
    from sparkhvd.task.main import run_task  # noqa: PLC0415 - needs Spark

    how, folder = str(dict(job.env)["FAULT"]), Path(str(dict(job.env)["FAULT_FOLDER"]))
    if _is_faulty(job, "before registration"):
        if how == "wrong secret":
            note_time(folder)
            job = replace(job, secret=secrets.token_bytes(32))
        if how == "task stopped":
            note_pid(folder)
        if how in {"task stopped", "host cut off"}:
            go_wrong(how, folder)
    if _is_faulty(job, "while its rows come"):
        note_pid(folder)
        batches = _come_late(batches, how, folder)
    yield from run_task(job, batches)


def _come_late(batches: Iterator[pa.RecordBatch], how: str, folder: Path) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task that goes wrong before they arrive, once it has its link to the driver."""
    while any(thread.name == "sparkhvd-driver-connect" for thread in threading.enumerate()):
        time.sleep(0.01)
    go_wrong(how, folder)
    yield from batches


def mpi_task(job: MpiJob, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run a task of the mpi launcher with its own container id, so that it is a separate host to Open MPI."""
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - only in Spark's tasks

    from sparkhvd.task.mpi.task import run_mpi_task  # noqa: PLC0415 - ranks need no Spark

    if _is_faulty(job.job, "before registration"):
        how, folder = str(dict(job.job.env)["FAULT"]), Path(str(dict(job.job.env)["FAULT_FOLDER"]))
        if how == "wrong secret":
            note_time(folder)
            job = replace(job, job=replace(job.job, secret=secrets.token_bytes(32)))
        else:
            go_wrong(how, folder)
    os.environ["CONTAINER_ID"] = f"container {BarrierTaskContext.get().partitionId()}"
    try:
        yield from run_mpi_task(job, batches)
    finally:
        del os.environ["CONTAINER_ID"]  # Spark reuses this process


def _is_faulty(job: Job, phase: str) -> bool:
    """Return whether the calling task must go wrong in this phase."""
    from pyspark import BarrierTaskContext  # noqa: PLC0415 - only in Spark's tasks

    environment = dict(job.env)
    index = str(BarrierTaskContext.get().partitionId())
    return (environment["FAULT_PHASE"], environment["FAULT_RANK"]) == (phase, index)
