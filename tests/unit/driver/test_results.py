from __future__ import annotations

import sys
from types import SimpleNamespace

import cloudpickle
import pytest

from sparkhvd.driver.results import (
    failure_of,
    results_of,
    tasks_not_ready,
    unpickled,
    unreachable_host,
    unresponsive_task,
)
from sparkhvd.errors import LaunchError, RankFailedError, StartTimeoutError
from sparkhvd.rpc.messages import TaskStatus
from sparkhvd.task.failure_report import CONNECTED, IN_FN, NOT_STARTED, TOO_LARGE, FailureReport
from sparkhvd.task.job import FAILURE, RESULT


def row(rank: int, chunk: int, content: bytes, kind: str = RESULT) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, kind=kind, chunk=chunk, content=bytearray(content))


def test_chunks_are_assembled_in_rank_order():
    rows = [row(1, 1, b"d"), row(0, 0, b"a"), row(1, 0, b"c"), row(0, 1, b"b"), row(2, 0, b"")]
    assert results_of(rows, 3) == [b"ab", b"cd", b""]


def test_a_missing_result_is_an_error():
    with pytest.raises(LaunchError, match=r"no result from ranks \[1\]"):
        results_of([row(0, 0, b"a")], 2)


def failed(**fields: str) -> list[SimpleNamespace]:
    report = FailureReport(1, "node-4", "raised ValueError: bad", **fields)
    return [row(0, 0, b"a"), row(1, 0, report.to_json(), FAILURE)]


def test_a_failed_rank_is_raised_with_all_details():
    with pytest.raises(RankFailedError) as caught:
        results_of(failed(traceback="Traceback ... in f", stderr_tail="last words"), 2)
    assert str(caught.value).startswith("Rank 1 on host node-4 raised ValueError: bad.")
    assert "Traceback ... in f" in str(caught.value)
    assert (caught.value.rank, caught.value.host) == (1, "node-4")
    assert (caught.value.remote_traceback, caught.value.stderr_tail) == ("Traceback ... in f", "last words")


def test_without_a_traceback_the_message_has_the_last_lines_of_stderr():
    with pytest.raises(RankFailedError, match="wrote to stderr:\nlast words"):
        results_of(failed(stderr_tail="last words"), 2)


def test_the_type_of_the_error_depends_on_the_kind_of_failure():
    with pytest.raises(StartTimeoutError, match="Raise start_timeout"):
        results_of(failed(kind=NOT_STARTED), 2)
    with pytest.raises(LaunchError, match="Rank 1 on host node-4") as caught:
        results_of(failed(kind=TOO_LARGE), 2)
    assert type(caught.value) is LaunchError


def test_the_error_for_a_host_without_network_names_its_rank_or_task():
    error = failure_of(FailureReport.from_json(unreachable_host(TaskStatus(2, 3, "node-4", 7, IN_FN)).to_json()))
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.host) == (3, "node-4")
    assert str(error).startswith(
        "Rank 3 on host node-4 was cut off from the network (in fn): the host has not responded for 9 s."
    )
    stopped = failure_of(unresponsive_task(TaskStatus(2, 3, "node-4", 7, CONNECTED)))
    assert str(stopped).startswith(
        "Rank 3 on host node-4 stopped responding (in fn, after init()): its Spark task has sent no heartbeat for "
    )
    early = failure_of(unreachable_host(TaskStatus(2, -1, "node-4")))
    assert type(early) is LaunchError
    assert str(early).startswith("Task 2 on host node-4 was cut off from the network before its rank was assigned")


def test_missing_tasks_are_named_with_the_hosts_that_spark_reports():
    error = failure_of(tasks_not_ready([1, 3, 4], {1: "node-b", 2: "node-c", 4: "node-d"}, 15.0))
    assert isinstance(error, StartTimeoutError)
    assert str(error).startswith(
        "Not all tasks of this job were ready within start_timeout=15 s: Spark runs task 1 on host node-b, task 4 on "
        "host node-d, but without progress. The Python worker is suspended, "
    )
    assert (
        ". Spark does not report where it runs task 3. A task waits for a slot because an executor was lost"
    ) in str(error)
    with_rows = str(failure_of(tasks_not_ready([1], {1: "node-b"}, 15.0, with_rows=True)))
    assert (
        "within start_timeout=15 s after the other tasks had received their rows: Spark runs task 1 on host node-b"
    ) in with_rows
    many = str(failure_of(tasks_not_ready(range(12), {}, 15.0)))
    assert "15 s: Spark does not report where it runs task 0, task 1, " in many
    assert "task 9, 2 more. A task waits for a slot" in many


class ObjectOfAnotherVersion:
    def __reduce__(self):
        return getattr, (self.__class__, "field_that_no_longer_exists")


def refuse_to_unpickle():
    raise RuntimeError("Not on this machine.")


class ObjectOfAnotherMachine:
    def __reduce__(self):
        return refuse_to_unpickle, ()


class ObjectThatExits:
    def __reduce__(self):
        return sys.exit, (0,)


def test_a_result_that_the_driver_cannot_unpickle_is_reported_with_its_rank():
    with pytest.raises(LaunchError, match=r"rank 0: RuntimeError: Not on this machine\. Return plain values"):
        unpickled([cloudpickle.dumps(ObjectOfAnotherMachine())])
    contents = [cloudpickle.dumps(3), cloudpickle.dumps(ObjectOfAnotherVersion())]
    with pytest.raises(LaunchError, match=r"cannot unpickle the result of rank 1: AttributeError: .*no_longer_exists"):
        unpickled(contents)
    with pytest.raises(LaunchError, match="cannot unpickle the result of rank 0: SystemExit: 0"):
        unpickled([cloudpickle.dumps(ObjectThatExits())])
    assert unpickled(contents[:1] * 2) == [3, 3]
