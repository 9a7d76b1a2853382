"""The default launcher: a Spark barrier stage whose tasks each start one worker."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import ClassVar

from sparkhvd._util.background import is_set_within
from sparkhvd.compat.spark import is_connect
from sparkhvd.data.prepare.stats import no_rows
from sparkhvd.deadline import Deadline
from sparkhvd.driver.launcher import LaunchHandle, LaunchRequest, warn_of_versions
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.results import failure_of, lost_task, results_of, tasks_not_ready
from sparkhvd.driver.spark.barrier_stage import BarrierStage
from sparkhvd.driver.spark.driver_address import driver_hosts
from sparkhvd.driver.spark.job_failures import spark_failure
from sparkhvd.driver.spark.resources import profile_of
from sparkhvd.driver.spark.slots import reserve_tasks
from sparkhvd.driver.spark.task_exchange import TaskExchange
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.messages import TaskStatus
from sparkhvd.rpc.server import Server
from sparkhvd.task.entry import entry_of
from sparkhvd.task.failure_report import FailureReport
from sparkhvd.task.job import Job
from sparkhvd.task.main import run_task

logger = logging.getLogger(__name__)

# How long rows that were in flight may still arrive after a host was cut off.
_ROWS_SECONDS = 1.0


class BarrierLauncher:
    """Starts jobs in barrier stages on the cluster of a session."""

    on_spark: ClassVar[bool] = True
    takes_rows: ClassVar[bool] = True

    def __init__(self, request: LaunchRequest) -> None:
        self._spark = request.session()
        self._request = request

    def reserve(self, deadline: Deadline) -> int:
        return reserve_tasks(self._spark, self._request.num_proc, self._request.resources, deadline)

    def launch(self, job: Job, stream: LogStream) -> LaunchHandle:
        return BarrierHandle(self._request, job, stream)


class BarrierHandle:
    """The stage of a job, and the server that receives its output."""

    def __init__(self, request: LaunchRequest, job: Job, stream: LogStream) -> None:
        spark = request.session()
        self._job = job
        self._stream = stream
        self._wake = threading.Event()  # set when the stage has ended or a task was lost
        self._unheard_warned = False
        self._lost: FailureReport | None = None  # written before _wake is set
        own_host, bind_host = driver_hosts(spark)
        self._driver = tuple(dict.fromkeys((own_host, bind_host)))
        self._connect = is_connect(spark)
        # A Connect client may sleep or change its network while its job runs.
        on_lost = None if self._connect else self._on_task_lost
        job = replace(job, driver_connection=on_lost is not None)
        with ExitStack() as stack:
            self._exchange = exchange = TaskExchange(
                job.num_proc, stream, job.start_timeout, self._on_tasks_missing, job.has_rows
            )
            encrypt = job.config.encrypt
            server = stack.enter_context(
                Server(job.secret, exchange, bind_host, name="sparkhvd-driver", on_lost=on_lost, encrypt=encrypt)
            )
            stack.callback(exchange.end)  # before the server closes, so that waiting tasks get their answer
            addresses = tuple(dict.fromkeys([(bind_host, server.port), (own_host, server.port)]))
            task = entry_of(functools.partial(run_task, job.with_driver_addresses(addresses)))
            profile = profile_of(spark, request.resources)
            self._stage = BarrierStage(spark, job.num_proc, task, profile, self._wake_waiters, request.rows)
            stack.callback(self._stage.close)
            self._stack = stack.pop_all()

    def wait_started(self, deadline: Deadline) -> None:
        started, seconds = self._stream.started, self._job.start_timeout
        self._stage.wait_started(started, deadline, seconds, self._warn_if_unheard)
        warn_of_versions(self._job, self._exchange.offers())
        if not self._wake.is_set() and not self._connect:  # a Connect client cannot be sure that the tasks run
            self._warn_if_unheard()

    def results(self) -> list[bytes]:
        is_set_within(self._wake)
        if not self._stage.wait(_ROWS_SECONDS if self._lost is not None else math.inf) and self._lost is not None:
            raise failure_of(self._lost)
        if (error := self._stage.error) is not None:
            raise LaunchError(self._spark_failure(error)) from error
        if self._job.has_rows and not self._stage.rows:
            raise no_rows()  # Spark starts no tasks if it learns early enough that there are no rows
        self._warn_if_unheard()
        return results_of(self._stage.rows, self._job.num_proc)

    def _spark_failure(self, error: BaseException) -> str:
        tasks = self._exchange.tasks() if self._exchange.heard else None  # None: they cannot reach this driver
        return spark_failure(error, self._stage.host_of, self._stage.task_hosts(), tasks)

    def close(self) -> None:
        self._stack.close()

    def _wake_waiters(self) -> None:
        self._stream.started.set()
        self._wake.set()

    def _warn_if_unheard(self) -> None:
        """Warn where to find the output if the ranks run, or ran, but no task has reached this driver."""
        if self._exchange.heard or self._unheard_warned:
            return
        self._unheard_warned = True
        logger.warning(
            "No task of this job has reached this driver (%s). If executors cannot connect to it, the ranks' output is "
            "in the executors' logs. Check spark.driver.host and the network, or pass "
            "stdout=sparkhvd.LogFiles(store, ...).",
            ", ".join(self._driver),
        )

    def _on_task_lost(self, task: TaskStatus, error: OSError) -> None:
        """End the job; Spark itself would notice only after ``spark.network.timeout``, two minutes by default."""
        if not self._exchange.is_superseded(task):
            self._lost = self._lost or lost_task(task, error)
            self._wake_waiters()

    def _on_tasks_missing(self, tasks: Mapping[int, str]) -> None:
        """End the job: some tasks are missing, and all other tasks wait for them."""
        hosts = {**self._stage.task_hosts(), **{index: host for index, host in tasks.items() if host}}
        self._lost = self._lost or tasks_not_ready(list(tasks), hosts, self._job.start_timeout, self._job.has_rows)
        self._wake_waiters()
