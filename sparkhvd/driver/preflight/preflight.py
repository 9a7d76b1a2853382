"""``preflight``: finds what would prevent a job from running well on this cluster, and reports what to change."""

from __future__ import annotations

import functools
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd._util.counts import counted, plain_count
from sparkhvd.compat.spark import active_session, check_spark, inheriting
from sparkhvd.config import from_environment
from sparkhvd.data.prepare.store_check import judge, needs_check, remove
from sparkhvd.data.spark.job import run_job
from sparkhvd.data.spark.settings import with_spark_credentials
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import check_counts, check_names, check_seconds
from sparkhvd.driver.elastic.run import check_elastic_resources
from sparkhvd.driver.preflight.report import Check, PreflightReport, Verdict, cluster_checks
from sparkhvd.driver.spark.barrier_stage import BarrierStage
from sparkhvd.driver.spark.driver_address import driver_hosts
from sparkhvd.driver.spark.encryption import unencrypted_spark
from sparkhvd.driver.spark.executor_python import check_executor_python
from sparkhvd.driver.spark.job_failures import spark_failure
from sparkhvd.driver.spark.resources import TaskResources, profile_of
from sparkhvd.driver.spark.slots import (
    check_no_dynamic_allocation,
    describe_cluster,
    has_dynamic_allocation,
    largest_growth,
    reserve_tasks,
    setting_that_hides_slots,
)
from sparkhvd.errors import ConfigError, LaunchError, SlotsError, SparkHvdError, StoreError
from sparkhvd.rpc.protection import encryption_problem
from sparkhvd.rpc.server import Server
from sparkhvd.store import store_at
from sparkhvd.store.probe import StoreProbe, new_store_probe
from sparkhvd.store.protocol import Store
from sparkhvd.task.entry import TaskFunction, entry_of
from sparkhvd.task.host.examination import (
    DRIVER,
    Examination,
    ExaminationRequest,
    IgnoreMessages,
    examine_host,
    examine_task,
    secret_of,
    versions,
)
from sparkhvd.task.job import RESULT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

_SAMPLE_ROWS = 5
# The report mentions a wait for executors that is longer than this.
_REPORTED_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class RequestedTasks:
    """The requirements of an estimator for the cluster.

    Attributes:
        num_proc: number of ranks; None for all slots.
        resources: the resources of a rank's Spark task.
        nics: see ``run``.
        encrypt: whether the ranks encrypt their connections.
        min_num_proc: the smallest number of ranks of an elastic job; None if the number of ranks is fixed.
        max_num_proc: the largest number of ranks of an elastic job.
    """

    num_proc: int | None
    resources: TaskResources
    nics: str | Sequence[str] = ()
    encrypt: bool = False
    min_num_proc: int | None = None
    max_num_proc: int | None = None


class CheckableEstimator(Protocol):
    """The interface of an estimator that the preflight uses."""

    def getStore(self) -> Store | None: ...  # noqa: N802 - named like all getters of Spark's estimators

    def requested_tasks(self) -> RequestedTasks:
        """Return the requirements of the estimator's ranks."""

    def try_rows(self, dataset: DataFrame, rows: int) -> str:
        """Run a few rows through the model on the driver, and return a description of the output."""


@dataclass(frozen=True)
class _Request:
    """The arguments of ``preflight``, completed with the session and the estimator's values.

    Attributes:
        required: the requirements of the estimator; None without one.
    """

    spark: SparkSession
    num_proc: int | None
    required: RequestedTasks | None
    resources: TaskResources
    store: Store | None
    nics: tuple[str, ...]
    encrypt: bool
    timeout: float


def preflight(
    spark: SparkSession | None = None,
    num_proc: int | None = None,
    *,
    store: Store | str | None = None,
    estimator: CheckableEstimator | None = None,
    df: DataFrame | None = None,
    gpus_per_task: float | None = None,
    cpus_per_task: int | None = None,
    nics: Iterable[str] | None = None,
    timeout: float = 30.0,
    stdout: TextIO | None = None,
) -> PreflightReport:
    """Check in a few seconds whether a job can run well, and print the problems and what to change.

    One short barrier stage checks the slots, the GPU of every task, which hosts reach each other and the driver,
    whether all of them see the Store, the versions of Python and the frameworks, and the size of /dev/shm. Problems are
    reported, not raised. Under dynamic allocation, where Spark runs no barrier stages, ordinary tasks examine the
    running executors, and the slots to which Spark can grow decide.

    Examples:
        >>> report = sparkhvd.preflight(num_proc=4, store=store)  # doctest: +SKIP
        >>> report.ok  # doctest: +SKIP
        True

    Args:
        spark: the session to use; None takes the active one.
        num_proc: number of ranks of the job; None takes the estimator's, or all slots.
        store: the Store to check, or its URL; None takes the estimator's.
        estimator: the estimator of the job. It provides the number of ranks, the Store, the resources and the network
            interfaces of a task (from its ``backend``) and, with ``df``, the model to try.
        df: a DataFrame; the preflight runs five of its rows through the model of ``estimator`` on the driver.
        gpus_per_task: see ``run``; None takes the estimator's.
        cpus_per_task: see ``run``; None takes the estimator's.
        nics: see ``run``; None takes the estimator's.
        timeout: seconds to wait for executors that are still starting, for slots that other jobs keep busy,
            and for the rows of ``df``.
        stdout: where the report is printed; None means ``sys.stdout``.

    Raises:
        ConfigError: an argument has a value that cannot work.
    """
    began = time.monotonic()
    encrypt, required = from_environment().encrypt, None
    if estimator is not None:
        store = estimator.getStore() if store is None else store
        required = estimator.requested_tasks()
        num_proc = required.num_proc if num_proc is None else num_proc
        gpus_per_task = required.resources.gpus if gpus_per_task is None else gpus_per_task
        cpus_per_task = required.resources.cpus if cpus_per_task is None else cpus_per_task
        nics = required.nics if nics is None else nics
        encrypt = required.encrypt
    check_counts(num_proc, gpus_per_task, cpus_per_task)
    check_names("nics", nics)
    check_seconds("timeout", timeout)
    session = spark if spark is not None else active_session()
    if store is not None:
        store = with_spark_credentials(store_at("store", store), session)
    resources = TaskResources(plain_count(cpus_per_task), gpus_per_task)
    request = _Request(session, plain_count(num_proc), required, resources, store, tuple(nics or ()), encrypt, timeout)
    # In parallel with the stage: the stage waits for executors, the model for imports and Spark's first query.
    model = None
    if estimator is not None and df is not None:
        attempt = inheriting(session, functools.partial(_model_check, estimator, df, timeout))
        model = in_background(attempt, "sparkhvd-preflight-model")
    count, slots = _slots_check(request)
    tasks, checks = _examine_cluster(request, count)
    if model is not None:
        checks.append(_model_check_within(model, timeout, began))
    report = PreflightReport((slots, *checks), tuple(tasks), versions(), time.monotonic() - began)
    (sys.stdout if stdout is None else stdout).write(f"{report}\n")
    return report


def _slots_check(request: _Request) -> tuple[int, Check]:
    """Return the number of tasks to start, and the check of the slots."""
    if has_dynamic_allocation(request.spark):
        return _growth_check(request)
    began, deadline = time.monotonic(), Deadline.after(request.timeout)
    hidden = setting_that_hides_slots(request.spark)
    try:
        check_spark(request.spark)
        count = reserve_tasks(request.spark, request.num_proc, request.resources, deadline)
    except SlotsError as error:
        if hidden:
            return 0, Check("slots", Verdict.SKIPPED, str(error))
        available = describe_cluster(request.spark, request.resources).count()
        return available, Check("slots", Verdict.FAIL, str(error))
    except LaunchError as error:
        return 0, Check("slots", Verdict.FAIL, str(error))
    if hidden:
        return count, Check(
            "slots", Verdict.SKIPPED, f"{counted(count, 'rank')} requested; {hidden} hides the number of slots"
        )
    request_text = "all slots" if request.num_proc is None else f"{request.num_proc} requested"
    waited = time.monotonic() - began
    wait_text = f", available after {waited:.1f} s" if waited > _REPORTED_WAIT_SECONDS else ""
    master = describe_cluster(request.spark, request.resources).master
    return count, Check("slots", Verdict.OK, f"{counted(count, 'rank')} ({request_text}; master {master}){wait_text}")


def _growth_check(request: _Request) -> tuple[int, Check]:
    """Return the number of tasks to start under dynamic allocation, and the check of the slots to which it can grow."""
    spark, required = request.spark, request.required
    is_elastic = required is not None and required.min_num_proc is not None
    try:
        check_spark(spark)
        check_executor_python(spark)
        if required is not None and not is_elastic:
            check_no_dynamic_allocation(spark)
        check_elastic_resources("spark", request.resources)
    except (ConfigError, LaunchError) as error:
        return 0, Check("slots", Verdict.FAIL, str(error))
    cluster = describe_cluster(spark)
    slots = cluster.count()
    most, why = largest_growth(cluster, lambda name: spark.conf.get(name, None))
    smallest, largest = (required.min_num_proc, required.max_num_proc) if required and is_elastic else (None, None)
    name, needed = ("min_num_proc", smallest) if smallest is not None else ("num_proc", request.num_proc)
    count = max(1, min(slots, request.num_proc or slots))
    if most is not None and needed is not None and needed > most:
        problem = f"{name}={needed} is more than the {counted(most, 'slot')} to which dynamic allocation can grow"
        return count, Check("slots", Verdict.FAIL, f"{problem} ({why}). Raise this limit, or lower {name}.")
    limit = "any number" if most is None else f"{most} ({why})"
    growth = f"{counted(slots, 'slot')} now; dynamic allocation can grow to {limit}"
    if not is_elastic:
        return count, Check(
            "slots",
            Verdict.WARN,
            f"{growth}. Only elastic jobs can use it: run_elastic(), or estimators with min_num_proc. For other jobs, "
            "start the session with spark.dynamicAllocation.enabled=false.",
        )
    if most is not None and largest is not None and largest > most:
        never = f"The job never gets max_num_proc={largest} ranks"
        return count, Check("slots", Verdict.WARN, f"{growth}. {never}. Raise this limit, or lower max_num_proc.")
    return count, Check("slots", Verdict.OK, f"{growth}; the job has {smallest} to {largest} ranks")


def _examine_cluster(request: _Request, count: int) -> tuple[list[Examination], list[Check]]:
    """Return the examinations of the tasks, and the checks that follow from them."""
    if not count:
        return [], [Check("tasks", Verdict.SKIPPED, "No task could be started.")]
    probe = (
        None
        if request.store is None or not needs_check(request.spark, request.store)
        else new_store_probe(request.store)
    )
    try:
        if probe is not None:
            probe.leave()
        tasks = _examine_tasks(request, count, probe)
        together = not has_dynamic_allocation(request.spark)
        checks = [*cluster_checks(tasks, versions(), together=together), *_store_checks(request.store, probe, tasks)]
        return tasks, [*checks, *_encryption_checks(request, tasks)]
    except StoreError as error:
        return [], [Check("store", Verdict.FAIL, f"The driver cannot use the Store: {error}")]
    except LaunchError as error:
        return [], [Check("tasks", Verdict.FAIL, str(error))]
    finally:
        if probe is not None:
            remove(probe)


def _examine_tasks(request: _Request, count: int, probe: StoreProbe | None) -> list[Examination]:
    """Run a short barrier stage, and return the examinations of its tasks.

    Raises:
        LaunchError: the tasks did not start in time, or Spark could not run them.
    """
    pickled = None if probe is None else pickle.dumps(probe)
    secret = secrets.token_bytes(32)
    profile = profile_of(request.spark, request.resources)
    own_host, bind_host = driver_hosts(request.spark)
    with ExitStack() as stack:
        try:
            server = Server(secret_of(DRIVER, secret), IgnoreMessages(), bind_host, name="sparkhvd-preflight")
        except OSError as error:
            raise LaunchError(
                f"The driver cannot listen at {bind_host}, where jobs connect to it: {error}. Set spark.driver.host to "
                "an address of the driver that the executors reach."
            ) from error
        stack.enter_context(server)
        driver = tuple(dict.fromkeys([(bind_host, server.port), (own_host, server.port)]))
        examination = ExaminationRequest(secret, pickled, request.nics, request.encrypt, driver)
        if has_dynamic_allocation(request.spark):
            return _examinations(_run_ordinary_tasks(request, count, functools.partial(examine_host, examination)))
        task = functools.partial(examine_task, examination)
        stage = BarrierStage(request.spark, count, task, profile, _do_nothing, retry=False)
        stack.enter_context(closing(stage))
        if not stage.wait(request.timeout):
            hidden = setting_that_hides_slots(request.spark)
            other_cause = ", or the cluster has fewer slots" if hidden else ""
            raise LaunchError(
                f"{counted(count, 'task')} did not run at the same time within {request.timeout:g} s: other jobs keep "
                f"the slots busy{other_cause}. Wait for those jobs, or run this job on a cluster of its own."
            )
        if stage.error is not None:
            raise LaunchError(spark_failure(stage.error, stage.host_of, stage.task_hosts())) from stage.error
        return _examinations(stage.rows)


def _examinations(rows: Sequence[Row]) -> list[Examination]:
    return [Examination.from_json(bytes(row.content)) for row in sorted(rows, key=lambda row: int(row.rank))]


def _run_ordinary_tasks(request: _Request, count: int, task: TaskFunction) -> Sequence[Row]:
    """Run tasks that need not run at the same time, and return their rows.

    Raises:
        LaunchError: the tasks did not end in time, or Spark could not run them.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 - Spark is optional

    def collect() -> Sequence[Row]:
        return request.spark.range(count, numPartitions=count).mapInArrow(entry_of(task), RESULT_SCHEMA).collect()

    try:
        return run_job(request.spark, collect, request.timeout)
    except TimeoutError as error:
        raise LaunchError(
            f"{counted(count, 'task')} did not end within {request.timeout:g} s: no executor has started, or other "
            "jobs keep the slots busy. Raise timeout, and check that the cluster has room for an executor."
        ) from error
    except PySparkException as error:
        raise LaunchError(spark_failure(error)) from error


def _do_nothing() -> None:
    """Do nothing: the caller waits for the end of the stage itself."""


def _store_checks(store: Store | None, probe: StoreProbe | None, tasks: Sequence[Examination]) -> list[Check]:
    if store is None:
        return []
    if probe is None:
        return [Check("store", Verdict.OK, f"{store.url}: a local folder, and all tasks run on this machine")]
    try:
        judge(probe, [(task.host, task.store_answer, task.store) for task in tasks])
    except StoreError as error:
        return [Check("store", Verdict.FAIL, str(error))]
    return [Check("store", Verdict.OK, f"{store.url}: driver and all tasks see the same files")]


def _encryption_checks(request: _Request, tasks: Sequence[Examination]) -> list[Check]:
    if not request.encrypt:
        return []
    missing = [encryption_problem(socket.gethostname()), *(task.encryption for task in tasks)]
    if any(missing):
        return [Check("encryption", Verdict.FAIL, " ".join(dict.fromkeys(why for why in missing if why)))]
    warning = unencrypted_spark(request.spark)
    message = warning or "all hosts can encrypt the job's connections"
    return [Check("encryption", Verdict.WARN if warning else Verdict.OK, message)]


def _model_check_within(model: Future[Check], timeout: float, began: float) -> Check:
    is_done_within(model, max(0.0, began + timeout - time.monotonic()))
    try:
        return model.result(0)
    except TimeoutError:  # the query is cancelled; a model that never returns continues in its thread
        problem = f"{_SAMPLE_ROWS} rows of df did not pass through the model within {timeout:g} s."
        remedy = "If df is costly to compute, cache() it; if the cluster is busy, raise timeout."
        return Check("model", Verdict.FAIL, f"{problem} {remedy}")


def _model_check(estimator: CheckableEstimator, df: DataFrame, timeout: float) -> Check:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - Spark is optional

    attempt: Callable[[], str] = functools.partial(estimator.try_rows, df, _SAMPLE_ROWS)
    try:
        return Check("model", Verdict.OK, run_job(df.sparkSession, attempt, timeout))
    except (SparkHvdError, PySparkException) as error:
        return Check("model", Verdict.FAIL, str(error))
