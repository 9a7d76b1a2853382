"""The elastic rows of the fault matrix: a rank fails in some phase, and the job continues without a lost step.

``inject`` runs a row and checks its outcome; ``bench.soak`` runs all rows. The driver's faults and lost hosts are rows
of ``test_elastic_hosts.py`` and ``test_elastic_sparkhvdrun.py``, and of ``faults.py`` and ``losses.py`` on Spark. Lost
executors are rows of ``test_elastic.py`` (dynamic allocation), ``test_run_clusters.py`` and ``test_yarn.py``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import sparkhvd
from sparkhvd.comm import session
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.state import ObjectState
from sparkhvd.errors import LaunchError
from tests.launch.elastic_training import ENDS, kill, lives, log, once, take_step
from tests.waiting import happens

STEPS, NUM_PROC = 8, 3
LIMIT_SECONDS = 30.0
_LONG = 120.0
_RESULT_IS_MISSING = "A rank failed after others had finished, so its result is missing"
# How long ranks wait for one that hangs.
_COLLECTIVE_SECONDS, _ELASTIC_SECONDS, _START_SECONDS = 2.0, 4.0, 20.0


@dataclass(frozen=True)
class ElasticFault:
    """One row of the matrix.

    Attributes:
        how: the fault.
        phase: the phase in which it happens.
        launcher: the launcher of the ranks.
    """

    how: str
    phase: str
    launcher: str

    @property
    def ends_the_job(self) -> bool:
        """Return whether the job must fail, because a rank is lost after others have finished."""
        return self.phase == "at the end" and self.how != "exit 0"

    @property
    def name(self) -> str:
        return f"{self.how}, {self.phase}, elastic {self.launcher}"


def _use_all_memory() -> NoReturn:
    raise MemoryError


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    time.sleep(600)


HOWS: Mapping[str, Callable[[], None]] = {
    **{name: ENDS[name] for name in ("raise", "exit", "exit 0", "kill")},
    "memory": _use_all_memory,
    "hang": _hang,
    "stopped": _stop,
}
PHASES = (
    "before init",
    "in the first sync",
    "in mid-training",
    "in a survivor's sync",
    "in a new rank's sync",
    "in the first step after a loss",
    "at the end",
)
# A rank whose function does not return after the training holds up the job until its user ends it.
ELASTIC_FAULTS = tuple(
    ElasticFault(how, phase, launcher)
    for launcher in ("local", "spark", "ssh")
    for phase in PHASES
    for how in HOWS
    if not (how in {"hang", "stopped"} and phase == "at the end")
)


def train(how: str, phase: str, folder: str) -> tuple[int, float]:
    """Count steps; one rank fails once in a phase, and another one before it where the phase needs a loss."""
    log(folder, "start")

    def fail(now: str, applies: bool = True) -> None:
        if now == phase and applies and once(folder, "fault"):
            Path(folder, "when").write_text(str(time.time()))
            HOWS[how]()

    fail("before init")
    session.init()
    is_new = Path(folder, "loss").exists()
    losses = phase not in {"before init", "in the first sync", "in mid-training", "at the end"}

    class FailingState(ObjectState):
        def sync(self) -> None:
            fail("in the first sync", session.rank() == 1)
            if Path(folder, "loss").exists():
                fail("in a survivor's sync", not is_new)
                fail("in a new rank's sync", is_new)
            super().sync()

    @run
    def loop(state: ObjectState) -> tuple[int, float]:
        while state.step < STEPS or (phase == "in a new rank's sync" and not Path(folder, "fault").exists()):
            if losses and state.step == 3 and session.rank() == 1 and once(folder, "loss"):
                kill()
            if Path(folder, "loss").exists():
                fail("in the first step after a loss", session.size() > 1 or is_new)
            fail("in mid-training", (state.step, session.rank()) == (3, 1))
            take_step(state, folder)
        return state.step, state.total

    result = loop(FailingState(step=0, total=0.0))
    fail("at the end", session.rank() == 1)
    return result


def inject(fault: ElasticFault, folder: Path, **options: object) -> tuple[float, str, list[str]]:
    """Run a job in which the fault happens.

    Args:
        fault: the row.
        folder: an empty folder.
        **options: of ``run_elastic``, for the launcher.

    Returns:
        The seconds from the fault to the end of the job, the name of its error (empty if it continued), and the
        complaints.
    """
    limits = {"start_timeout": _LONG, "elastic_timeout": _LONG}
    if fault.how in {"hang", "stopped"}:
        limits = {"start_timeout": _START_SECONDS, "elastic_timeout": _ELASTIC_SECONDS}
    error, results = "", []
    try:
        results = sparkhvd.run_elastic(
            train,
            (fault.how, fault.phase, str(folder)),
            num_proc=NUM_PROC,
            min_num_proc=1,
            env={"SPARKHVD_COLLECTIVE_TIMEOUT": f"{_COLLECTIVE_SECONDS:g}"},
            cooldown_range=(0.1, 1.0),
            verbose=0,
            **limits,
            **options,
        )
    except LaunchError as raised:
        error, message = type(raised).__name__, str(raised)
        wrong = [] if fault.ends_the_job and _RESULT_IS_MISSING in message else [message]
    else:
        wrong = _complaints(fault, results)
    when = folder / "when"
    seconds = time.time() - float(when.read_text()) if when.exists() else 0.0
    if not when.exists():
        wrong.append("the fault did not happen")
    if seconds > LIMIT_SECONDS:
        wrong.append(f"the job ended {seconds:.1f} s after the fault")
    ranks = [int(path.name.removeprefix("log-")) for path in folder.glob("log-*")]
    if not happens(lambda: not any(map(lives, ranks)), 60.0):
        wrong.append(f"ranks were left: {list(filter(lives, ranks))}")
    return seconds, error, wrong


def _complaints(fault: ElasticFault, results: Sequence[tuple[int, float] | None]) -> list[str]:
    if fault.ends_the_job:
        return ["the job did not fail although a result is missing"]
    if (fault.how, fault.phase) == ("exit 0", "at the end"):
        results = [result for result in results if result is not None]  # as in other jobs
    right = [
        result for result in results if result and result[0] >= STEPS and result[1] == sum(range(1, result[0] + 1))
    ]
    return [] if results and right == list(results) else [f"the ranks returned {results}"]
