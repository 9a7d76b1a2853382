"""``preflight``: what would keep a job from running well on this cluster, and what to change."""

from __future__ import annotations

import functools
import pickle
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TextIO

from sparkhvd._util.background import in_background, is_done_within
from sparkhvd.config import from_environment
from sparkhvd.data.prepare.store_check import judge, needs_check, remove
from sparkhvd.data.spark.job import run_job
from sparkhvd.data.spark.settings import told_by_spark
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import check_counts, check_names, check_seconds
from sparkhvd.driver.launcher import active_session
from sparkhvd.driver.preflight.report import Check, PreflightReport, Verdict, cluster_checks
from sparkhvd.driver.spark.barrier_stage import BarrierStage
from sparkhvd.driver.spark.encryption import unencrypted_spark
from sparkhvd.driver.spark.job_failures import spark_failure
from sparkhvd.driver.spark.resources import TaskResources, profile_of
from sparkhvd.driver.spark.slots import describe_cluster, reserve_tasks, setting_that_hides_slots
from sparkhvd.errors import LaunchError, SlotsError, SparkHvdError, StoreError
from sparkhvd.rpc.protection import encryption_problem
from sparkhvd.store import store_at
from sparkhvd.store.probe import StoreProbe, new_store_probe
from sparkhvd.store.protocol import Store
from sparkhvd.task.host.examination import Examination, ExaminationRequest, examine_task, versions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SAMPLE_ROWS = 5
# How long executors take to be there, when that is said.
_WAITED_SECONDS = 2.0


@dataclass(frozen=True)
class AskedTasks:
    """What an estimator asks of the cluster.

    Attributes:
        num_proc: ranks; None for all slots.
        resources: what the Spark task of each is to get.
        nics: as in ``run``.
        encrypt: whether they encrypt what they send.
    """

    num_proc: int | None
    resources: TaskResources
    nics: str | Sequence[str] = ()
    encrypt: bool = False


class Tryable(Protocol):
    """An estimator, as far as the preflight knows it."""

    def getStore(self) -> Store | None: ...  # noqa: N802 - named like all getters of Spark's estimators

    def asked_tasks(self) -> AskedTasks:
        """What its ranks will need."""

    def try_rows(self, dataset: DataFrame, rows: int) -> str:
        """Put a few rows through the model, on the driver; what came out, in words."""


@dataclass(frozen=True)
class _Asked:
    """What the caller of ``preflight`` wants to know, with the session settled."""

    spark: SparkSession
    num_proc: int | None
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
    estimator: Tryable | None = None,
    df: DataFrame | None = None,
    gpus_per_task: float | None = None,
    cpus_per_task: int | None = None,
    nics: Iterable[str] | None = None,
    timeout: float = 30.0,
    stdout: TextIO | None = None,
) -> PreflightReport:
    """Look in a few seconds for what would keep a job from running well, print it, and say what to change.

    One short barrier stage tells the slots, the GPU of every task, which hosts reach each other, whether all see the
    Store, the versions of Python and the frameworks, and the size of /dev/shm. Nothing is raised for what is found.

    Example:
        >>> report = sparkhvd.preflight(num_proc=4, store=store)  # doctest: +SKIP
        >>> report.ok  # doctest: +SKIP
        True

    Args:
        spark: the session to use; None takes the active one.
        num_proc: the ranks that the job will have; None takes the estimator's, or all slots.
        store: the Store to check, or its URL; None takes the estimator's.
        estimator: tells ranks, Store, and the resources and networks of a task (of its ``backend``), and, with ``df``,
            has its model tried.
        df: five of its rows go through the model of ``estimator`` on the driver.
        gpus_per_task: as in ``run``; None takes the estimator's.
        cpus_per_task: as in ``run``; None takes the estimator's.
        nics: as in ``run``; None takes the estimator's.
        timeout: how many seconds to wait for executors that are not there yet, or whose slots other jobs keep busy, and
            for the rows of ``df``.
        stdout: where the report is printed; None is ``sys.stdout``.

    Raises:
        ConfigError: an argument has a value that cannot work.
    """
    began = time.monotonic()
    encrypt = from_environment().encrypt
    if estimator is not None:
        store = estimator.getStore() if store is None else store
        theirs = estimator.asked_tasks()
        num_proc = theirs.num_proc if num_proc is None else num_proc
        gpus_per_task = theirs.resources.gpus if gpus_per_task is None else gpus_per_task
        cpus_per_task = theirs.resources.cpus if cpus_per_task is None else cpus_per_task
        nics = theirs.nics if nics is None else nics
        encrypt = theirs.encrypt
    check_counts(num_proc, gpus_per_task, cpus_per_task)
    check_names("nics", nics)
    check_seconds("timeout", timeout)
    session = spark if spark is not None else active_session()
    if store is not None:
        store = told_by_spark(store_at("store", store), session)
    resources = TaskResources(cpus_per_task, gpus_per_task)
    asked = _Asked(session, num_proc, resources, store, tuple(nics or ()), encrypt, timeout)
    # Beside the stage: both wait, the one for executors, the other for imports and Spark's first query.
    model = None
    if estimator is not None and df is not None:
        model = in_background(functools.partial(_model, estimator, df, timeout), "sparkhvd-preflight-model", session)
    count, slots = _slots(asked)
    tasks, checks = _cluster(asked, count)
    if model is not None:
        checks.append(_in_time(model, timeout, began))
    report = PreflightReport((slots, *checks), tuple(tasks), versions(), time.monotonic() - began)
    (sys.stdout if stdout is None else stdout).write(f"{report}\n")
    return report


def _slots(asked: _Asked) -> tuple[int, Check]:
    """How many tasks to ask, and what there is to say about slots."""
    began, deadline = time.monotonic(), Deadline.after(asked.timeout)
    hidden = setting_that_hides_slots(asked.spark)
    try:
        count = reserve_tasks(asked.spark, asked.num_proc, asked.resources, deadline)
    except SlotsError as error:
        if hidden:
            return 0, Check("slots", Verdict.SKIPPED, str(error))
        there = describe_cluster(asked.spark, asked.resources).count(Deadline.after(asked.timeout))
        return there, Check("slots", Verdict.FAIL, str(error))
    except LaunchError as error:
        return 0, Check("slots", Verdict.FAIL, str(error))
    if hidden:
        return count, Check(
            "slots", Verdict.SKIPPED, f"{count} ranks asked for; {hidden} hides how many slots there are"
        )
    wanted = "as many as there are" if asked.num_proc is None else f"{asked.num_proc} asked for"
    waited = time.monotonic() - began
    after = f", there after {waited:.1f} s" if waited > _WAITED_SECONDS else ""
    master = describe_cluster(asked.spark, asked.resources).master
    return count, Check("slots", Verdict.OK, f"{count} ranks ({wanted}; master {master}){after}")


def _cluster(asked: _Asked, count: int) -> tuple[list[Examination], list[Check]]:
    """What the tasks found, and what it means."""
    if not count:
        return [], [Check("tasks", Verdict.SKIPPED, "No task could be asked.")]
    probe = None if asked.store is None or not needs_check(asked.spark, asked.store) else new_store_probe(asked.store)
    try:
        if probe is not None:
            probe.leave()
        tasks = _examined(asked, count, probe)
        checks = [*cluster_checks(tasks, versions()), *_store(asked.store, probe, tasks)]
        return tasks, [*checks, *_encryption(asked, tasks)]
    except StoreError as error:
        return [], [Check("store", Verdict.FAIL, f"The driver cannot use it: {error}")]
    except LaunchError as error:
        return [], [Check("tasks", Verdict.FAIL, str(error))]
    finally:
        if probe is not None:
            remove(probe)


def _examined(asked: _Asked, count: int, probe: StoreProbe | None) -> list[Examination]:
    """What the tasks of a short barrier stage found.

    Raises:
        LaunchError: they did not start in time, or Spark could not run them.
    """
    pickled = None if probe is None else pickle.dumps(probe)
    question = ExaminationRequest(secrets.token_bytes(32), pickled, asked.nics, asked.encrypt)
    profile = profile_of(asked.spark, asked.resources)
    task = functools.partial(examine_task, question)
    stage = BarrierStage(asked.spark, count, task, profile, _nothing, retry=False)
    with closing(stage):
        if not stage.wait(asked.timeout):
            fewer = ", or there are fewer than that" if setting_that_hides_slots(asked.spark) else ""
            raise LaunchError(
                f"{count} tasks did not run at the same time within {asked.timeout:g} s: other jobs keep the slots "
                f"busy{fewer}. Wait for those, or give this job a cluster of its own."
            )
        if stage.error is not None:
            raise LaunchError(spark_failure(stage.error, stage.host_of, stage.task_hosts())) from stage.error
        return [Examination.from_json(bytes(row.content)) for row in sorted(stage.rows, key=lambda row: int(row.rank))]


def _nothing() -> None:
    """The end of the stage is waited for, not told."""


def _store(store: Store | None, probe: StoreProbe | None, tasks: Sequence[Examination]) -> list[Check]:
    if store is None:
        return []
    if probe is None:
        return [Check("store", Verdict.OK, f"{store.url}: a folder of the one machine that there is")]
    try:
        judge(probe, [(task.host, task.store_answer, task.store) for task in tasks])
    except StoreError as error:
        return [Check("store", Verdict.FAIL, str(error))]
    return [Check("store", Verdict.OK, f"{store.url}: driver and all tasks see the same files")]


def _encryption(asked: _Asked, tasks: Sequence[Examination]) -> list[Check]:
    if not asked.encrypt:
        return []
    missing = [encryption_problem(socket.gethostname()), *(task.encryption for task in tasks)]
    if any(missing):
        return [Check("encryption", Verdict.FAIL, " ".join(dict.fromkeys(why for why in missing if why)))]
    readable = unencrypted_spark(asked.spark)
    said = readable or "all hosts can encrypt what the job sends"
    return [Check("encryption", Verdict.WARN if readable else Verdict.OK, said)]


def _in_time(model: Future[Check], timeout: float, began: float) -> Check:
    is_done_within(model, max(0.0, began + timeout - time.monotonic()))
    try:
        return model.result(0)
    except TimeoutError:  # of the query, which is cancelled; a model that never returns goes on in its thread
        words = f"{_SAMPLE_ROWS} rows of df did not go through the model within {timeout:g} s."
        return Check("model", Verdict.FAIL, f"{words} Is df costly to compute (then cache() it), or the cluster busy?")


def _model(estimator: Tryable, df: DataFrame, timeout: float) -> Check:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - importing this module needs no Spark

    attempt: Callable[[], str] = functools.partial(estimator.try_rows, df, _SAMPLE_ROWS)
    try:
        return Check("model", Verdict.OK, run_job(df.sparkSession, attempt, timeout))
    except (SparkHvdError, PySparkException) as error:
        return Check("model", Verdict.FAIL, str(error))
