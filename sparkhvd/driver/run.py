"""``run``: runs a function once per rank on the cluster of a Spark session."""

from __future__ import annotations

import errno
import inspect
import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, TextIO, TypeVar

from sparkhvd._util.counts import plain_count
from sparkhvd._util.processes.process_identity import ProcessOnMachine
from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.compat.horovod import unknown_argument
from sparkhvd.config import Config, changed_environment, warn_ignored_variables
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import RunOptions, check_counts, check_options, checked_environment, split_arguments
from sparkhvd.driver.host_process import SshOptions
from sparkhvd.driver.hosts import parse_hosts
from sparkhvd.driver.launcher import Launcher, LaunchHandle, LaunchRequest, choose_launcher, launcher_class
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.results import unpickled
from sparkhvd.driver.spark.encryption import unencrypted_spark
from sparkhvd.driver.spark.gang_queue import turn_of
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
    priority: int = 0,
    **unknown: Never,
) -> list[Result]:
    """Run ``fn`` in ``num_proc`` processes on the Spark cluster, connected by ``hvd.init()``.

    Examples:
        >>> def rank_and_size():
        ...     import sparkhvd.torch as hvd
        ...
        ...     hvd.init()
        ...     return hvd.rank(), hvd.size()
        >>> sparkhvd.run(rank_and_size, num_proc=2)  # doctest: +SKIP
        [(0, 2), (1, 2)]

    The arguments by subject:

    - the function: ``fn``, ``args``, ``kwargs``, ``preload``, ``rows``
    - the ranks: ``num_proc``, ``cpus_per_task``, ``gpus_per_task``, ``env``, ``executable``
    - the launcher: ``launcher``, ``spark``, ``use_gloo``, ``use_mpi``, ``extra_mpi_args``, ``hosts``, ``ssh_port``,
      ``ssh_identity_file``, ``nics``
    - the start: ``start_timeout``, ``priority``
    - the output: ``stdout``, ``stderr``, ``verbose``, ``output_filename``, ``prefix_output_with_timestamp``

    Args:
        fn: runs once per rank, in a process of its own. Its code is sent to the ranks if it is defined in the main
            script, a notebook or a module that is not an installed package.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: number of ranks; None starts as many as the cluster has slots (or this machine has cores, for
            ``launcher="local"``).
        start_timeout: seconds within which all ranks must have started. The time that the job waits for other jobs of
            this driver does not count. None takes ``SPARKHVD_START_TIMEOUT`` (600).
        use_mpi: True selects ``launcher="mpi"``.
        use_gloo: True selects ``launcher="barrier"``.
        extra_mpi_args: additional arguments of ``mpirun``, as one string or a list.
        env: variables to add to the executors' own environment; the value None removes a variable. The ``SPARKHVD_*``
            settings of the driver apply to all ranks.
        stdout: destination of the ranks' stdout, each line as ``[rank]<stdout>:line``; None means ``sys.stdout``.
            ``sparkhvd.LogFiles`` writes it to files of a Store, even if executors cannot reach the driver.
        stderr: the same for the ranks' stderr; None means ``sys.stderr``.
        verbose: 0 leaves output in the executors' logs unless ``stdout``, ``stderr`` or ``output_filename`` is set, 1
            shows it, 2 adds sparkhvd's own debug lines.
        nics: network interfaces whose addresses the ranks use; None uses those that all hosts can reach.
        prefix_output_with_timestamp: whether every line starts with the time of its arrival.
        executable: the Python of the ranks; None means the Python of the Spark tasks.
        spark: the session to use; None takes the active one.
        launcher: ``barrier`` starts the ranks in a Spark barrier stage, and ``mpi`` lets Open MPI start them in the
            tasks of such a stage. Without Spark, ``local`` starts them on this machine, ``ssh`` on other machines, and
            ``ray`` on a Ray cluster. ``auto`` is ``barrier``, unless ``use_mpi``, ``extra_mpi_args`` or ``hosts``
            selects another launcher.
        hosts: the machines of ``launcher="ssh"``, which starts the ranks there without Spark, for example
            ``host1:2,host2:2``. Python and sparkhvd must be installed there under the same paths.
        ssh_port: port of the hosts' ssh servers; None uses ssh's configuration.
        ssh_identity_file: the private key for the ssh servers.
        gpus_per_task: GPUs of each rank, for this job only; None uses the session's ``spark.task.resource.gpu.amount``.
            Works on standalone, YARN, Kubernetes and local-cluster. With ``launcher="ray"``, None means no GPU.
        cpus_per_task: cores of each rank, for this job only; None uses the session's ``spark.task.cpus``, or one core
            with ``launcher="ray"``.
        output_filename: a folder in which each rank's output is also saved, in ``rank.<number>/stdout`` and ``stderr``.
        preload: modules that the processes import while they wait for each other.
        rows: a DataFrame with ``num_proc`` partitions, one for each rank; ``sparkhvd.config.given_rows()`` returns the
            rank's partition as a local Arrow file.
        priority: if jobs of this driver wait for slots, those of a higher priority start first. Jobs of the same
            priority start in the order of their calls.
        **unknown: not accepted; the error for another keyword, such as Horovod's ``np``, names the right one.

    Returns:
        The results of ``fn``, ordered by rank; at most 256 MB in all.

    Raises:
        SlotsError: the cluster has fewer slots than ``num_proc``.
        StartTimeoutError: there are enough slots, but they stayed busy, or a task or a process did not become ready.
        RankFailedError: ``fn`` raised, or its process ended; the message has the first failing rank's traceback.
        LaunchError: there is no session, ``fn`` cannot be sent, Spark aborted the job, or a result cannot be unpickled
            here.
        ConfigError: an argument has a value that cannot work.
        TypeError: an argument is unknown.
    """
    for name in unknown:
        raise TypeError(unknown_argument(name, inspect.signature(run).parameters))
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}. Pass it without calling it, like run(train, args=(...,)).")
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise TypeError(f"args={args!r} must be a tuple of arguments for fn, like args=({args!r},).")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs={kwargs!r} must be a dict of arguments for fn, like kwargs={{'epochs': 3}}.")
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
        priority=priority,
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
    **others: object,  # noqa: ARG001 - arguments that do not decide where the ranks run
) -> tuple[str, LaunchRequest]:
    """Return the name of the launcher for arguments of ``run``, and its request.

    Raises:
        ConfigError: an argument has a value that cannot work, or arguments contradict each other.
    """
    check_counts(num_proc, gpus_per_task, cpus_per_task)
    request = LaunchRequest(
        num_proc=plain_count(num_proc),
        spark=spark,
        resources=TaskResources(plain_count(cpus_per_task), gpus_per_task),
        extra_mpi_args=split_arguments("extra_mpi_args", extra_mpi_args),
        hosts=parse_hosts(hosts) if hosts is not None else (),
        access=SshOptions(ssh_port, ssh_identity_file),
        rows=rows,
    )
    return choose_launcher(launcher, use_mpi, use_gloo, request), request


def run_with(  # noqa: PLR0917
    request: LaunchRequest,
    launcher: str,
    options: RunOptions,
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Run ``fn`` with the chosen launcher; see ``run``."""
    with launched(request, launcher, options, fn, args, kwargs) as handle:
        return unpickled(handle.results())


@contextmanager
def launched(  # noqa: PLR0917
    request: LaunchRequest,
    launcher: str,
    options: RunOptions,
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    make: Callable[[LaunchRequest], Launcher] | None = None,
) -> Iterator[LaunchHandle]:
    """Yield the handle of a job that runs ``fn``; leaving ``with`` ends the job. See ``run``.

    Args:
        request: the arguments that decide where the ranks run.
        launcher: the name of the chosen launcher.
        options: the other arguments of ``run``.
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        make: creates the launcher; None calls its class.
    """
    check_counts(request.num_proc, request.resources.gpus, request.resources.cpus)
    check_options(options, launcher)
    changes = checked_environment(options.env)
    kind = launcher_class(launcher)
    instance = (make or kind)(request)
    environment = changed_environment(changes)
    config = options.config(environment)
    warn_ignored_variables(environment)
    if config.encrypt and launcher != "local":
        check_encryption(request.session() if kind.on_spark else None)
    num_proc = instance.reserve(Deadline.after(config.start_timeout))
    with ExitStack() as stack:
        if kind.on_spark:
            stack.enter_context(turn_of(request.session(), request.resources, num_proc, options.priority))
        deadline = Deadline.after(config.start_timeout)
        payload = pickle_call(fn, args, kwargs or {}, _importable(launcher, kind, request, options))
        job = replace(new_job(payload, num_proc, changes, config, options), has_rows=request.rows is not None)
        stream = stack.enter_context(closing(open_stream(options, job.num_proc)))
        handle = stack.enter_context(closing(_launch(instance, job, stream)))
        handle.wait_started(deadline)
        yield handle


def new_job(
    payload: bytes, num_proc: int, changes: Mapping[str, str | None], config: Config, options: RunOptions
) -> Job:
    """Return a job with a secret of its own; ``changes`` are changes to the ranks' environment."""
    return Job(
        payload=payload,
        num_proc=num_proc,
        env=tuple(changes.items()),
        preload=tuple(options.preload),
        config=config,
        driver=ProcessOnMachine.own(),
        secret=secrets.token_bytes(32),
        streamed=streamed(options),
        log_files=log_files(stdout=options.stdout, stderr=options.stderr),
        log_level=log_level_of(options.verbose) if config.log_level is None else config.log_level,
        executable=options.executable or "",
        nics=tuple(options.nics),
        versions=()
        if options.executable
        else frameworks_in_use(options.preload),  # another Python has its own packages
    )


def check_encryption(session: SparkSession | None) -> None:
    """Check that this host can encrypt a job's traffic, and warn if Spark does not encrypt its own.

    Raises:
        LaunchError: this host cannot encrypt.
    """
    require_encryption(socket.gethostname())
    if session is not None and (warning := unencrypted_spark(session)):
        logger.warning(warning)


def _importable(launcher: str, kind: type[Launcher], request: LaunchRequest, options: RunOptions) -> Importable:
    """Return the function that finds out which of the user's modules the ranks can import."""
    if options.executable:  # another Python may lack the modules' dependencies
        return importable_nowhere
    if launcher == "local":
        return importable_here
    if kind.on_spark:
        return partial(importable_on, request.session(), start_timeout=options.start_timeout)
    return importable_nowhere


def open_stream(options: RunOptions, num_proc: int) -> LogStream:
    """Return the receiver of the ranks' output."""
    folder = Path(options.output_filename) if options.output_filename is not None else None
    shown = options.verbose > 0
    return LogStream(options.stdout, options.stderr, options.prefix_output_with_timestamp, folder, num_proc, shown)


def streamed(options: RunOptions) -> tuple[str, ...]:
    """Return the streams to send to the driver: all if output is shown or saved, else those with a destination."""
    all_streams = options.verbose > 0 or options.output_filename is not None
    sinks = {"stdout": options.stdout, "stderr": options.stderr}
    return tuple(name for name, sink in sinks.items() if all_streams or sink is not None)


def _launch(launcher: Launcher, job: Job, stream: LogStream) -> LaunchHandle:
    try:
        return launcher.launch(job, stream)
    except (CollectiveError, OSError) as error:
        if isinstance(error, LaunchError):
            raise
        if isinstance(error, OSError) and error.errno == errno.E2BIG:
            raise LaunchError(
                f"No rank can be started on host {socket.gethostname()}: the environment variables of this process and "
                f"of env are too large together ({error.strerror}). Pass large values as arguments of fn."
            ) from error
        raise LaunchError(
            f"The driver on host {socket.gethostname()} cannot serve the job: {str(error).rstrip('.')}. No rank was "
            "started. If all ports are in use, list their users with `ss -tan`, or widen net.ipv4.ip_local_port_range."
        ) from error


def log_files(**streams: TextIO | LogFiles | None) -> tuple[tuple[str, LogFiles], ...]:
    """Return the streams that go to files of a Store."""
    return tuple((name, sink) for name, sink in streams.items() if isinstance(sink, LogFiles))


def log_level_of(verbose: int) -> int:
    """Return the level of the ranks' ``sparkhvd`` logger."""
    if verbose <= 0:
        return logging.WARNING
    return logging.INFO if verbose == 1 else logging.DEBUG
