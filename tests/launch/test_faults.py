"""The faults that every test run injects; the endurance run, ``bench.soak``, injects all faults of the matrix."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from sparkhvd.config import Config
from sparkhvd.errors import LaunchError
from sparkhvd.task.all_gather import all_gather
from sparkhvd.task.job import Job
from sparkhvd.task.task_info import current_task_info
from tests.launch.faults import FAULTS, complaints, inject, ports_taken
from tests.launch.hosts import why_not
from tests.launch.losses import DRIVER_FAULTS, lost_driver
from tests.waiting import happens

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.always], ids=lambda fault: fault.name)
def test_the_driver_reports_the_failure_soon_and_leaves_nothing_behind(fault, spark, tmp_path):
    assert complaints(fault, inject(fault, tmp_path, spark)) == []


def gather_alone(waited: Path, _batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Start ``all_gather`` in task 0; task 1 never calls it."""
    task, messages = current_task_info(), []
    if task.index == 0:
        try:
            all_gather("here", Job(b"", 2, config=Config(start_timeout=1.0)), task)
        except LaunchError as error:
            messages.append(str(error))
        waited.touch()
    assert happens(waited.exists, 60.0)
    yield pa.RecordBatch.from_pydict({"message": messages})


def test_without_a_driver_connection_a_task_waits_for_a_missing_task_until_the_timeout(spark, tmp_path):
    task = functools.partial(gather_alone, tmp_path / "waited")
    rows = spark.range(2, numPartitions=2).mapInArrow(task, "message string", barrier=True).collect()
    assert len(rows) == 1
    assert "Task 0 on host" in rows[0].message
    assert "waited start_timeout=1 s for the other tasks of this job" in rows[0].message


def test_a_job_whose_driver_is_killed_leaves_no_processes(tmp_path):
    fault = next(one for one in DRIVER_FAULTS if one.name == "driver killed, in mid-training, mpi")
    assert lost_driver(fault, tmp_path)[2] == []


def test_a_host_without_a_free_port_fails_only_the_jobs_that_need_one(tmp_path):
    if why_not():
        pytest.skip(why_not())
    found = ports_taken(tmp_path)
    assert {name: complained for name, (_, _, complained) in found.items() if complained} == {}
    assert len(found) == 3
