"""Functions that the tests run on ranks. Each rank imports this module, so it imports little itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.waiting import wait_for

LINE = "a line of a rank that talks all the time, without a pause and without an end;" * 10


def place() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SPARKHVD_", "HOROVOD_", "LOCAL_RANK", "MY_"))
    }


def talk_and_wait(path: str) -> dict[str, str]:
    print("said by", os.environ["SPARKHVD_RANK"])
    print("warned", file=sys.stderr)
    while not Path(path).exists():
        time.sleep(0.01)
    sys.stdout.write("no newline at the end")
    return place()


def say(rank_and_more: str) -> None:
    print(os.environ["SPARKHVD_RANK"], rank_and_more)


def wait_for_file(path: str) -> None:
    wait_for(Path(path).exists, 60.0)


def sum_over_ranks(offset: int, *, scale: int) -> tuple[int, int, float]:
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + offset)]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), total.item() * scale


def print_much(count: int) -> int:
    """Print lines; return by how many bytes the task's process grew while it forwarded them."""
    import psutil  # noqa: PLC0415

    task = psutil.Process(os.getppid())
    print(LINE, flush=True)
    before = task.memory_info().rss
    for _ in range(count):
        print(LINE)
    return task.memory_info().rss - before


def end_beside_busy_siblings(folder: str, how: str) -> None:
    """End rank 1 while rank 0 waits in a collective and rank 2 is busy elsewhere."""
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415

    session.init()
    communicator = session.current()
    rank = communicator.world.rank
    Path(folder, str(rank)).write_text(str(os.getpid()))
    communicator.barrier(name="all have a pid")
    if rank == 0:
        pending = communicator.allreduce_async(np.ones(3, np.float32), name="never complete")
        Path(folder, "pending").touch()
        pending.wait()
    while rank == 2:
        if how == "exit":
            print("talks without end")
        else:
            time.sleep(600)
    while not Path(folder, "pending").exists():
        time.sleep(0.01)
    print("last words", file=sys.stderr)
    if how == "raise":
        raise ValueError("no luck on rank 1")
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def big(size: int) -> bytes:
    return bytes(size)


def hold(path: str) -> int:
    """Return the number of ranks once the file exists."""
    from sparkhvd.comm import session  # noqa: PLC0415

    session.init()
    Path(f"{path} runs").touch()
    while not Path(path).exists():
        time.sleep(0.05)
    return session.current().world.size


def write_pid_and_stay(folder: str) -> None:
    print("up")
    Path(folder, os.environ["SPARKHVD_RANK"]).write_text(str(os.getpid()))
    time.sleep(600)
