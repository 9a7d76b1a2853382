"""The default launcher: one Spark barrier stage whose tasks start one worker each."""

from __future__ import annotations

import functools
from contextlib import ExitStack

from sparkhvd.deadline import Deadline
from sparkhvd.driver.driver_address import log_hosts
from sparkhvd.driver.launcher import LaunchHandle, LaunchRequest
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.resources import profile_of
from sparkhvd.driver.results import results_of, spark_failure
from sparkhvd.driver.slots import reserve_tasks
from sparkhvd.driver.stage import BarrierStage
from sparkhvd.errors import LaunchError
from sparkhvd.rpc.server import Server
from sparkhvd.task.job import Job
from sparkhvd.task.main import run_task


class BarrierLauncher:
    """Starts jobs on the cluster of a session."""

    def __init__(self, request: LaunchRequest) -> None:
        self._spark = request.session()
        self._request = request

    def reserve(self, deadline: Deadline) -> int:
        return reserve_tasks(self._spark, self._request.num_proc, self._request.resources, deadline)

    def launch(self, job: Job, stream: LogStream) -> LaunchHandle:
        return BarrierHandle(self._request, job, stream)


class BarrierHandle:
    """The stage, and the server that takes its output."""

    def __init__(self, request: LaunchRequest, job: Job, stream: LogStream) -> None:
        spark = request.session()
        self._job = job
        self._stream = stream
        own_host, bind_host = log_hosts(spark)
        with ExitStack() as stack:
            server = stack.enter_context(Server(job.log_secret, stream, bind_host, name="sparkhvd-log"))
            addresses = tuple(dict.fromkeys([(bind_host, server.port), (own_host, server.port)]))
            task = functools.partial(run_task, job.with_log_addresses(addresses))
            profile = profile_of(spark, request.resources)
            self._stage = BarrierStage(spark, job.num_proc, task, profile, stream.started.set, request.rows)
            stack.callback(self._stage.close)
            self._stack = stack.pop_all()

    def wait_started(self, deadline: Deadline) -> None:
        self._stage.wait_started(self._stream.started, deadline, self._job.start_timeout)

    def results(self) -> list[bytes]:
        self._stage.wait()
        if self._stage.error is not None:
            raise LaunchError(spark_failure(self._stage.error)) from self._stage.error
        return results_of(self._stage.rows, self._job.num_proc)

    def close(self) -> None:
        self._stack.close()
