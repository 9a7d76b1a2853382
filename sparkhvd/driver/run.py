"""``run``: one function, once per rank, on the cluster of a Spark session."""

from __future__ import annotations

import inspect
import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, TextIO, TypeVar

import cloudpickle

from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.compat.horovod import unknown_argument
from sparkhvd.config import changed_environment, from_environment, warn_ignored_variables
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import RunOptions, check_counts, check_options, checked_environment, split_arguments
from sparkhvd.driver.host_process import SshOptions
from sparkhvd.driver.hosts import parse_hosts
from sparkhvd.driver.launcher import Launcher, LaunchHandle, LaunchRequest, choose, launcher_for
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.spark.encryption import unencrypted_spark
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.driver.user_code.importable import importable_here, importable_nowhere, importable_on
from sparkhvd.driver.user_code.payload import pickle_call
from sparkhvd.driver.user_code.pickling import Importable
from sparkhvd.errors import CollectiveError, LaunchError
from sparkhvd.rpc.protection import require_encryption
from sparkhvd.task.host.versions import frameworks_in_use
from sparkhvd.task.job import Job
from sparkhvd.task.log_files import LogFiles

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Result = TypeVar("Result")


@brief_errors
def run(  # noqa: PLR0917 - the order of the arguments is Horovod's
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | Sequence[str] | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | LogFiles | None = None,
    stderr: TextIO | LogFiles | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    spark: SparkSession | None = None,
    launcher: str = "auto",
    hosts: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    gpus_per_task: float | None = None,
    cpus_per_task: int | None = None,
    output_filename: str | None = None,
    preload: Sequence[str] = (),
    rows: DataFrame | None = None,
    **unknown: Never,
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
        num_proc: number of ranks; None starts as many as the cluster has slots (or this machine has cores, for
            ``launcher="local"``).
        start_timeout: seconds within which all ranks must have started; None takes ``SPARKHVD_START_TIMEOUT`` (600).
        use_mpi: True is ``launcher="mpi"``.
        use_gloo: True is ``launcher="barrier"``.
        extra_mpi_args: more arguments of ``mpirun``, as one string or a list.
        env: added to the executors' own environment; None as a value removes a variable. The ``SPARKHVD_*`` settings of
            the driver hold on all ranks.
        stdout: where the ranks' stdout goes, each line as ``[rank]<stdout>:line``; None is ``sys.stdout``.
            ``sparkhvd.LogFiles`` puts it into files of a Store, also where executors cannot reach the driver.
        stderr: the same for stderr.
        verbose: 0 leaves output in the executors' logs to which ``stdout``, ``stderr`` and ``output_filename`` give no
            place, 1 shows it, 2 adds sparkhvd's own debug lines.
        nics: network interfaces whose addresses the ranks use; None finds out which ones all hosts can reach.
        prefix_output_with_timestamp: whether every line starts with the time of its arrival.
        executable: the Python of the ranks; None is the one that the Spark tasks run with.
        spark: the session to use; None takes the active one.
        launcher: ``barrier`` starts the ranks in a Spark barrier stage, ``mpi`` lets Open MPI start them in the
            tasks of such a stage, ``local`` starts them beside this process and ``ssh`` on other machines, both without
            Spark; ``auto`` is ``barrier``, unless ``use_mpi``, ``extra_mpi_args`` or ``hosts`` ask for another.
        hosts: for ``launcher="ssh"``, which starts the ranks on these machines without Spark, for example
            ``host1:2,host2:2``. Python and sparkhvd have to be installed there under the same paths.
        ssh_port: where the hosts' ssh servers listen; None leaves it to ssh's configuration.
        ssh_identity_file: the private key for them.
        gpus_per_task: GPUs of each rank, where it is not what the session says (``spark.task.resource.gpu.amount``);
            for this job alone. On standalone, YARN, Kubernetes and local-cluster.
        cpus_per_task: cores of each rank, where it is not what the session says (``spark.task.cpus``).
        output_filename: a folder in which each rank's output is kept as well, in ``rank.<number>/stdout`` and
            ``stderr``.
        preload: modules that the processes import while they wait for each other.
        rows: a DataFrame with ``num_proc`` partitions; each goes to one rank, which finds it with
            ``sparkhvd.config.given_rows()`` as a local Arrow file.
        **unknown: nothing; other keywords, such as Horovod's ``np``, are refused with the right name.

    Returns:
        What ``fn`` returned on each rank, ordered by rank; 256 MB in all at most.

    Raises:
        SlotsError: the cluster has fewer slots than ``num_proc``.
        StartTimeoutError: there are enough slots, but they stayed busy, or a task or a process did not get ready.
        RankFailedError: ``fn`` raised, or its process ended; the message carries the first failing rank's traceback.
        LaunchError: there is no session, ``fn`` cannot be sent, or Spark lost the job.
        ConfigError: an argument has a value that cannot work.
        TypeError: there is no such argument.
    """
    for name in unknown:
        raise TypeError(unknown_argument(name, inspect.signature(run).parameters))
    if not callable(fn):
        raise TypeError(f"run() takes a function, not {fn!r}: give it as run(train, args=(...,)), without calling it.")
    name, request = launch_request(
        num_proc=num_proc,
        spark=spark,
        launcher=launcher,
        use_mpi=use_mpi,
        use_gloo=use_gloo,
        extra_mpi_args=extra_mpi_args,
        hosts=hosts,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        gpus_per_task=gpus_per_task,
        cpus_per_task=cpus_per_task,
        rows=rows,
    )
    options = RunOptions(
        start_timeout=start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics if isinstance(nics, str) else tuple(nics or ()),
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
        output_filename=output_filename,
        preload=preload,
    )
    return run_with(request, name, options, fn, args, kwargs)


def launch_request(
    *,
    num_proc: int | None = None,
    spark: SparkSession | None = None,
    launcher: str = "auto",
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | Sequence[str] | None = None,
    hosts: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    gpus_per_task: float | None = None,
    cpus_per_task: int | None = None,
    rows: DataFrame | None = None,
    **others: object,  # noqa: ARG001 - what does not say where the ranks run
) -> tuple[str, LaunchRequest]:
    """The launcher for arguments of ``run``, and what that is told.

    Raises:
        ConfigError: one has a value that cannot work, or they contradict each other.
    """
    check_counts(num_proc, gpus_per_task, cpus_per_task)
    request = LaunchRequest(
        num_proc=num_proc,
        spark=spark,
        resources=TaskResources(cpus_per_task, gpus_per_task),
        extra_mpi_args=split_arguments("extra_mpi_args", extra_mpi_args),
        hosts=parse_hosts(hosts) if hosts is not None else (),
        ssh=SshOptions(ssh_port, ssh_identity_file),
        rows=rows,
    )
    return choose(launcher, use_mpi, use_gloo, request), request


def run_with(  # noqa: PLR0917
    request: LaunchRequest,
    launcher: str,
    options: RunOptions,
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Result]:
    """``run`` once it is known where."""
    check_counts(request.num_proc, request.resources.gpus, request.resources.cpus)
    check_options(options, launcher)
    changes = checked_environment(options.env)
    chosen = launcher_for(launcher, request)
    environment = changed_environment(changes)
    config = from_environment(environment)
    if options.start_timeout is not None:
        config = replace(config, start_timeout=float(options.start_timeout))  # the ranks' init() waits as long
    warn_ignored_variables(environment)
    if config.encrypt and launcher != "local":
        require_encryption(socket.gethostname())
        if launcher != "ssh" and (warning := unencrypted_spark(request.session())):
            logger.warning(warning)
    payload = pickle_call(fn, args, kwargs or {}, _importable(launcher, request, options))
    deadline = Deadline.after(config.start_timeout)
    job = Job(
        payload=payload,
        num_proc=chosen.reserve(deadline),
        env=tuple(changes.items()),
        preload=tuple(options.preload),
        config=config,
        secret=secrets.token_bytes(32),
        streamed=_streamed(options),
        log_files=_log_files(stdout=options.stdout, stderr=options.stderr),
        log_level=_log_level(options.verbose) if config.log_level is None else config.log_level,
        executable=options.executable or "",
        nics=tuple(options.nics),
        gives_rows=request.rows is not None,
        versions=()
        if options.executable
        else frameworks_in_use(options.preload),  # another Python has its own packages
    )
    with closing(_stream(options, job.num_proc)) as stream, closing(_launched(chosen, job, stream)) as handle:
        handle.wait_started(deadline)
        return [cloudpickle.loads(content) for content in handle.results()]


def _importable(launcher: str, request: LaunchRequest, options: RunOptions) -> Importable:
    """What tells which of the user's modules the ranks can import."""
    if launcher == "ssh" or options.executable:  # another Python may lack what the modules import
        return importable_nowhere
    return importable_here if launcher == "local" else partial(importable_on, request.session())


def _stream(options: RunOptions, num_proc: int) -> LogStream:
    kept = Path(options.output_filename) if options.output_filename is not None else None
    shown = options.verbose > 0
    return LogStream(options.stdout, options.stderr, options.prefix_output_with_timestamp, kept, num_proc, shown)


def _streamed(options: RunOptions) -> tuple[str, ...]:
    """The streams that somebody takes here: whoever gives a place for the output wants it there."""
    taken = options.verbose > 0 or options.output_filename is not None
    given = {"stdout": options.stdout, "stderr": options.stderr}
    return tuple(name for name, place in given.items() if taken or place is not None)


def _launched(launcher: Launcher, job: Job, stream: LogStream) -> LaunchHandle:
    try:
        return launcher.launch(job, stream)
    except (CollectiveError, OSError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"The driver on host {socket.gethostname()} cannot serve the job: {error}. No rank was started. Where all "
            "ports are in use, see who holds them (ss -tan), or widen net.ipv4.ip_local_port_range."
        ) from error


def _log_files(**streams: TextIO | LogFiles | None) -> tuple[tuple[str, LogFiles], ...]:
    return tuple((name, given) for name, given in streams.items() if isinstance(given, LogFiles))


def _log_level(verbose: int) -> int:
    if verbose <= 0:
        return logging.WARNING
    return logging.INFO if verbose == 1 else logging.DEBUG
