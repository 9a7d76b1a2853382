"""Measure elastic jobs on this machine: the loss of a rank, a rank that joins, commits, and the steps in between.

    python -m bench.elastic [--rounds 5] [--ranks 3] [--megabytes 1 100]

For the loss of a rank, sparkhvd takes turns with ``torchrun``, which restarts all ranks from a checkpoint. All ranks
are on this machine, so new ranks compete with the others for its cores while they import torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import sparkhvd
from bench import machine
from sparkhvd.comm import session
from sparkhvd.comm.elastic.loop import run

_LOST_AT = 20
_MORE_STEPS = 30
_WIDTH = 256
_SAVE_EVERY = 10
_MOST_SECONDS = 300.0


def main() -> int:
    options = _options()
    os.environ.pop("SPARKHVD_WARM_SECONDS", None)  # every rank imports torch, as under torchrun
    print(machine.describe())
    with tempfile.TemporaryDirectory(prefix="bench-elastic-") as name:
        folder = Path(name)
        _compare_losses(folder, options.ranks, options.rounds)
        _measure_joins(folder, options.megabytes, options.rounds)
        _measure_commits(options.rounds)
        _compare_steps(options.rounds)
    print(f"\n{machine.load()}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=3, help="ranks of the jobs that lose a rank")
    parser.add_argument(
        "--megabytes", type=int, nargs="*", default=[1, 100, 400], help="sizes of the state when a rank joins"
    )
    return parser.parse_args()


# ---- the loss of a rank


@dataclass(frozen=True)
class Step:
    """A completed step: its time, the number of ranks, and the number of restarts before it."""

    seconds: float
    size: int
    restarts: int


def _compare_losses(folder: Path, ranks: int, rounds: int) -> None:
    turns: dict[str, Callable[[Path], None]] = {
        "sparkhvd": lambda subfolder: _lose_with_sparkhvd(subfolder, ranks),
        "torchrun": lambda subfolder: _lose_with_torchrun(subfolder, ranks),
    }
    next_step: dict[str, list[float]] = {name: [] for name in turns}
    complete: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        for name, turn in turns.items():
            subfolder = folder / f"loss-{name}-{number}"
            subfolder.mkdir()
            turn(subfolder)
            killed = float((subfolder / "killed").read_text())
            after = [step for step in steps_in(subfolder) if step.seconds > killed]
            changed = [step.seconds for step in after if step.size < ranks or step.restarts > 0]
            next_step[name].append(min(changed) - killed)
            complete[name].append(
                min(s.seconds for s in after if s.size == ranks and s.seconds >= min(changed)) - killed
            )
    _table(f"kill -9 of one of {ranks} ranks to the next completed step: seconds", next_step)
    _ratio("torchrun", next_step)
    _table(f"to the next step with {ranks} ranks again: seconds", complete)
    _ratio("torchrun", complete)


def steps_in(folder: Path) -> Iterator[Step]:
    for path in folder.glob("steps-*"):
        for line in path.read_text().splitlines():
            seconds, size, restarts = line.split()
            yield Step(float(seconds), int(size), int(restarts))


def _lose_with_sparkhvd(folder: Path, ranks: int) -> None:
    sparkhvd.run_elastic(
        _train_until_lost, (str(folder), ranks), num_proc=ranks, min_num_proc=1, launcher="local", verbose=0
    )


def _train_until_lost(path: str, ranks: int) -> None:
    """Train until the job has lost a rank and has all ranks again."""
    import torch  # noqa: PLC0415  (heavy)

    import sparkhvd.torch as hvd  # noqa: PLC0415  (imports torch)

    folder = Path(path)
    model, features, labels = _problem()
    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, left=-1)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if state.left < 0 and (folder / "killed").exists() and hvd.size() == ranks:
            state.left = _MORE_STEPS
        while state.left != 0:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features), labels).backward()
            optimizer.step()
            state.step += 1
            state.left -= state.left > 0
            note_step(folder, hvd.size(), 0)
            if state.step % _SAVE_EVERY == 0:
                state.commit()
            _kill_once(folder, state.step, hvd.rank())

    loop(state)


def _lose_with_torchrun(folder: Path, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "1", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["-m", "bench.elastic_torchrun", "elastic"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",  # like the ranks of sparkhvd here, which have fewer than two cores each
        "GLOO_SOCKET_IFNAME": "lo",
        # The agent's store keeps the addresses of the killed ranks, with which gloo never reconnects (torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    result = subprocess.run(
        [*command, str(folder)], check=False, env=environment, capture_output=True, text=True, timeout=_MOST_SECONDS
    )
    if result.returncode != 0:
        raise RuntimeError(f"torchrun failed: {result.stderr[-2000:]}")


def train_with_torchrun(path: str) -> None:
    """Train as one rank of torchrun: the same model and steps, with checkpoint files in place of commits."""
    import torch  # noqa: PLC0415  (heavy)
    import torch.distributed as dist  # noqa: PLC0415

    folder = Path(path)
    checkpoint = folder / "checkpoint.pt"
    model, features, labels = _problem()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3, momentum=0.9)
    step = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    end = step + _MORE_STEPS if restarts else 10**9
    while step < end:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(features), labels).backward()
        optimizer.step()
        step += 1
        note_step(folder, dist.get_world_size(), restarts)
        if step % _SAVE_EVERY == 0 and dist.get_rank() == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{checkpoint}~"
            )
            Path(f"{checkpoint}~").replace(checkpoint)
        _kill_once(folder, step, dist.get_rank())
    dist.destroy_process_group()


def _problem() -> tuple[Any, Any, Any]:
    """Return a small model and a batch that are the same in all processes."""
    import torch  # noqa: PLC0415  (heavy)

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.randn(32, _WIDTH), torch.randn(32, _WIDTH)


def note_step(folder: Path, size: int, restarts: int) -> None:
    with (folder / f"steps-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(f"{time.monotonic()} {size} {restarts}\n")


def _kill_once(folder: Path, step: int, rank: int) -> None:
    if step >= _LOST_AT and rank == 1 and not (folder / "killed").exists():
        (folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


# ---- a rank that joins


def _measure_joins(folder: Path, megabytes: Sequence[int], rounds: int) -> None:
    for size in megabytes:
        times: dict[str, list[float]] = {"stop": [], "transfer of the state": [], "the rest": []}
        for number in range(rounds):
            local = {"localhost": 1}, {"localhost": 2}
            stop, transfer = join_once(folder / f"join-{size}-{number}", size, *local, launcher="local")
            for name, seconds in zip(times, (stop, transfer, max(0.0, stop - transfer)), strict=True):
                times[name].append(seconds)
        _table(f"a rank joins another, state of {size} MB: seconds between two steps of the old rank", times)


def join_once(
    folder: Path, megabytes: int, before: Mapping[str, int], after: Mapping[str, int], **options: Any
) -> tuple[float, float]:
    """Let a rank join another, and return the seconds that this one stopped, and those of a broadcast of the state.

    Args:
        folder: a folder to create.
        megabytes: the size of the state.
        before: the slots by host until the first rank trains.
        after: the slots from then on.
        options: further arguments of ``run_elastic``.
    """
    folder.mkdir()
    times, _ = sparkhvd.run_elastic(
        _train_until_joined,
        (str(folder), megabytes),
        num_proc=1,
        max_num_proc=2,
        discovery=lambda: after if (folder / "begun").exists() else before,
        verbose=0,
        **options,
    )
    return float(times[0]), float(times[1])


def _train_until_joined(folder: str, megabytes: int) -> tuple[float, float]:
    """Return the seconds that the old rank stopped, and the seconds of a broadcast of the same size."""
    import torch  # noqa: PLC0415  (heavy)

    import sparkhvd.torch as hvd  # noqa: PLC0415  (imports torch)

    model = _large_model(megabytes)
    hvd.init()
    state = hvd.elastic.TorchState(model, step=0)
    last = [time.monotonic()]

    @hvd.elastic.run
    def loop(state: Any) -> float:
        stop = time.monotonic() - last[0]
        while hvd.size() == 1:
            hvd.allreduce(torch.ones(1), name="step")
            state.step += 1
            Path(folder, "begun").touch()
            time.sleep(0.01)
            last[0] = time.monotonic()
            state.check_host_updates()
        hvd.allreduce(torch.ones(1), name="step")
        return stop

    stop = loop(state)
    times = []
    for _ in range(3):
        hvd.barrier()
        begin = time.perf_counter()
        hvd.broadcast_parameters(model.state_dict())
        times.append(time.perf_counter() - begin)
    return stop, statistics.median(times)


def _large_model(megabytes: int) -> Any:
    import torch  # noqa: PLC0415  (heavy)

    side = 512  # each parameter has one MB
    return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(side, side)) for _ in range(megabytes)])


# ---- commits


def _measure_commits(rounds: int) -> None:
    for framework, ranks in (("torch", 1), ("torch", 2), ("tensorflow", 1)):
        arguments = framework, 100, 5 * rounds
        times = sparkhvd.run_elastic(_time_commits, arguments, num_proc=ranks, launcher="local", verbose=0)[0]
        copies = {"commit()": times["commit"], "one copy of its memory": times["copy"]}
        _table(f"{ranks} ranks, a {framework} model of 100 MB: seconds", copies)
        _ratio("one copy of its memory", copies)
        calls = {"check_host_updates()": times["check"], "allreduce of one number": times["allreduce"]}
        _table(f"{ranks} ranks: microseconds for a call, means of 500", calls)


def _time_commits(framework: str, megabytes: int, rounds: int) -> Mapping[str, list[float]]:
    """Return the times of commits and copies, which take turns, and of calls that move no state."""
    session.init()
    state, copy = (_torch_state if framework == "torch" else _tensorflow_state)(megabytes)
    one = np.ones(1)

    def many(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        for _ in range(500):
            call()
        return (time.perf_counter() - begin) / 500 * 1e6

    def timed(call: Callable[[], object]) -> float:
        session.current().barrier()
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    @run
    def loop(state: Any) -> Mapping[str, list[float]]:
        communicator = session.current()
        times: dict[str, list[float]] = {"commit": [], "copy": [], "check": [], "allreduce": []}
        timed(state.commit)
        timed(copy)
        turns = {"commit": state.commit, "copy": copy}
        for _ in range(rounds):
            for name, turn in turns.items():
                times[name].append(timed(turn))
            turns = dict(reversed(turns.items()))  # the second one finds more of the state in the caches
            times["check"].append(many(state.check_host_updates))
            times["allreduce"].append(many(lambda: communicator.allreduce(one, name="one")))
        return times

    return loop(state)


def _torch_state(megabytes: int) -> tuple[Any, Callable[[], None]]:
    """Return a state, and a function that copies its memory once."""
    import torch  # noqa: PLC0415  (heavy)

    import sparkhvd.torch as hvd  # noqa: PLC0415  (imports torch)

    model = _large_model(megabytes)
    target = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def copy() -> None:
        with torch.no_grad():
            for to, parameter in zip(target, model.parameters(), strict=True):
                to.copy_(parameter)

    return hvd.elastic.TorchState(model, step=0), copy


def _tensorflow_state(megabytes: int) -> tuple[Any, Callable[[], None]]:
    """Return a state, and a function that copies its memory once."""
    import tensorflow as tf  # noqa: PLC0415  (heavy)

    from sparkhvd.tensorflow import elastic  # noqa: PLC0415  (imports TensorFlow)

    variables = [tf.Variable(tf.random.normal((512, 512))) for _ in range(megabytes)]
    sources = [np.asarray(tf.convert_to_tensor(variable)) for variable in variables]
    target = [np.zeros_like(source) for source in sources]

    def copy() -> None:
        for to, source in zip(target, sources, strict=True):
            np.copyto(to, source)

    return elastic.TensorFlowState(variables, step=0), copy


# ---- the steps in between


def _compare_steps(rounds: int) -> None:
    options = {"num_proc": 2, "launcher": "local", "verbose": 0}
    turns: dict[str, Callable[[], list[float]]] = {
        "elastic job": lambda: sparkhvd.run_elastic(_time_steps, (600, True), min_num_proc=1, **options)[0],
        "fixed job": lambda: sparkhvd.run(_time_steps, (600, False), **options)[0],
    }
    times: dict[str, list[float]] = {name: [] for name in turns}
    inside: dict[str, list[float]] = {"with commits": [], "without": []}
    for _ in range(rounds):
        for name, turn in turns.items():
            plain, elastic = turn()
            times[name].append(elastic if name == "elastic job" else plain)
            if name == "elastic job":
                inside["with commits"].append(elastic)
                inside["without"].append(plain)
    about = f"2 ranks, milliseconds for a step, a commit every {_SAVE_EVERY} in the elastic job"
    _table(f"{about}: jobs in turns", times)
    _ratio("fixed job", times)
    _table(f"{about}: blocks of 20 steps of that job in turns", inside)
    _ratio("without", inside)


def _time_steps(steps: int, is_elastic: bool) -> list[float]:
    """Return the median milliseconds of a step without commits and with commits."""
    import torch  # noqa: PLC0415  (heavy)

    import sparkhvd.torch as hvd  # noqa: PLC0415  (imports torch)

    model, features, labels = _problem()
    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def train(number: int, commits: bool) -> float:
        begin = time.perf_counter()
        for index in range(number):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(features), labels).backward()
            optimizer.step()
            if commits and index % _SAVE_EVERY == 0:
                state.commit()
        return (time.perf_counter() - begin) / number * 1e3

    @hvd.elastic.run
    def loop(_: Any) -> list[float]:
        train(20, is_elastic)
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(steps // 20):
            for commits, seconds in times.items():
                seconds.append(train(20, commits and is_elastic))
        return [statistics.median(times[False]), statistics.median(times[True])]

    return loop(state)


# ---- output


def _table(title: str, rows: Mapping[str, Sequence[float]]) -> None:
    print(f"\n{title}, median (least to most) of {len(next(iter(rows.values())))}")
    for name, values in rows.items():
        print(f"  {name:<40} {statistics.median(values):9.3f} ({min(values):.3f} to {max(values):.3f})", flush=True)


def _ratio(peer: str, rows: Mapping[str, Sequence[float]]) -> None:
    """Print the ratio of the other medians to that of ``peer``, and of the shortest times."""
    for name, values in rows.items():
        if name != peer:
            median, least = statistics.median(values) / statistics.median(rows[peer]), min(values) / min(rows[peer])
            print(f"  {name} / {peer}: {median:.2f} (of the shortest: {least:.2f})", flush=True)


if __name__ == "__main__":
    sys.exit(main())
