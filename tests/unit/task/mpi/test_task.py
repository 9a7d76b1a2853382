from __future__ import annotations

import pytest

from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.client import connect
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.rpc.server import Server
from sparkhvd.task.assignment import assign
from sparkhvd.task.mpi import task
from sparkhvd.task.mpi.service import TaskService
from sparkhvd.task.task_info import TaskInfo

SECRET = b"s" * 32


@pytest.mark.parametrize(
    ("started", "sentence"),
    [
        ([], "Rank 0 on host one did not start in time: mpirun started no ranks on this host"),
        ([0], "Rank 1 on host one did not start in time: mpirun started 1 of the 3 ranks of this host"),
        ([1, 0], "Rank 2 on host one did not start in time: mpirun started 2 of the 3 ranks of this host"),
        (
            [2, 0, 1],
            "Not all ranks started in time: mpirun started the ranks of host one, but not of all other hosts.",
        ),
    ],
)
def test_the_failure_of_a_host_counts_the_ranks_that_mpirun_started(started, sentence):
    slots = assign([TaskOffer(index, "key", "one", "") for index in range(3)])
    assert task.missing_ranks(slots, started).sentence() == sentence


def test_a_task_reports_the_loss_of_the_driver_before_the_ranks_are_assigned(monkeypatch):
    monkeypatch.setattr(task, "_DRIVER_CHECK_SECONDS", 0.01)
    service = TaskService(SECRET)
    with Server(SECRET, service, "127.0.0.1", name="driver") as server:
        driver = connect([("127.0.0.1", server.port)], SECRET, Deadline.after(30.0))
    try:
        with pytest.raises(
            LaunchError, match=r"Task 1 on host one lost the driver before it assigned .*[^.]\. See the"
        ):
            task._await_plan(driver, service, TaskInfo(1, ("zero", "one"), 1))
    finally:
        driver.close()
        service.close()
