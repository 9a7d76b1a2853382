"""A failure that every attempt would repeat is reported after the first attempt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sparkhvd
from sparkhvd.errors import LaunchError
from sparkhvd.task.main import run_task
from sparkhvd.task.mpi.task import run_mpi_task

pytestmark = pytest.mark.spark

NO_PYTHON = "on host 127.0.0.1 did not start: executable='/no/python' cannot be executed on this host: "
NO_NETWORK = "None of the network interfaces ['bogus0'] has an address on host 127.0.0.1; its interfaces are ["


def counted(folder: Path, task: Callable[..., Iterator], job: object, batches: Iterator) -> Iterator:
    """Run a task, and leave one file per attempt."""
    from pyspark import TaskContext  # noqa: PLC0415 - only in Spark's tasks

    (folder / str(TaskContext.get().taskAttemptId())).touch()
    yield from task(job, batches)


@pytest.mark.parametrize(
    ("launcher", "task", "arguments", "words"),
    [
        ("barrier", run_task, {"executable": "/no/python"}, NO_PYTHON),
        ("mpi", run_mpi_task, {"nics": ["bogus0"]}, NO_NETWORK),
        pytest.param("barrier", run_task, {"nics": ["bogus0"]}, NO_NETWORK, marks=pytest.mark.soak),
        pytest.param("mpi", run_mpi_task, {"executable": "/no/python"}, NO_PYTHON, marks=pytest.mark.soak),
    ],
    ids=["barrier, no Python", "mpi, no network", "barrier, no network", "mpi, no Python"],
)
def test_a_failure_that_would_repeat_is_not_retried(spark, tmp_path, monkeypatch, launcher, task, arguments, words):  # noqa: PLR0917
    name = f"sparkhvd.driver.launchers.{launcher}.{task.__name__}"
    monkeypatch.setattr(name, functools.partial(counted, tmp_path, task))
    with pytest.raises(LaunchError) as caught:
        sparkhvd.run((tmp_path / "fn ran").touch, num_proc=2, launcher=launcher, spark=spark, **arguments)
    assert words in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2, "both tasks ran once, and fn did not"
