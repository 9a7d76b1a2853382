from __future__ import annotations

import pytest

from sparkhvd.driver.spark.job_failures import is_cancelled, spark_failure
from sparkhvd.rpc.messages import TaskStatus

ABORTED = (
    "org.apache.spark.SparkException: Job aborted due to stage failure: ShuffleMapStage 12 (x at y.py:9) has failed "
    "the maximum allowable number of times: 4. Most recent failure reason: Stage failed because barrier task "
    "ShuffleMapTask(12, 1) finished unsuccessfully.\n"
)
LAST_ATTEMPT = "This was the last of 4 attempts.\n\nSpark's own error: org.apache"


@pytest.mark.parametrize("module", ["sparkhvd", "sparkhvd.task.entry", "cloudpickle", "fsspec.core"])
def test_an_executor_that_cannot_import_sparkhvd_has_its_own_message(module):
    failure = spark_failure(RuntimeError(f"x\nModuleNotFoundError: No module named '{module}'\n\tat org.y"))
    assert failure.startswith(f"The executors cannot import {module}: they lack sparkhvd or a package that it needs, ")
    assert "Install this version on every node" in failure
    assert "not even as a wheel" in failure


def test_a_missing_module_of_the_user_is_not_confused_with_sparkhvd():
    failure = spark_failure(RuntimeError(f"{ABORTED}Traceback (most\n  File a\nE: No module named 'sparkhvd_extras'\n"))
    assert failure.startswith("Spark aborted the job: task 1 failed with E: No module named 'sparkhvd_extras'.")


def test_the_message_of_an_executor_without_the_compiled_core_is_kept():
    message = "The sparkhvd in /x.zip/sparkhvd on host a has no compiled core (_core.so). It is in an archive, ..."
    code = '  File "/x.zip/sparkhvd/_core.py"\n    f"The sparkhvd in {folder} has no compiled core (_core{suffix})"\n'
    text = f"{ABORTED}Traceback (most recent call last):\n{code}ImportError: {message}\n\tat org.y"
    assert spark_failure(RuntimeError(text)) == message


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "ExecutorLostFailure (executor 6 exited caused by one of the running tasks) Reason: Ended with 137",
            "executor 6 on host node-6, which ran task 1, was lost (Ended with 137). See the executor's log.",
        ),
        (
            "ExecutorLostFailure (executor 6 exited unrelated to the running tasks) Reason: Lost.\n\tat org.y",
            "executor 6 on host node-6, which ran task 1, was lost (Lost). See the executor's log.",
        ),
        (
            "PythonException: Thrown: Traceback (most recent call last):\n  File a\nsparkhvd.errors.E: no luck.\n SQL",
            "task 1 failed with sparkhvd.errors.E: no luck.",
        ),
        (
            "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Consider",
            "the Python worker of task 1 was killed or crashed, for example because the host ran out of memory.",
        ),
    ],
)
def test_the_cause_is_reported_before_the_error_of_spark(message, cause):
    failure = spark_failure(RuntimeError(ABORTED + message), lambda executor: f"node-{executor}")
    assert failure.startswith(f"Spark aborted the job: {cause} {LAST_ATTEMPT}")
    assert "\tat org.y" not in failure


def test_the_message_names_the_host_of_a_task():
    error = RuntimeError(f"{ABORTED}org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).")
    failure = spark_failure(error, task_hosts={0: "node-a", 1: "node-b"})
    assert failure.startswith("Spark aborted the job: the Python worker of task 1 on host node-b was killed or crashed")
    raised = RuntimeError(f"{ABORTED}Traceback (most recent call last):\n  File a\nValueError: no luck\n SQL")
    failure = spark_failure(raised, task_hosts={1: "node-b"})
    assert failure.startswith("Spark aborted the job: task 1 on host node-b failed with ValueError: no luck.")


def test_the_message_contains_the_rank_and_phase_that_a_task_has_reported():
    error = RuntimeError(f"{ABORTED}ExecutorLostFailure (executor 2 exited) Reason: gone")
    failure = spark_failure(error, tasks={1: TaskStatus(1, 3, "node-b", 9, "in fn")})
    assert failure.startswith("Spark aborted the job: executor 2, which ran task 1 (rank 3, in fn), was lost (gone).")
    for tasks in ({}, {1: TaskStatus(1, -1, "node-b", 9)}):
        early = spark_failure(error, tasks=tasks)
        assert early.startswith(
            "Spark aborted the job: executor 2, which ran task 1 (before its rank was assigned), was"
        )
    crashed = RuntimeError(f"{ABORTED}org.apache.spark.SparkException: Python worker exited unexpectedly (crashed).")
    failure = spark_failure(crashed, task_hosts={1: "node-b"}, tasks={})
    assert "the Python worker of task 1 on host node-b (before its rank was assigned) was killed or crashed" in failure


def test_too_few_slots_are_reported_with_a_remedy():
    message = "[SPARK-24819]: Barrier execution mode does not allow run a barrier stage that requires more slots than"
    failure = spark_failure(RuntimeError(message))
    assert failure.startswith("Spark aborted the job: the cluster has fewer slots than this job has ranks, given the ")


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("[SPARK_JOB_CANCELLED] Job 3 cancelled part of cancelled job tags mine SQLSTATE: XXKDA", "Job 3 can"),
        (
            "x\n: org.apache.spark.SparkException: Job 4 cancelled because SparkContext was shut down\n\tat y",
            "Job 4 cancelled because SparkContext was shut down",
        ),
        (  # Spark 3.5
            "x\n: org.apache.spark.SparkException: Job 5 cancelled part of cancelled job tag mine\n\tat y",
            "Job 5 cancelled part of cancelled job tag mine",
        ),
        ("x: [OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008", "Operation has been canceled"),
    ],
)
def test_the_error_of_a_cancelled_job_says_how_it_was_cancelled(message, cause):
    failure = spark_failure(RuntimeError(f"An error occurred.\n{message}\n\tat org.y"))
    assert failure.startswith(f"Spark aborted the job: it was cancelled ({cause}")
    assert failure.splitlines()[0].endswith(").")


def test_a_stopped_session_is_the_cause_even_if_pyspark_fails_afterwards():
    stopped = RuntimeError('Cannot invoke "x.DAGScheduler.y(long)" because "SparkContext.dagScheduler()" is null')
    masked = AttributeError("'NoneType' object has no attribute 'setCallSite'")
    masked.__context__ = stopped
    # What PySpark calls on the Java object of a context, which a stopped context no longer has.
    names = ("setCallSite", "sc", "setLocalProperty", "addJobTag")
    ended = [AttributeError(f"'NoneType' object has no attribute '{name}'") for name in names]
    planning = RuntimeError(
        'Cannot invoke "org.apache.spark.sql.classic.SparkSession.sparkContext()" because the return value of '
        '"org.apache.spark.sql.execution.SparkPlan.session()" is null'
    )
    for error in (stopped, masked, planning, *ended):
        assert spark_failure(error).startswith(
            "Spark aborted the job: it was cancelled (the Spark session was stopped)."
        )
        assert is_cancelled(error)


def test_the_message_omits_the_unknown_host_of_an_executor():
    failure = spark_failure(RuntimeError(f"{ABORTED}ExecutorLostFailure (executor 2 exited) Reason: gone"))
    assert failure.startswith("Spark aborted the job: executor 2, which ran task 1, was lost (gone).")


def test_an_unknown_error_of_spark_is_passed_on():
    failure = spark_failure(RuntimeError("cause\n\tat org.y"))
    assert failure == "Spark aborted the job, and no rank reported a failure. Spark's own error: cause"


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), EOFError()])
def test_a_lost_jvm_is_reported_as_the_end_of_spark_instead_of_a_socket_error(error):
    failure = spark_failure(error)
    assert failure.startswith("Spark has ended: the JVM of this driver no longer responds (")
    assert "create a new one" in failure
