"""An elastic job on hosts over ssh that grows, loses the ranks of a host, and gets the host back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import sparkhvd
from tests.launch.elastic_rows import Result, beside, steps, train_until_stopped
from tests.launch.hosts import Host
from tests.launch.sshd import SshHosts, programs
from tests.waiting import wait_for

# Steps of every rank before the next change, and the limit of the time to the last of them.
_STEPS = 5
_MOST_SECONDS = 300.0


@dataclass(frozen=True)
class Resized:
    """The history of a job.

    Attributes:
        results: what the ranks returned.
        seconds: by change and number of ranks, the seconds from the change to the next step with this number.
        others: the numbers of ranks with which the job took steps in between.
    """

    results: list[Result]
    seconds: dict[tuple[str, int], float]
    others: set[int]


@dataclass
class _Resizer:
    """Changes a job; ``over`` is set when it has ended."""

    folder: Path
    slots: dict[str, int]
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def change(self, name: str, slots: dict[str, int], action: Callable[[], None] = lambda: None) -> None:
        start = time.monotonic()
        action()
        self.slots = slots
        self.seconds[name, sum(slots.values())] = self.await_steps(start) - start

    def await_steps(self, since: float) -> float:
        """Wait until every slot has a rank that has taken several steps; return the time of the first one."""
        ranks = sum(self.slots.values())

        def times() -> list[float]:
            return [at for size, at in steps(self.folder) if size == ranks and at > since]

        wait_for(lambda: self.over.is_set() or len(times()) >= _STEPS * ranks, _MOST_SECONDS)
        return min(times())


def run_resized(folder: Path, hosts: SshHosts, few: int, many: int) -> Resized:
    """Run a job with ``few`` ranks on every host, then ``many``, then none on the last host, and all of them again."""
    *first, lost = hosts.hosts
    at_first = {host.address: few for host in hosts.hosts}
    others = {host.address: many for host in first}
    everywhere = others | {lost.address: many}
    resizer = _Resizer(folder, at_first)

    def resize() -> None:
        resizer.await_steps(time.monotonic())
        resizer.change("more slots", everywhere)
        resizer.change("a host killed", others, lambda: _kill_programs(lost))
        resizer.change("the host is back", everywhere)

    with beside(resize, folder, resizer.over):
        results = sparkhvd.run_elastic(
            train_until_stopped,
            (str(folder), sum(everywhere.values()), 1),
            num_proc=sum(at_first.values()),
            min_num_proc=few,
            max_num_proc=sum(everywhere.values()),
            launcher="ssh",
            discovery=lambda: resizer.slots,
            ssh_identity_file=hosts.key,
            start_timeout=_MOST_SECONDS,
            elastic_timeout=_MOST_SECONDS,
            cooldown_range=(1.0, 2.0),
            verbose=0,
        )
    expected = {sum(slots.values()) for slots in (at_first, others, everywhere)}
    return Resized(results, resizer.seconds, {size for size, _ in steps(folder)} - expected)


def _kill_programs(host: Host) -> None:
    """Kill all processes on a host except its ssh server."""
    for pid in programs(host):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
