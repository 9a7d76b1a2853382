"""Elastic jobs with random losses, joins and network cuts; every row of every epoch must be accounted for.

``job_on_hosts`` runs a job on network namespaces over ssh, and ``fit`` an estimator on this machine.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import Checkpoints, SparkBackend, TorchEstimator
from sparkhvd.comm import session
from sparkhvd.estimators.torch import TorchCallback, TorchRun
from sparkhvd.store import Store
from tests.launch.elastic_rows import beside, complaints, steps, train_until_stopped
from tests.launch.elastic_training import lives, log, places
from tests.launch.hosts import Host
from tests.launch.sshd import SshHosts
from tests.spark.test_elastic_fits import ROWS as COUNTED_ROWS
from tests.spark.test_elastic_fits import SignSGD, torch_network, uses
from tests.waiting import happens

LEAST, MOST = 2, 6  # ranks
_RECENT_SECONDS = 2.0
# Within this time after a disturbance, a job must take steps again.
_STANDSTILL_SECONDS = 90.0


@dataclass
class Report:
    """The history of a disturbed job.

    Attributes:
        events: how often each disturbance happened.
        epochs: the number of epochs that the job trained.
        sizes: the numbers of ranks with which it took steps.
        longest: seconds of the longest standstill after a disturbance.
        complaints: the detected errors.
    """

    events: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    sizes: set[int] = field(default_factory=set)
    longest: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        events = ", ".join(f"{count} x {name}" for name, count in sorted(self.events.items()))
        verdict = f"FAILED: {self.complaints[:5]}" if self.complaints else "every row counted once per epoch"
        return (
            f"{events}; sizes {sorted(self.sizes)}; {self.epochs} epochs; longest standstill {self.longest:.1f} s: "
            f"{verdict}"
        )


class Disturber:
    """Disturbs a job at random moments; ``folder`` has a log of every rank."""

    def __init__(self, folder: Path, seed: int, report: Report) -> None:
        self.folder, self.draw, self.report = folder, random.Random(seed), report
        self.over = threading.Event()  # set when the job has ended
        self.events: dict[str, Callable[[], bool]] = {"rank killed": self._kill_rank, "rank stopped": self._stop_rank}

    def ranks(self) -> list[int]:
        """Return the ranks that have just taken a step."""
        since = time.time() - _RECENT_SECONDS
        recent = [path for path in self.folder.glob("log-*") if path.stat().st_mtime > since]
        return [pid for path in recent if lives(pid := int(path.name.removeprefix("log-")))]

    def disturb(self, seconds: float) -> None:
        """Disturb the job for this time, or until it ends; complain if it does not continue."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.over.is_set():
            name = self.draw.choice(sorted(self.events))
            try:
                self.report.events[name] += self.events[name]()
            except (ProcessLookupError, psutil.NoSuchProcess):  # the rank has ended at the same moment
                continue
            began, before = time.monotonic(), self._progress()
            if not happens(lambda before=before: self._continues(before), _STANDSTILL_SECONDS):
                self.report.complaints.append(f"no step within {_STANDSTILL_SECONDS:g} s after: {name}")
                return
            self.report.longest = max(self.report.longest, time.monotonic() - began)
            self.over.wait(self.draw.uniform(0.2, 2.0))

    def _continues(self, before: int) -> bool:
        return self.over.is_set() or self._progress() > before

    def _progress(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("log-*"))

    def _kill_rank(self) -> bool:
        ranks = self.ranks()
        if len(ranks) < 2:  # the last rank has the only state
            return False
        os.kill(self.draw.choice(ranks), signal.SIGKILL)
        return True

    def _stop_rank(self) -> bool:
        ranks = self.ranks()
        if not ranks:
            return False
        stopped = self.draw.choice(ranks)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(self.draw.uniform(0.5, 3.0))
        os.kill(stopped, signal.SIGCONT)
        return True


class HostDisturber(Disturber):
    """Also kills the processes of hosts, cuts hosts off from all others or from one, and changes their slots."""

    def __init__(self, folder: Path, seed: int, report: Report, hosts: tuple[Host, ...]) -> None:
        super().__init__(folder, seed, report)
        self.hosts = hosts
        self.slots = dict.fromkeys((host.address for host in hosts), 2)
        self.events |= {
            "host process killed": self._kill_host,
            "host cut off": self._cut_off,
            "hosts separated": self._separate,
            "slots changed": self._change_slots,
        }

    def discover(self) -> dict[str, int]:
        return {address: count for address, count in self.slots.items() if count}

    def _busy(self) -> dict[str, int]:
        """Return the process of every host with a rank that has just taken a step, by address."""
        ranks = self.ranks()
        return {address: parent for pid, parent, address in places(self.folder) if pid in ranks}

    def _kill_host(self) -> bool:
        busy = self._busy()
        if len(busy) < 2:
            return False
        os.kill(busy[self.draw.choice(sorted(busy))], signal.SIGKILL)
        return True

    def _cut_off(self) -> bool:
        busy = self._busy()
        if len(busy) < 2:
            return False
        chosen = self.draw.choice(sorted(busy))
        host = next(host for host in self.hosts if host.address == chosen)
        subprocess.run(["ip", "-n", host.namespace, "link", "set", host.interface, "down"], check=True)
        try:
            time.sleep(self.draw.uniform(1.0, 12.0))
        finally:
            host.connect()
        return True

    def _separate(self) -> bool:
        """Cut the network between two hosts, which both reach the driver."""
        busy = sorted(self._busy())
        if len(busy) < 2:
            return False
        one, other = (next(host for host in self.hosts if host.address == at) for at in self.draw.sample(busy, 2))
        one.lose(other)
        other.lose(one)
        try:
            time.sleep(self.draw.uniform(1.0, 12.0))
        finally:
            one.find(other)
            other.find(one)
        return True

    def _change_slots(self) -> bool:
        changed = self.slots | {self.draw.choice(self.hosts).address: self.draw.randint(0, 2)}
        if changed == self.slots or sum(changed.values()) < LEAST + 2:
            return False
        self.slots = changed
        return True


@contextmanager
def disturbed(disturber: Disturber, seconds: float) -> Iterator[None]:
    """Disturb a job that runs in this block, then let it stop."""

    def disturb() -> None:
        happens(lambda: disturber.over.is_set() or bool(disturber.ranks()), 60.0)
        disturber.disturb(seconds)

    with beside(disturb, disturber.folder, disturber.over):
        yield


def job_on_hosts(folder: Path, hosts: SshHosts, seconds: float, seed: int) -> Report:
    """Run a job of two to six ranks on hosts over ssh, and disturb it for this time."""
    report = Report()
    disturber = HostDisturber(folder, seed, report, hosts.hosts)
    with disturbed(disturber, seconds):
        results = sparkhvd.run_elastic(
            train_until_stopped,
            (str(folder), MOST),
            num_proc=4,
            min_num_proc=LEAST,
            max_num_proc=MOST,
            launcher="ssh",
            discovery=disturber.discover,
            ssh_identity_file=hosts.key,
            env={"SPARKHVD_COLLECTIVE_TIMEOUT": "8"},
            start_timeout=120,
            elastic_timeout=120,
            cooldown_range=(0.2, 2.0),
            verbose=0,
        )
    report.epochs = len(results[0][0])
    report.sizes = {size for size, _ in steps(folder)}
    report.complaints += complaints(results)
    return report


class LogSteps(TorchCallback):
    """Logs every step of every rank, and slows it down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, run: TorchRun, epoch: int, step: int, loss: float | None) -> None:
        log(str(self.folder), f"step {session.rank()} {session.size()}")
        time.sleep(0.03)


def fit(spark: SparkSession, folder: Path, seconds: float, seed: int, elastic_batch: str) -> Report:
    """Fit with up to four ranks on this machine, and disturb it for this time; the weights count the uses of rows."""
    report, model = Report(epochs=max(2, int(seconds))), torch_network()
    estimator = TorchEstimator(
        store=Store.create(str(folder / "store")),
        model=model,
        optimizer=SignSGD(model.parameters(), lr=1.0),
        loss=lambda output, label: output.mean(),
        callbacks=[LogSteps(folder)],
        feature_cols=["id"],
        label_cols=["y"],
        batch_size=4,
        epochs=report.epochs,
        elastic_batch=elastic_batch,
        checkpoints=Checkpoints(every_steps=5),
        backend=SparkBackend(
            3, min_num_proc=1, max_num_proc=4, launcher="local", elastic_timeout=120, cooldown_range=(0.1, 1.0)
        ),
        verbose=0,
    )
    with disturbed(Disturber(folder, seed, report), seconds):
        fitted = estimator.fit(spark.range(COUNTED_ROWS).selectExpr("id", "0.0D y"))
    history = fitted.getHistory()
    report.sizes = {size for epoch in history for size in epoch["sizes"]}
    if len(history) != report.epochs:
        report.complaints.append(f"the history has {len(history)} of {report.epochs} epochs")
    if uses(fitted) != [report.epochs] * COUNTED_ROWS:
        report.complaints.append(f"rows were used {uses(fitted)} times in {report.epochs} epochs")
    return report
