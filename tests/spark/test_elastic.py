"""Elastic jobs in Spark tasks, whose ranks, tasks and executors are lost and added."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

import sparkhvd
from sparkhvd.errors import ConfigError, LaunchError, RankFailedError, StartTimeoutError
from tests.launch import elastic_training as training
from tests.scripts import results_of, run_script
from tests.waiting import happens, wait_for

pytestmark = pytest.mark.spark

FAST = {"start_timeout": 60, "elastic_timeout": 60, "cooldown_range": (0.5, 5), "verbose": 0}


def running_jobs(spark) -> int:
    return len(spark.sparkContext.statusTracker().getActiveJobsIds())


def test_a_job_without_changes_returns_the_results_in_rank_order(spark, tmp_path, capfd):
    options = FAST | {"verbose": 1}
    results = sparkhvd.run_elastic(training.train, (5, str(tmp_path)), num_proc=3, spark=spark, **options)
    assert [result[:4] for result in results] == [(5, 15.0, rank, 3) for rank in range(3)]
    wait_for(lambda: running_jobs(spark) == 0)
    assert "Rank" not in capfd.readouterr().err


@pytest.mark.parametrize("end", ["kill", "raise"])
def test_survivors_keep_their_process_and_a_new_rank_joins(spark, tmp_path, end):
    arguments = (10, str(tmp_path), {(5, 0, 2): end}, (2, 1, 2))
    results = sparkhvd.run_elastic(training.train, arguments, num_proc=2, min_num_proc=1, **FAST)
    steps, total = results[0][:2]
    assert total == sum(range(1, steps + 1)), "every step counts once"
    assert [result[:4] for result in results] == [(steps, total, 0, 2), (steps, total, 1, 2)]
    assert results[0][5] == [1, 2], "rank 0 has survived"
    wait_for(lambda: running_jobs(spark) == 0)


def test_a_result_larger_than_one_message_arrives_complete(spark):
    results = sparkhvd.run_elastic(training.bytes_of, (3_000_001,), num_proc=2, spark=spark, **FAST)
    assert results == [bytes([rank]) * 3_000_001 for rank in range(2)]


def kill_task_at_step_5(folder: Path, killed: list[int]) -> None:
    """Kill the Python process of the Spark task of one rank, once both ranks are at work."""
    assert happens(lambda: len(list(folder.glob("log-*"))) == 2, 60)
    path = min(folder.glob("log-*"))
    assert happens(lambda: "step 5 " in path.read_text(), 60)
    rank = psutil.Process(int(path.name.removeprefix("log-")))
    task = next(one for one in rank.parents() if "pyspark" in " ".join(one.cmdline()))
    killed.append(rank.pid)
    os.kill(task.pid, signal.SIGKILL)


def test_a_lost_task_ends_its_rank_and_is_replaced(spark, tmp_path, monkeypatch):
    monkeypatch.delenv("SPARKHVD_WARM_SECONDS", raising=False)  # so that ranks are children of their tasks
    killed: list[int] = []
    thread = threading.Thread(target=kill_task_at_step_5, args=(tmp_path, killed))
    thread.start()
    arguments = (10, str(tmp_path), {}, (2, 1, 2))
    results = sparkhvd.run_elastic(training.train, arguments, num_proc=2, min_num_proc=1, **FAST)
    thread.join()
    assert [result[2:4] for result in results] == [(0, 2), (1, 2)]
    assert results[0][1] == sum(range(1, results[0][0] + 1))
    assert killed[0] not in {result[4] for result in results}
    wait_for(lambda: not psutil.pid_exists(killed[0]))


def test_a_job_that_gets_too_few_slots_fails_and_leaves_no_jobs(spark, tmp_path):
    options = FAST | {"start_timeout": 20}
    with pytest.raises(StartTimeoutError, match=r"4 of at least 5 ranks were ready within start_timeout=20 s"):
        sparkhvd.run_elastic(training.train, (5, str(tmp_path)), num_proc=5, **options)
    wait_for(lambda: running_jobs(spark) == 0)


def test_a_function_that_always_fails_ends_the_job_with_its_error(spark):
    with pytest.raises(RankFailedError, match="raised ValueError: no luck"):
        sparkhvd.run_elastic(training.fail, num_proc=2, **FAST | {"cooldown_range": (0.05, 0.1)})
    wait_for(lambda: running_jobs(spark) == 0)


def test_a_task_that_cannot_run_ends_the_job_with_the_reason(spark):
    with pytest.raises(LaunchError, match=r"None of the network interfaces \['nic9'\] has an address"):
        sparkhvd.run_elastic(training.fail, num_proc=2, nics=["nic9"], **FAST)
    wait_for(lambda: running_jobs(spark) == 0)


@pytest.mark.parametrize("cancel", ["all jobs", "the job group", "one job"])
def test_cancelling_its_spark_jobs_ends_the_job_with_one_error(spark, tmp_path, cancel):
    context, threads = spark.sparkContext, []

    def cancel_at_step_5() -> None:
        assert happens(lambda: any("step 5 " in path.read_text() for path in tmp_path.glob("log-*")), 60)
        threads.extend(thread.name for thread in threading.enumerate())
        if cancel == "all jobs":
            context.cancelAllJobs()
        elif cancel == "the job group":
            context.cancelJobGroup("of the user")
        else:
            context._jsc.sc().cancelJob(min(context.statusTracker().getActiveJobsIds()))

    thread = threading.Thread(target=cancel_at_step_5)
    thread.start()
    context.setJobGroup("of the user", "an elastic job")
    try:
        with pytest.raises(
            LaunchError, match=r"^Spark aborted the job: it was cancelled \(Job \d+ cancelled "
        ) as caught:
            sparkhvd.run_elastic(training.train, (9, str(tmp_path), {}, (9,)), num_proc=2, min_num_proc=1, **FAST)
    finally:
        context.setLocalProperty("spark.jobGroup.id", None)
        thread.join()
    assert not isinstance(caught.value, RankFailedError)
    assert sum(name in {"sparkhvd-lease", "sparkhvd-job"} for name in threads) == 2, "one thread per Spark task"
    wait_for(lambda: running_jobs(spark) == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"discovery": dict}, "discovery requires launcher='local'"),
        ({"launcher": "barrier"}, r"cannot start elastic jobs; expected one of \['auto', .*'ray'\]"),
        ({"launcher": "local", "spark": object()}, "spark has no effect with launcher='local'"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        sparkhvd.run_elastic(training.fail, num_proc=1, **arguments)


def test_two_jobs_that_each_hold_half_of_the_slots_run_one_after_the_other(tmp_path):
    script = Path(__file__).with_name("elastic_pair_script.py")
    results = results_of(run_script([sys.executable, script, tmp_path], tmp_path, 400, SPARKHVD_WARM_SECONDS="0"))
    assert results["results"] == {"a": [[3, 6.0, 0, 2], [3, 6.0, 1, 2]], "b": [[3, 6.0, 0, 2], [3, 6.0, 1, 2]]}
    assert results["jobs"] == 0
    assert "The job held 1 of the 2 slots that it needs to start" in results["logged"]
    ended, waited = results["errors"]
    assert waited == "The Spark session has been stopped. Create a new one."
    cause = "Job \\d+ cancelled because SparkContext was shut down|the Spark session was stopped"
    assert re.match(rf"Spark aborted the job: it was cancelled \(({cause})\)", ended)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "ends",
    [
        ["decommissioned"],  # the test of killed tasks above loses leases, too
        pytest.param(["killed", "decommissioned"], marks=pytest.mark.soak),
    ],
    ids=" and ".join,
)
def test_a_job_grows_by_dynamic_allocation_and_survives_the_loss_and_the_decommissioning_of_executors(tmp_path, ends):
    script = Path(__file__).with_name("elastic_script.py")
    results = results_of(
        run_script([sys.executable, script, tmp_path, *ends], tmp_path, 400, SPARKHVD_WARM_SECONDS="0")
    )
    checks, limit = results["checks"], r"spark\.dynamicAllocation\.maxExecutors=2"
    growth = rf"\d slots? now; dynamic allocation can grow to 2 \({limit}\)"
    for name, verdict, says in (
        ("of any job", "WARN", rf"{growth}\. Only elastic jobs can use it: run_elastic\(\), or estimators with "),
        ("too large", "FAIL", rf"num_proc=3 is more than the 2 slots to which dynamic allocation can grow \({limit}\)"),
        ("elastic", "OK", rf"{growth}; the job has 1 to 2 ranks$"),
        ("never as large", "WARN", rf"{growth}\. The job never gets max_num_proc=3 ranks\. Raise this limit, or "),
        (
            "never large enough",
            "FAIL",
            r"min_num_proc=3 is more than the 2 slots .* Raise this limit, or lower min_",
        ),
    ):
        assert checks[name][0] == verdict
        assert re.match(says, checks[name][1]), checks[name][1]
    assert results["sizes"] == [1, 2, *[1, 2] * len(ends)], "these executors have ended and were replaced"
    assert results["losses"] == ends.count("killed"), "the rank on the decommissioned executor has left at a commit"
    (message,) = results["decommissioned"]
    assert re.fullmatch(
        r"Spark decommissions the executor of rank 1 on host \S+; the rank leaves the job at its next commit\.", message
    )
    assert results["ranks"] == [[0, 2], [1, 2]]
    assert results["total"] == results["expected"]
    assert results["first"], "the first rank has kept its process"
    assert results["jobs"] == 0
