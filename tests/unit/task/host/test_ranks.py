from __future__ import annotations

import os
import time
from contextlib import ExitStack

import cloudpickle
import psutil
import pytest

from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError
from sparkhvd.task.assignment import TaskOffer, assign
from sparkhvd.task.host.ranks import run_ranks
from sparkhvd.task.job import Job
from sparkhvd.task.rank import JobPlan, worker_spec
from sparkhvd.task.supervision import ServerLost
from sparkhvd.task.worker.output import DriverLog
from sparkhvd.task.worker.process import WorkerProcess, spawn_worker

TOKEN = b"t" * 32


def stay(*ranks: str) -> None:
    if os.environ["SPARKHVD_RANK"] in ranks:
        time.sleep(600)


@pytest.fixture
def job(request):
    """Provide the plan of a job of two ranks, its server, and its workers; the ranks in the parameter never return."""
    work = Job(cloudpickle.dumps((stay, request.param, {})), 2)
    with ExitStack() as stack:
        server = stack.enter_context(RendezvousServer(TOKEN))
        slots = tuple(assign([TaskOffer(index, "key", "node-1", "127.0.0.1") for index in range(2)]))
        plan = JobPlan(slots, (("127.0.0.1", server.port),), TOKEN)
        workers = {}
        for rank, slot in enumerate(slots):
            worker = WorkerProcess(spawn_worker({}, {}, ()), DriverLog(work))
            stack.callback(worker.close)
            worker.output.start()
            worker.send(worker_spec(work, plan, slot))
            workers[rank] = worker
        yield plan, server, workers


@pytest.mark.parametrize("job", [("0", "1"), ("1",)], ids=["running", "returned"], indirect=True)
def test_the_loss_of_one_ranks_supervision_ends_the_others(job):
    plan, _, workers = job
    workers[1].events.put(ServerLost("no route"))
    with pytest.raises(LaunchError, match=r"Rank 1 on host node-1 was lost: .*no route"):
        run_ranks(plan, workers, Deadline.after(60.0), parent=0)
    assert not [worker.pid for worker in workers.values() if psutil.pid_exists(worker.pid)]


@pytest.mark.parametrize("job", [("0", "1")], ids=["running"], indirect=True)
def test_the_ranks_end_even_if_the_rendezvous_has_ended(job):
    plan, server, workers = job
    server.close()
    with pytest.raises(LaunchError, match=r"Rank \d on host node-1 was lost"):
        run_ranks(plan, workers, Deadline.after(60.0), parent=0)
    assert not [worker.pid for worker in workers.values() if psutil.pid_exists(worker.pid)]
