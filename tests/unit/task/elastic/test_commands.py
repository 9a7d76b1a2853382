"""Commands to a process that holds slots; its workers cannot start, because their Python does not exist."""

from __future__ import annotations

import queue

from sparkhvd.comm.connect.launch_context import MembershipAddress
from sparkhvd.rpc.messages import EndLease, SetRank, StartWorker, StopWorker
from sparkhvd.task.elastic.commands import DriverLost, carry_out_commands
from sparkhvd.task.elastic.worker import Lost, RunningWorkers, WorkerLocation
from sparkhvd.task.failure_report import STARTING, FailureReport
from sparkhvd.task.job import Job
from sparkhvd.task.worker.output import HandlerLog

LOCATION = WorkerLocation("key", "node1", "127.0.0.1")


def outcome(*commands, is_orphaned=lambda: False):
    """Run the commands; return the loss of the driver, the losses of workers, and the number of unread commands."""
    pending, ends = queue.SimpleQueue(), []
    for command in commands:
        pending.put(command)
    job = Job(b"", 1, executable="/no/such/python")
    workers = RunningWorkers(job, MembershipAddress(-1, (), b""), 1, lambda: HandlerLog(lambda _: None, 1), ends.append)
    lost = carry_out_commands(workers, LOCATION, pending, is_orphaned)
    assert workers.close(1.0) == []
    return lost, ends, pending.qsize()


def test_a_worker_that_cannot_start_is_reported_and_the_process_waits_for_the_next_command():
    lost, ends, remaining = outcome(StartWorker(3), SetRank(3, 0), StopWorker(3), StartWorker(4), EndLease())
    reason = "did not start: No such file or directory"
    assert ends == [Lost(worker, FailureReport(worker, "node1", reason, phase=STARTING)) for worker in (3, 4)]
    assert (lost, remaining) == (None, 0)


def test_no_command_is_executed_after_the_end_of_the_lease_or_the_loss_of_the_driver():
    assert outcome(EndLease(), StartWorker(1)) == (None, [], 1)
    assert outcome(DriverLost("unplugged"), StartWorker(1)) == (DriverLost("unplugged"), [], 1)


def test_an_orphaned_process_does_not_wait_for_commands():
    assert outcome(StartWorker(1), is_orphaned=lambda: True) == (None, [], 1)
    answers = iter([False, True])
    assert outcome(is_orphaned=lambda: next(answers)) == (None, [], 0)
