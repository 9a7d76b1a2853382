"""Elastic trainings that tests run and break; imported by their ranks."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from sparkhvd.comm import objects, session
from sparkhvd.comm.elastic.loop import run
from sparkhvd.comm.elastic.sampler import ElasticSampler
from sparkhvd.comm.elastic.state import ObjectState, State
from sparkhvd.errors import HorovodInternalError
from tests.waiting import happens, wait_for

MOST_STEPS = 10_000  # so that a test fails whose ranks do not change as expected


def once(folder: str, event: str) -> bool:
    """Return True to one process only."""
    try:
        Path(folder, event).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("no luck")


def leave() -> None:
    sys.exit(3)


def take_step(state: ObjectState, folder: str) -> None:
    """Add the mean of the next step's number over the ranks, log the step, and commit."""
    mean = session.current().allreduce(np.array([state.step + 1.0]), name="step")
    state.total += float(mean[0])
    state.step += 1
    log(folder, f"step {state.step} {session.rank()} {session.size()}")
    time.sleep(0.01)
    state.commit()


def train(steps: int, folder: str, events: dict[tuple[int, int, int], str] | None = None, sizes: tuple[int, ...] = ()):
    """Count steps; ``events`` maps (step, rank, size) to the way in which the rank ends there, once.

    Every rank logs its steps into its own file. With ``sizes``, train on until the job has had these sizes.
    """
    session.init()
    state = ObjectState(step=0, total=0.0, sizes=())
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(session.size())])

    @run
    def loop(state):
        if state.sizes[-1:] != (session.size(),):
            state.sizes = (*state.sizes, session.size())
        while state.step < steps or (sizes and state.sizes != sizes and state.step < MOST_STEPS):
            event = (events or {}).get((state.step, session.rank(), session.size()))
            if event and once(folder, f"{event}-{state.step}-{session.rank()}-{session.size()}"):
                log(folder, "end")
                ENDS[event]()
            take_step(state, folder)
        return state.step, state.total, session.rank(), session.size(), os.getpid(), resets

    return loop(state)


def kill_with_host() -> None:
    """Kill the process of this host, and this rank with it."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def train_on_hosts(folder: str, sizes: tuple[int, ...], faults: dict[int, str] | None = None, gone: str = ""):
    """Train until the job has had these sizes; return step, sum, sizes, process, and whether ``gone`` is gone.

    Args:
        folder: receives a file per rank: the process of its host, its address, its steps.
        sizes: the sizes of the generations.
        faults: how the last rank ends in the generation with this number.
        gone: the address of a host whose processes must end while the job runs.
    """
    session.init()
    state = ObjectState(step=0, total=0.0, sizes=())
    log(folder, f"place {os.getppid()} {os.environ['SSH_CONNECTION'].split()[2]}")

    @run
    def loop(state):
        state.sizes = (*state.sizes, session.size())
        first = state.step
        while state.step < first + 5 or (state.sizes != sizes and state.step < MOST_STEPS):
            take_step(state, folder)
            fault = (faults or {}).get(len(state.sizes))
            if fault and state.step == first + 5 and session.rank() == session.size() - 1:
                ENDS[fault]()
        parents = [parent for _, parent, address in places(Path(folder)) if address == gone]
        return state.step, state.total, state.sizes, os.getpid(), happens(lambda: not any(map(lives, parents)), 20)

    return loop(state)


def kill_executor() -> None:
    """Kill the JVM of this rank's Spark executor; the rank ends with it."""
    next(one for one in psutil.Process().parents() if one.name() == "java").kill()
    time.sleep(60)


ENDS: dict[str, Callable[[], None]] = {
    "kill": kill,
    "kill with host": kill_with_host,
    "kill executor": kill_executor,
    "raise": fail,
    "exit": leave,
    "exit 0": sys.exit,
}


def places(folder: Path) -> list[tuple[int, int, str]]:
    """Return process, host process and host address of each rank of ``train_on_hosts``, in the order of their start."""
    starts = []
    for path in folder.glob("log-*"):
        first = path.read_text().partition("\n")[0].split()
        if first[:1] == ["place"]:
            starts.append((float(first[3]), int(path.name.removeprefix("log-")), int(first[1]), first[2]))
    return [place for _, *place in sorted(starts)]


def lives(pid: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def log(folder: str, line: str) -> None:
    with Path(folder, f"log-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(f"{line} {time.monotonic()}\n")


def bytes_of(size: int) -> bytes:
    session.init()
    return bytes([session.rank()]) * size


def always_fail_on_the_last_rank(folder: str):
    session.init()
    state = ObjectState(step=0)

    @run
    def loop(state):
        while True:
            session.current().barrier()
            state.step += 1
            state.commit()
            if session.rank() == session.size() - 1 > 0:
                raise ValueError(f"no luck at step {state.step}")

    loop(state)


def fail_at_a_step(folder: str, ranks: tuple[int, ...], error: Exception):
    """Raise the same error whenever these ranks have taken three steps."""
    session.init()
    state = ObjectState(step=0, total=0.0)

    @run
    def loop(state):
        while state.step < 9:
            if state.step == 3 and session.rank() in ranks:
                log(folder, "end")
                raise error
            take_step(state, folder)

    loop(state)


def swallow(folder: str):
    """Catch every error during training."""
    session.init()
    state = ObjectState(step=0)

    @run
    def loop(state):
        try:
            while state.step < 10:
                if state.step == 5 and session.rank() == 1 and once(folder, "killed"):
                    kill()
                session.current().allreduce(np.ones(1), name="step")
                state.step += 1
                state.commit()
        except Exception:  # noqa: BLE001 - that is the case
            return "swallowed"
        return state.step

    return loop(state)


def lose_a_rank_without_a_loop():
    """Lose a rank without ``hvd.elastic.run``, so that no other rank notices."""
    session.init()
    pids = session.current().allgather(np.array([os.getpid()]), name="pids")
    if session.rank() == 1:
        kill()
    assert happens(lambda: not psutil.pid_exists(int(pids[1])), 30)
    return session.rank()


def train_twice(fault: str):
    """Train twice in one function; a fault happens in the second training."""
    session.init()

    @run
    def loop(state):
        while state.step < 3:
            session.current().allreduce(np.ones(1), name="step")
            state.step += 1
            if fault == "error" and state.step == state.fails_at:
                raise HorovodInternalError("no luck")
            state.commit()
        return state.step

    first = loop(ObjectState(step=0, fails_at=-1))
    if fault == "init":
        session.shutdown()
        session.init()
    return first, loop(ObjectState(step=0, fails_at=2))


def mismatch(folder: str):
    session.init()

    @run
    def loop(state):
        Path(folder, f"call-{session.rank()}-{time.monotonic_ns()}").touch()
        session.current().allreduce(np.ones(1 + session.rank()), name="step")

    loop(ObjectState())


def fail_every_time(folder: str):
    """Raise the same error on all ranks, although no rank is lost."""
    from sparkhvd.errors import CollectiveError  # noqa: PLC0415

    session.init()

    @run
    def loop(state):
        if session.rank() == 0:
            Path(folder, f"call-{time.monotonic_ns()}").touch()
        raise CollectiveError("the network is down")

    loop(ObjectState(step=0))


def keep_a_lock_in_the_state():
    """Train with a state that rank 0 cannot send to the others."""
    session.init()
    state = ObjectState(lock=threading.Lock())
    run(lambda state: state.commit())(state)


def hang_at_the_start(folder: str, which: int):
    """Hang before ``init()`` in the start with the number ``which``; train in the others, and lose a rank once."""
    number = next(number for number in range(99) if once(folder, f"start-{number}"))
    if number == which:
        time.sleep(600)
    return train(5, folder, {(3, 1, 2): "kill"}, (2, 1, 2))


def lose_the_rank_after_failed_starts(folder: str):
    """Train in the first worker until three later ones have failed, then kill it."""
    number = next(number for number in range(99) if once(folder, f"start-{number}"))
    if number > 0:
        raise ValueError("a broken host")
    session.init()

    @run
    def loop(state):
        wait_for(lambda: Path(folder, "start-5").exists())
        kill()

    loop(ObjectState(step=0))


def hang_once_in_training(folder: str):
    """Let one rank stop taking part; the others notice by the timeout of a collective."""
    session.init()
    state = ObjectState(step=0)

    @run
    def loop(state):
        while state.step < 5:
            if state.step == 2 and session.rank() == 1 and once(folder, "hang"):
                time.sleep(600)
            session.current().allreduce(np.ones(1), name="step")
            state.step += 1
            state.commit()
        return state.step

    return loop(state)


class OwnState(State):
    """A user-defined state whose ``__init__`` does not call ``super().__init__()``."""

    def __init__(self) -> None:
        self.value = np.zeros(2)
        self.saved = self.value.copy()

    def save(self) -> None:
        self.saved = self.value.copy()

    def restore(self) -> None:
        self.value = self.saved.copy()

    def sync(self) -> None:
        self.value = session.current().broadcast(self.value, 0, name="own")
        self.save()


def lose_the_only_other_rank_after_a_sync(folder: str):
    """Lose rank 1, and then rank 0 as soon as it has sent the state to the successor of rank 1."""
    session.init()

    class HandedOver(ObjectState):
        def sync(self) -> None:
            super().sync()
            if session.size() == 2 and self.step > 0:
                Path(folder, f"synced-{session.rank()}").write_text(str(self.step), encoding="utf-8")
                if session.rank() == 0 and once(folder, "handed over"):
                    assert happens(lambda: Path(folder, "synced-1").exists(), 30)
                    kill()

    @run
    def loop(state):
        while state.step < 9 or (session.size() == 1 and not Path(folder, "handed over").exists()):
            if state.step == 3 and session.rank() == 1 and once(folder, "killed"):
                kill()
            session.current().allreduce(np.ones(1), name="step")
            state.step += 1
            state.commit()
        return state.step

    return loop(HandedOver(step=0))


def train_own_state(folder: str):
    session.init()

    @run
    def loop(state):
        while state.value[0] < 10:
            if state.value[0] == 4 and session.rank() == 0 and session.size() == 2 and once(folder, "killed"):
                kill()
            state.value += session.current().allreduce(np.array([1.0, 2.0]), name="step")
            state.commit()
        return state.value.tolist()

    return loop(OwnState())


def sampled_state(sampler: ElasticSampler, **values: object) -> ObjectState:
    """Return a state of these values and a sampler."""

    class SampledState(ObjectState):
        def save(self) -> None:
            super().save()
            self._sampler = sampler.state_dict()

        def restore(self) -> None:
            super().restore()
            sampler.load_state_dict(self._sampler)

        def sync(self) -> None:
            sampler.load_state_dict(objects.broadcast_object(session.current(), sampler.state_dict(), name="sampler"))
            super().sync()

    return SampledState(**values)


def sample(folder: str, length: int, batch: int, epochs: int):
    """Log which samples every committed step has processed."""
    session.init()
    sampler = ElasticSampler(range(length), seed=3)
    state = sampled_state(sampler, epoch=0, steps=0, seen=[])

    @run
    def loop(state):
        while state.epoch < epochs:
            indices = list(sampler)
            for number in range(-(-len(indices) // batch)):
                if session.rank() == 1 and session.size() == 3 and state.steps == 4 and once(folder, "killed"):
                    kill()
                own = indices[number * batch : (number + 1) * batch]
                everyone = objects.allgather_object(session.current(), own, name="batch")
                state.seen = [*state.seen, *((state.epoch, index) for part in everyone for index in part)]
                state.steps += 1
                sampler.record_batch(number, batch)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
        return state.seen, session.size()

    return loop(state)


def train_without_its_store(folder: str, store: str):
    """Take a step, remove the published commits, and kill the rank, as long as there is a commit to remove."""
    session.init()
    state = ObjectState(step=0, total=0.0)

    @run
    def loop(state):
        take_step(state, folder)
        shutil.rmtree(store)
        return kill()

    return loop(state)


def train_beyond_a_published_commit(folder: str, store: str):
    """Take eight steps; after the fifth, kill the only rank once its first commit is in the Store."""
    return kill_once_after(5, 8, folder, lambda: wait_for(lambda: any(Path(store).rglob("commit-00000001-0000000001"))))


def train_with_a_blocked_store(folder: str, obstacle: str):
    """Take four steps; after the second, end the blockade of the Store and kill the only rank."""
    return kill_once_after(2, 4, folder, Path(obstacle).unlink)


def kill_once_after(step: int, steps: int, folder: str, before: Callable[[], None]):
    """Take steps; after one of them, once, call ``before`` and kill the only rank."""
    session.init()
    state = ObjectState(step=0, total=0.0)

    @run
    def loop(state):
        while state.step < steps:
            take_step(state, folder)
            if state.step == step and once(folder, "killed"):
                before()
                kill()
        return state.step, state.total

    return loop(state)
