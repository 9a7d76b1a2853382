"""``run``: one function, once per rank, on the cluster of a Spark session."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TextIO, TypeVar
from urllib.parse import urlsplit

import cloudpickle

from sparkhvd.config import changed_environment, from_environment, notice_without_effect
from sparkhvd.deadline import Deadline
from sparkhvd.driver.launchers.barrier import BarrierLauncher
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.payload import pickle_call
from sparkhvd.driver.slots import describe_cluster, is_connect, refuse_dynamic_allocation, reserve
from sparkhvd.errors import ConfigError, LaunchError
from sparkhvd.rpc.addresses import LOOPBACK, address_to_bind, is_loopback, outgoing_address
from sparkhvd.rpc.server import Server
from sparkhvd.task.job import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Result = TypeVar("Result")


def run(  # noqa: PLR0917 - the order of the arguments is Horovod's
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    env: Mapping[str, str | None] | None = None,
    start_timeout: float | None = None,
    *,
    spark: SparkSession | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    prefix_output_with_timestamp: bool = False,
    preload: Sequence[str] = (),
) -> list[Result]:
    """Run ``fn`` in ``num_proc`` processes on the Spark cluster, connected through ``hvd.init()``.

    Example:
        >>> def rank_and_size():
        ...     import sparkhvd.torch as hvd
        ...
        ...     hvd.init()
        ...     return hvd.rank(), hvd.size()
        >>> sparkhvd.run(rank_and_size, num_proc=2)  # doctest: +SKIP
        [(0, 2), (1, 2)]

    Args:
        fn: runs once per rank, in a process of its own. It is sent with its code when it is defined in the main script,
            a notebook or a module that is not an installed package.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: number of ranks; None starts as many as the cluster has slots.
        env: added to the executors' own environment; None as a value removes a variable. The ``SPARKHVD_*`` settings of
            the driver hold on all ranks.
        start_timeout: seconds within which all ranks must have started; None takes ``SPARKHVD_START_TIMEOUT`` (600).
        spark: the session to use; None takes the active one.
        stdout: where the ranks' stdout goes, each line as ``[rank]<stdout>:line``; None is ``sys.stdout``.
        stderr: the same for stderr.
        verbose: 0 leaves the ranks' output in the executors' logs, 1 streams it, 2 adds sparkhvd's own debug lines.
        prefix_output_with_timestamp: whether every line starts with the time of its arrival.
        preload: modules that the processes import while they wait for each other.

    Returns:
        What ``fn`` returned on each rank, ordered by rank; 256 MB in all at most.

    Raises:
        SlotsError: the cluster has fewer slots than ``num_proc``.
        StartTimeoutError: there are enough slots, but they stayed busy, or a process did not get ready.
        RankFailedError: ``fn`` raised, or its process ended; the message carries the first failing rank's traceback.
        LaunchError: there is no session, ``fn`` cannot be sent, or Spark lost the job.
        ConfigError: an argument has a value that cannot work.
    """
    changes = checked_environment(env)
    if num_proc is not None and (isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1):
        raise ConfigError(f"num_proc={num_proc!r} is not a number of processes; give 1 or more, or None for all slots.")
    session = spark if spark is not None else active_session()
    environment = changed_environment(changes)
    config = from_environment(environment)
    notice_without_effect(environment)
    timeout = config.start_timeout if start_timeout is None else float(start_timeout)
    if not timeout > 0:
        raise ConfigError(f"start_timeout={start_timeout!r} is not above 0 seconds.")
    payload = pickle_call(fn, args, kwargs or {})
    refuse_dynamic_allocation(session)
    deadline = Deadline.after(timeout)
    job = Job(
        payload=payload,
        num_proc=reserve(describe_cluster(session), num_proc, deadline),
        env=tuple(changes.items()),
        preload=tuple(preload),
        config=config,
        start_timeout=timeout,
        log_secret=secrets.token_bytes(32),
        stream_output=verbose > 0,
        log_level=_log_level(verbose) if config.log_level is None else config.log_level,
    )
    started = threading.Event()
    stream = LogStream(stdout, stderr, prefix_output_with_timestamp, started.set)
    return [cloudpickle.loads(content) for content in _launch(session, job, stream, started, deadline)]


def active_session() -> SparkSession:
    """The session that is active in this thread or was the last one made.

    Raises:
        LaunchError: there is none.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - pyspark is loaded when a job is run, not before

    session = SparkSession.getActiveSession()
    if session is None:
        raise LaunchError(
            "There is no active SparkSession. Make one with SparkSession.builder.getOrCreate(), or pass spark=."
        )
    return session


def checked_environment(env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """The user's ``env``, copied.

    Raises:
        ConfigError: a name or value is not a string.
    """
    changes = dict(env or {})
    for name, value in changes.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            raise ConfigError(
                f"env[{name!r}] has a value of type {type(value).__name__}; names and values are strings."
            )
    return changes


def _launch(
    session: SparkSession, job: Job, stream: LogStream, started: threading.Event, deadline: Deadline
) -> list[bytes]:
    own_host, bind_host = log_hosts(session)
    with Server(job.log_secret, stream, bind_host, name="sparkhvd-log") as server:
        addresses = tuple(dict.fromkeys([(bind_host, server.port), (own_host, server.port)]))
        launcher = BarrierLauncher(session, started)
        with closing(launcher.launch(job.with_log_addresses(addresses))) as handle:
            handle.wait_started(deadline)
            return handle.results()


def log_hosts(session: SparkSession) -> tuple[str, str]:
    """The name of this driver's host for the executors, and the local address that the log stream binds."""
    if is_connect(session):
        remote = urlsplit(str(session.client.host)).hostname or str(session.client.host)
        address = LOOPBACK if is_loopback(remote) else outgoing_address(remote)
        return address, address
    master = str(session.sparkContext.master)
    own_host = str(session.conf.get("spark.driver.host", LOOPBACK))
    cluster_host = urlsplit(master).hostname if master.startswith("spark://") else ""
    if master.startswith("local") or is_loopback(own_host):
        return LOOPBACK, LOOPBACK
    return own_host, address_to_bind(own_host, [cluster_host or "192.0.2.1"])


def _log_level(verbose: int) -> int:
    if verbose <= 0:
        return logging.WARNING
    return logging.INFO if verbose == 1 else logging.DEBUG
