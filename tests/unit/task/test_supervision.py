from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient, RendezvousServer
from sparkhvd.comm.stall.stragglers import Straggler, publish_straggler
from sparkhvd.config import Config
from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, PeerLostError
from sparkhvd.task import supervision as supervising
from sparkhvd.task.failure_report import LAUNCH, NOT_STARTED, FailureReport
from sparkhvd.task.job import Job
from sparkhvd.task.supervision import (
    OUTCOME,
    Outcome,
    ServerLost,
    Supervision,
    await_outcome,
    finished_key,
    left_key,
    publish_outcome,
    size_failure,
    supervise,
    wait_for_leave,
    watch_outcome,
)
from sparkhvd.task.worker.output import DriverLog, HandlerLog
from sparkhvd.task.worker.process import OUTPUT_SECONDS, WorkerProcess, spawn_worker
from sparkhvd.task.worker.spec import Ready, WorkerSpec

TOKEN = b"t" * 32


def test_the_processes_of_a_failed_job_end_within_five_seconds():
    assert supervising.GRACE_SECONDS + supervising.TERM_SECONDS + OUTPUT_SECONDS < 5.0


def test_a_job_refused_by_a_task_fails_with_the_tasks_reason(worker, client):
    refused = FailureReport(1, "node-4", "Ranks must all run on GPUs or all on CPUs.", kind=LAUNCH)
    worker.events.put(refused)
    ended = supervise(worker, supervision(client))
    assert isinstance(ended, Outcome)
    assert ended.failure == refused
    assert not psutil.pid_exists(worker.pid)


def ignore_sigterm_and_stay(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.fixture
def worker():
    process = WorkerProcess(spawn_worker({}, {}, ()), DriverLog(Job(b"", 2)))
    process.output.start()
    yield process
    process.close()


@pytest.fixture
def client():
    with (
        RendezvousServer(TOKEN) as server,
        RendezvousClient([("127.0.0.1", server.port)], TOKEN, Deadline.after(30.0)) as connected,
    ):
        yield connected


def supervision(client, start_seconds: float = 60.0) -> Supervision:
    return Supervision(1, "node-4", client, Deadline.after(start_seconds), ("node-3", "node-4"))


def start(worker, fn, *args, result_seconds: float = 60.0) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        payload = cloudpickle.dumps((fn, args, {}))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    context = LaunchContext(config=Config(result_timeout=result_seconds))
    worker.send(WorkerSpec(context, payload, (("SPARKHVD_LOG_LEVEL", "20"),), None))


def start_stubborn_rank(worker, path) -> psutil.Process:
    start(worker, ignore_sigterm_and_stay, str(path))
    assert worker.events.get(timeout=60.0) == Ready()
    while not (path.exists() and path.read_text()):
        with pytest.raises(queue.Empty):
            worker.events.get(timeout=0.05)
    return psutil.Process(int(path.read_text()))


def test_another_ranks_failure_ends_a_sleeping_rank_that_ignores_sigterm(worker, client, tmp_path):
    process = start_stubborn_rank(worker, tmp_path / "pid")
    failure = Outcome(FailureReport(0, "node-3", "raised ValueError: bad"))
    worker.events.put(failure)
    assert supervise(worker, supervision(client)) == failure
    assert not process.is_running()


def test_the_loss_of_the_first_task_ends_the_rank_and_lets_spark_run_the_job_again(worker, client, tmp_path):
    process = start_stubborn_rank(worker, tmp_path / "pid")
    worker.events.put(ServerLost("connection reset"))
    with pytest.raises(
        LaunchError, match=r"Rank 1 on host node-4 lost the server .*: connection reset\. The server runs"
    ):
        supervise(worker, supervision(client))
    assert not process.is_running()
    worker.events.put(ServerLost("connection reset"))
    with pytest.raises(LaunchError, match="connection reset"):
        await_outcome(worker.events, supervision(client))


def test_a_worker_that_does_not_become_ready_is_reported_by_all_tasks(worker, client):
    outcome = supervise(worker, supervision(client, start_seconds=0.0))  # it waits for its spec, which is never sent
    assert outcome.failure is not None
    assert (outcome.failure.kind, outcome.failure.rank) == (NOT_STARTED, 1)
    assert FailureReport.from_json(client.get(OUTCOME, Deadline.after(30.0))) == outcome.failure


def lose_a_peer() -> None:
    raise PeerLostError("stalled")


def test_a_straggler_is_reported_once_the_waiting_ranks_have_named_it(worker, client, monkeypatch):
    monkeypatch.setattr(supervising, "_SECONDARY_SECONDS", 0.0)
    publish_straggler(client, Straggler(0, "barrier 'b' not done after 9 s", joined=True, stack="in hang"))
    start(worker, lose_a_peer)
    failure = supervise(worker, supervision(client)).failure
    assert failure is not None
    assert (failure.rank, failure.host, failure.traceback) == (0, "node-3", "in hang")
    assert failure.sentence() == (
        "Rank 0 on host node-3 held up the other ranks (in fn, after init()): barrier 'b' not done after 9 s"
    )


class NeverPacked:
    def __reduce__(self):
        while True:
            pass


def return_a_result_that_is_never_packed() -> object:
    return NeverPacked()


def test_a_hanging_serialization_of_the_result_is_reported_with_its_stack(worker, client):
    start(worker, return_a_result_that_is_never_packed, result_seconds=1.0)
    failure = supervise(worker, supervision(client)).failure
    assert failure is not None
    assert failure.sentence().startswith("Rank 1 on host node-4 did not deliver the result of fn within 1 s")
    assert "in __reduce__" in failure.stderr_tail
    assert FailureReport.from_json(client.get(OUTCOME, Deadline.after(30.0))) == failure
    assert not psutil.pid_exists(worker.pid)


def return_and_stay() -> str:
    threading.Thread(target=time.sleep, args=(600.0,)).start()
    return "done"


def test_a_process_that_does_not_end_after_its_result_is_killed_and_its_stderr_has_the_reason(client, monkeypatch):
    monkeypatch.setattr(supervising, "EXIT_SECONDS", 1.0)
    written: list[str] = []
    log = HandlerLog(lambda message: written.append(message.content.decode()), 2)
    worker = WorkerProcess(spawn_worker({}, {}, ()), log)
    worker.output.start()
    start(worker, return_and_stay)
    assert cloudpickle.loads(supervise(worker, supervision(client))) == "done"
    assert not psutil.pid_exists(worker.pid)
    assert "in _shutdown" in "\n".join(written), "the stack of the thread that waits"
    assert "Rank 1 on host node-4 returned, but its process did not end within 1 s and was killed" in written[-1]


def test_the_end_of_the_server_is_an_event():
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    with RendezvousServer(TOKEN) as server:
        listening = RendezvousClient([("127.0.0.1", server.port)], TOKEN, Deadline.after(30.0))
        watcher = watch_outcome(listening, events)
    assert isinstance(events.get(timeout=60), ServerLost)
    watcher.join()
    listening.close()


@pytest.mark.parametrize("size", [2, 300])
def test_the_end_of_a_job_costs_its_first_task_a_constant_number_of_requests(size, caplog):
    with (
        RendezvousServer(TOKEN) as server,
        RendezvousClient([("127.0.0.1", server.port)], TOKEN, Deadline.after(30.0)) as client,
    ):
        for rank in range(size):
            server.set(finished_key(rank), b"3")
        publish_outcome(client, ["host"] * size, 3 * size)
        assert client.get(OUTCOME, Deadline.after(30.0)) == b""
        assert server.requests == 3, "all sizes, the outcome, and the request of this test"
        for rank in range(size):
            server.set(left_key(rank), b"")
        wait_for_leave(client, size)
        assert server.requests == 4
    assert caplog.messages == []


def test_after_a_failure_the_first_task_does_not_wait_for_lost_ranks(client, monkeypatch):
    monkeypatch.setattr(supervising, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervising, "_FAILED_SECONDS", 0.05)
    failure = FailureReport(2, "host", "was lost").to_json()
    client.set(OUTCOME, failure, Deadline.after(30.0))
    for rank in (0, 1):
        client.set(finished_key(rank), b"3", Deadline.after(30.0))
    publish_outcome(client, ["host"] * 3, 100)
    assert client.get(OUTCOME, Deadline.after(30.0)) == failure


def test_tasks_that_did_not_read_the_outcome_are_named(client, caplog):
    for rank in (0, 2, 3):
        client.set(left_key(rank), b"", Deadline.after(30.0))
    wait_for_leave(client, 6, seconds=0.05)
    assert caplog.messages == ["These ranks did not confirm that they have read the job's outcome: 1, 4, 5."]


def test_results_above_the_cap_name_the_largest():
    assert size_failure([3, 4, 3], ["a", "b", "c"], 10) is None
    failure = size_failure([3, 5, 3], ["a", "b", "c"], 10)
    assert (failure.rank, failure.host) == (1, "b")
    assert "returned 5 bytes, and all ranks together returned 11" in failure.cause
