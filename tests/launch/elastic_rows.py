"""An elastic training over ssh that accounts for every row of every epoch; imported by its ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sparkhvd.comm import objects, session
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.sampler import ElasticSampler
from sparkhvd.comm.elastic.state import ObjectState
from tests.launch.elastic_training import log, sampled_state

ROWS, RATE = 240, 0.4
Result = tuple[list[float], list[str]]


def features() -> tuple[np.ndarray, np.ndarray]:
    """Return the features and labels of all rows."""
    draw = np.random.default_rng(5)
    rows = draw.normal(size=(ROWS, 3))
    return rows, rows @ np.array([1.0, -2.0, 0.5]) + 0.1 * draw.normal(size=ROWS)


def undisturbed(epochs: int) -> list[float]:
    """Return the losses of ``train_until_stopped`` in one process."""
    (rows, labels), weights, losses = features(), np.zeros(3), []
    for _ in range(epochs):
        errors = rows @ weights - labels
        losses.append(float(np.mean(errors**2)))
        weights = weights - RATE * (rows.T @ errors) / ROWS
    return losses


def train_until_stopped(folder: str, most: int, batch: int = 4) -> Result:
    """Train until a file exists; return the losses of all epochs and the epochs that lost or repeated rows.

    The gradient of an epoch is summed up over its steps, so the losses do not depend on the number of ranks.

    Args:
        folder: receives a log of every rank.
        most: the largest number of ranks.
        batch: rows per rank and step.
    """
    session.init()
    log(folder, f"place {os.getppid()} {os.environ['SSH_CONNECTION'].split()[2]}")
    (rows, labels), sampler = features(), ElasticSampler(range(ROWS), seed=3)

    @run
    def loop(state: ObjectState) -> Result:
        communicator = session.current()
        while True:
            indices = list(sampler)
            for number in range(-(-len(indices) // batch)):
                own = indices[number * batch : (number + 1) * batch]
                everyone = objects.allgather_object(communicator, own, name="rows")
                # The first rank that has a row uses it; the sampler pads the end of an epoch with earlier rows.
                users = {row: rank for rank, part in reversed(list(enumerate(everyone))) for row in part}
                fresh = [row for row in users if row not in state.seen]
                mine = [row for row in fresh if users[row] == session.rank()]
                errors = rows[mine] @ state.weights - labels[mine]
                local = np.append(rows[mine].T @ errors, errors @ errors)
                state.total = state.total + communicator.allreduce(local, name="sums") * session.size()
                state.seen = state.seen | set(fresh)
                state.repeats += sum(map(len, everyone)) - len(fresh)
                sampler.record_batch(number, batch)
                log(folder, f"step {session.rank()} {session.size()}")
                time.sleep(0.01)
                if number % 3 == 2:
                    state.commit()
            if len(state.seen) != ROWS or state.repeats >= most:
                wrong = f"epoch {state.epoch} used {len(state.seen)} of {ROWS} rows and repeated {state.repeats}"
                state.wrong = [*state.wrong, wrong]
            state.losses = [*state.losses, float(state.total[3]) / ROWS]
            state.weights = state.weights - RATE * state.total[:3] / ROWS
            state.total, state.seen, state.repeats, state.epoch = np.zeros(4), set(), 0, state.epoch + 1
            sampler.set_epoch(state.epoch)
            state.commit()
            if communicator.broadcast(np.array([Path(folder, "stop").exists()]), 0, name="stop")[0]:
                return state.losses, state.wrong

    counts = {"epoch": 0, "repeats": 0, "seen": set(), "losses": [], "wrong": []}
    return loop(sampled_state(sampler, weights=np.zeros(3), total=np.zeros(4), **counts))


def complaints(results: Sequence[Result]) -> list[str]:
    """Return what is wrong with the results of all ranks of ``train_until_stopped``."""
    losses, wrong = results[0]
    if not np.allclose(losses, undisturbed(len(losses)), rtol=1e-9):
        wrong = [*wrong, "the losses differ from those of an undisturbed training"]
    if any(result != results[0] for result in results):
        wrong = [*wrong, "the ranks returned different results"]
    return wrong


def steps(folder: Path) -> list[tuple[int, float]]:
    """Return the number of ranks and the time of every step that a rank has logged."""
    lines = [line.split() for path in folder.glob("log-*") for line in path.read_text().splitlines()]
    return [(int(words[2]), float(words[3])) for words in lines if words[0] == "step" and len(words) == 4]


@contextmanager
def beside(change: Callable[[], None], folder: Path, over: threading.Event) -> Iterator[None]:
    """Change a job that runs in this block, in a thread, then let it stop; ``over`` is set when it has ended."""

    def change_and_stop() -> None:
        try:
            change()
        finally:
            (folder / "stop").touch()

    thread = threading.Thread(target=change_and_stop, name="disturber")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
