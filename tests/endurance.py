"""Endurance cases, which run in rounds: tests run a few rounds, ``make soak`` runs many."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from sparkhvd.comm import session
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.errors import AuthenticationError, SparkHvdError
from tests.ports import listening_ports
from tests.ranks import RankGroup

_LONGEST_DELAY = 1.5
_ROUND_SECONDS = 60.0
_START_SECONDS = 20.0  # for a rank that was killed before it connected; launchers notice such a loss at once
_GRACE_SECONDS = 10.0


# The functions that the ranks run.


def work_until_a_rank_is_lost() -> str:
    """Connect and reduce arrays of many sizes until a rank is lost; return the error."""
    try:
        session.init()
        communicator = session.current()
        draw = random.Random(1)
        while True:
            sizes = [draw.choice([1, 1000, 300_000]) for _ in range(4)]
            handles = [
                communicator.allreduce_async(np.ones(size), ReduceOp.SUM, name=f"{i}") for i, size in enumerate(sizes)
            ]
            for handle in handles:
                handle.wait()
    except SparkHvdError as error:
        with contextlib.suppress(SparkHvdError):
            session.shutdown()
        return f"{type(error).__name__}: {error}"


def connect_repeatedly(times: int) -> list[tuple[int, int, int]]:
    """Connect, reduce an array and shut down, repeatedly.

    Returns:
        The numbers of descriptors and threads and the bytes of memory, after the first tenth and at the end.
    """
    process = psutil.Process()
    resources = []
    for cycle in range(times):
        session.init()
        communicator = session.current()
        total = communicator.allreduce(np.ones(1000), ReduceOp.SUM, name="sum")
        assert total.tolist() == [float(communicator.world.size)] * 1000
        session.shutdown()
        if cycle + 1 in {max(times // 10, 1), times}:
            resources.append((*_descriptors_and_threads(process), process.memory_info().rss))
    return resources


def _descriptors_and_threads(process: psutil.Process) -> tuple[int, int]:
    deadline = Deadline.after(5.0)
    while (threads := process.num_threads()) > 1 and not deadline.expired():
        time.sleep(0.01)  # the kernel lists a thread for a moment after it was joined
    return process.num_fds(), threads


# The faults that the tests cause.


@dataclass(frozen=True)
class Kill:
    """The result of a round in which one rank was killed.

    Attributes:
        victim: the killed rank.
        delay: seconds from the start of its work to the kill.
        seconds: from the kill until all other ranks had ended their work.
        errors: the errors of the other ranks.
    """

    victim: int
    delay: float
    seconds: float
    errors: tuple[str, ...]

    def is_as_expected(self) -> bool:
        """Return whether all other ranks failed in time with errors that name the victim."""
        in_time = self.seconds < _START_SECONDS + _GRACE_SECONDS
        return in_time and all(f"rank {self.victim}" in text or f"ranks {self.victim}" in text for text in self.errors)


def kill_random_rank(size: int, *, shared_memory: bool) -> Kill:
    """Kill a random rank of a running job at a random moment."""
    victim = secrets.randbelow(size)
    delay = random.uniform(0.0, _LONGEST_DELAY)
    segments = _segments()
    with RankGroup(size, connect=False, shared_memory=shared_memory, start_timeout=_START_SECONDS) as group:
        pids = group.pids()
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            group.kill(victim)

        timer = threading.Timer(delay, kill)
        timer.start()
        try:
            outcomes = group.outcomes(work_until_a_rank_is_lost, seconds=_ROUND_SECONDS)
        finally:
            timer.join()
        ended = time.monotonic()
    remaining = [pid for pid in pids if psutil.pid_exists(pid)]
    assert not remaining, f"processes {remaining} are still running"
    assert not _unused(_segments() - segments), "shared memory was left behind"
    assert outcomes[victim].died
    errors = [outcome.value or outcome.failure for rank, outcome in enumerate(outcomes) if rank != victim]
    return Kill(victim, delay, ended - killed[0], tuple(errors))


def _segments() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


def _unused(segments: set[str]) -> set[str]:
    """Return the segments that no running process maps; other programs on this machine use shared memory, too."""
    for process in Path("/proc").glob("[0-9]*") if segments else ():
        with contextlib.suppress(OSError):  # the process has ended
            mapped = (process / "maps").read_text()
            segments = {segment for segment in segments if segment not in mapped}
    return segments


def connect_two_ranks_repeatedly(times: int) -> list[list[tuple[int, int, int]]]:
    """Run ``connect_repeatedly`` on two ranks."""
    with RankGroup(2, connect=False) as group:
        resources: list[list[tuple[int, int, int]]] = group.run(connect_repeatedly, times, seconds=60.0 + times)
        return resources


@contextlib.contextmanager
def unauthenticated_clients(pids: list[int], port: int) -> Iterator[dict[str, int]]:
    """Connect without the token to every port of the processes and to the rendezvous until the block ends.

    Yields:
        The numbers of connections by kind and of completed rounds; "admitted" must stay 0.
    """
    counts = {"rounds": 0, "garbage": 0, "endless": 0, "wrong token": 0, "admitted": 0}
    stop = threading.Event()

    def call() -> None:
        while not stop.wait(0.01):
            for target in {port, *listening_ports(pids)}:
                send(target, secrets.token_bytes(200), counts, "garbage")
                send(target, bytes(1 << 20), counts, "endless")
            try:
                RendezvousClient([("127.0.0.1", port)], b"the wrong token", Deadline.after(5.0)).close()
                counts["admitted"] += 1
            except AuthenticationError:
                counts["wrong token"] += 1
            counts["rounds"] += 1

    thread = threading.Thread(target=call, name="unauthenticated clients")
    thread.start()
    try:
        yield counts
    finally:
        stop.set()
        thread.join()


def send(port: int, content: bytes, counts: dict[str, int], kind: str) -> None:
    # The listener may have closed in the meantime, and it may disconnect a client that is still sending.
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as link:
        arrived = link.send(content)
        counts[kind] += 1
        link.sendall(content[arrived:])
        link.shutdown(socket.SHUT_WR)
