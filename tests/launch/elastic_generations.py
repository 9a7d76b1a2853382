"""Elastic jobs whose ranks change many times: what survives must not grow.

python -m tests.launch.elastic_generations FOLDER GENERATIONS {reset|kill} {local|spark} [FRAMEWORK]
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import psutil

import sparkhvd
from sparkhvd.comm import session
from sparkhvd.comm.elastic import loop
from sparkhvd.comm.elastic.state import ObjectState, State
from sparkhvd.driver.elastic.membership_server import MembershipServer
from sparkhvd.errors import HorovodInternalError
from tests.launch.elastic_training import kill
from tests.waiting import happens, wait_for

NUM_PROC = 2
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Resources:
    """The resources of one process at one time.

    Attributes:
        descriptors: the number of its open descriptors.
        threads: the number of its threads.
        memory: its resident memory in bytes.
    """

    descriptors: int
    threads: int
    memory: int

    def __str__(self) -> str:
        return f"{self.descriptors} descriptors, {self.threads} threads, {self.memory / MEGABYTE:.1f} MiB"


@dataclass(frozen=True)
class Sample:
    """The resources of a job's processes in one generation; each worker of the job but rank 0 is lost again and again.

    Attributes:
        generation: the number of the generation.
        rank: rank 0, which survives.
        parent: the parent of rank 0, which starts the workers of one host.
        driver: the driver.
    """

    generation: int
    rank: Resources
    parent: Resources
    driver: Resources


def _resources(pid: int) -> Resources:
    process = psutil.Process(pid)
    return Resources(process.num_fds(), process.num_threads(), process.memory_info().rss)


def outlast(folder: str, generations: tuple[int, ...], how: str, framework: str) -> list[Sample]:
    """Train; every complete generation ends because rank 1 is killed or fails in a collective.

    Args:
        folder: where rank 0 asks the driver for its resources.
        generations: the numbers of the generations to sample; the job ends with the last one.
        how: how rank 1 fails: "kill" or "reset".
        framework: the framework of the state and of the step.

    Returns:
        The samples of rank 0.
    """
    print("starts", flush=True)
    session.init()
    run, state, step = _TRAININGS[framework]()
    samples: list[Sample] = []

    @run
    def train(state: State) -> list[Sample]:
        while True:
            step()
            state.commit()
            if session.size() < NUM_PROC:
                continue
            membership = session.membership()
            assert membership is not None
            number = membership.generation
            due = next((one for one in generations if one > state.sampled), 0)
            if number >= due:
                state.sampled = max(one for one in generations if one <= number)
                if session.rank() == 0:
                    samples.append(_sample(Path(folder), number))
                state.commit()
            if number >= generations[-1]:
                return samples
            if session.rank() == 1:
                if how == "kill":
                    kill()
                raise HorovodInternalError("this rank fails")

    return train(state)


def _sample(folder: Path, number: int) -> Sample:
    gc.collect()  # an interrupted ``model.fit`` keeps its threads until then
    (folder / f"sample-{number}").touch()
    answer = folder / f"driver-{number}"
    wait_for(lambda: answer.exists() and bool(answer.read_text()))
    driver = Resources(*json.loads(answer.read_text()))
    return Sample(number, _resources(os.getpid()), _resources(os.getppid()), driver)


def _numpy_training():
    def step() -> None:
        session.current().allreduce(np.ones(1000), name="step")

    return loop.run, ObjectState(sampled=0), step


def _torch_training():
    import torch  # noqa: PLC0415 - only some ranks need it

    import sparkhvd.torch as hvd  # noqa: PLC0415

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(64))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()

    return hvd.elastic.run, hvd.elastic.TorchState(model, optimizer, sampler=sampler, sampled=0), step


def _keras_training():
    import keras  # noqa: PLC0415

    import sparkhvd.keras as hvd  # noqa: PLC0415

    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    rows = np.ones((4, 100), np.float32), np.ones((4, 1), np.float32)
    model.fit(*rows, epochs=1, verbose=0)

    def step() -> None:
        model.fit(*rows, epochs=1, verbose=0)

    return hvd.elastic.run, hvd.elastic.KerasState(model, sampled=0), step


_TRAININGS = {"numpy": _numpy_training, "torch": _torch_training, "keras": _keras_training}


def changing(
    folder: Path, generations: tuple[int, ...], how: str, framework: str = "numpy", **options: object
) -> tuple[list[Sample], int]:
    """Run a job that has many generations.

    Args:
        folder: an empty folder.
        generations: see ``outlast``.
        how: see ``outlast``.
        framework: see ``outlast``.
        **options: of ``run_elastic``, for the launcher.

    Returns:
        The samples, and the number of keys in the membership server at the end.
    """
    keys: list[int] = []
    close = MembershipServer.close

    def counting_close(server: MembershipServer) -> None:
        keys.append(server._server.erase(""))
        close(server)

    with mock.patch.object(MembershipServer, "close", counting_close), _answering(folder):
        results = sparkhvd.run_elastic(
            outlast,
            (str(folder), generations, how, framework),
            num_proc=NUM_PROC,
            min_num_proc=1,
            start_timeout=200,
            elastic_timeout=200,
            cooldown_range=(0.05, 0.05),
            verbose=0,
            output_filename=str(folder / "output"),
            **options,
        )
    return results[0], keys[0]


@contextlib.contextmanager
def _answering(folder: Path) -> Iterator[None]:
    """Answer the requests for the driver's resources, until the block ends."""
    ended = threading.Event()

    def answer() -> None:
        while not ended.is_set():
            for path in folder.glob("sample-*"):
                path.unlink()
                number = path.name.removeprefix("sample-")
                (folder / f"driver-{number}").write_text(json.dumps(astuple(_resources(os.getpid()))))
            happens(ended.is_set, 0.1)

    thread = threading.Thread(target=answer, name="answers to samples")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main(folder: Path, last: int, how: str, launcher: str, framework: str) -> None:
    options: dict[str, object] = {"launcher": "local"}
    if launcher == "spark":
        from pyspark.sql import SparkSession  # noqa: PLC0415

        builder = SparkSession.builder.master(f"local[{NUM_PROC}]").config("spark.ui.enabled", "false")
        options = {"spark": builder.config("spark.log.level", "ERROR").getOrCreate()}
    generations = tuple(dict.fromkeys(max(1, last * part // 10) for part in range(1, 11)))
    samples, keys = changing(folder, generations, how, framework, **options)
    for sample in samples:
        print(
            f"generation {sample.generation}: rank 0: {sample.rank}; parent: {sample.parent}; driver: {sample.driver}"
        )
    print(f"keys at the end: {keys}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], *(sys.argv[5:] or ["numpy"]))
