"""``run_elastic``: runs a function in processes whose number may change during the run."""

from __future__ import annotations

import logging
import queue
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from sparkhvd._util.addresses import LOOPBACK
from sparkhvd._util.counts import is_count, plain_count
from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.comm.connect.commit_folder import CommitFolder
from sparkhvd.compat.horovod import not_installed
from sparkhvd.config import Config, changed_environment, warn_ignored_variables
from sparkhvd.data.spark.settings import with_spark_credentials
from sparkhvd.driver.arguments import (
    RunOptions,
    allow_local_ranks,
    check_counts,
    check_options,
    check_seconds,
    checked_environment,
)
from sparkhvd.driver.elastic.controller import Controller
from sparkhvd.driver.elastic.discovery import Discovery, DiscoveryFunction, DiscoveryScript, DiscoveryThread
from sparkhvd.driver.elastic.driver_addresses import driver_addresses
from sparkhvd.driver.elastic.host_workers import HostWorkers
from sparkhvd.driver.elastic.lease_workers import LeaseCluster, LeaseWorkers
from sparkhvd.driver.elastic.local_workers import LocalWorkers, own_host
from sparkhvd.driver.elastic.membership_server import MembershipServer
from sparkhvd.driver.elastic.policy import ANSWER_SECONDS, MAX_SAME_ERRORS, Limits
from sparkhvd.driver.elastic.roster import Cooldown
from sparkhvd.driver.elastic.spark_leases import SparkLeases
from sparkhvd.driver.elastic.workers import DiscoveryFailed, Event, Offered, Workers
from sparkhvd.driver.host_process import SrunOptions, SshOptions
from sparkhvd.driver.hosts import Host, check_slots, parse_hosts
from sparkhvd.driver.launcher import LaunchRequest
from sparkhvd.driver.results import unpickled
from sparkhvd.driver.run import check_encryption, new_job, open_stream
from sparkhvd.driver.spark.gang_queue import turn_of
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.driver.user_code.importable import importable_here, importable_nowhere, importable_on
from sparkhvd.driver.user_code.payload import pickle_call
from sparkhvd.driver.user_code.pickling import Importable
from sparkhvd.errors import ConfigError, LaunchError, StoreError
from sparkhvd.store import layout, store_at
from sparkhvd.store.protocol import Store
from sparkhvd.task.job import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DEFAULT_ELASTIC_TIMEOUT = 600.0
DEFAULT_COMMIT_INTERVAL = 60.0
_RESTARTS_WITH_STORE = 3
ELASTIC_LAUNCHERS = ("auto", "spark", "local", "ssh", "ray")
# The host_timeout of elastic jobs, which continue without a lost host.
_HOST_SECONDS = 2.0


@dataclass(frozen=True)
class ElasticOptions:
    """The arguments of ``run_elastic`` that concern the number and the locations of ranks, mostly under the same names.

    Attributes:
        launcher: ``spark``, ``local``, ``ssh`` or ``ray``.
        hosts: the hosts of ``ssh``, unless ``discovery`` finds them.
        access: how to reach the hosts.
        resources: the resources of each rank on Ray.
    """

    num_proc: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    elastic_timeout: float | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    max_restarts: int | None = 0
    max_same_errors: int | None = None
    store: Store | None = None
    commit_interval: float = DEFAULT_COMMIT_INTERVAL
    discovery: Discovery | None = field(default=None, repr=False)
    launcher: str = "local"
    hosts: tuple[Host, ...] = ()
    access: SshOptions | SrunOptions = field(default_factory=SshOptions)
    resources: TaskResources = field(default_factory=TaskResources)


@brief_errors
def run_elastic(  # noqa: PLR0917 - the order of the arguments is Horovod's
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str | None] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    *,
    spark: SparkSession | None = None,
    launcher: str = "auto",
    discovery: str | DiscoveryScript | Callable[[], Mapping[str, int]] | None = None,
    hosts: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    gpus_per_task: float | None = None,
    cpus_per_task: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    max_restarts: int | None = None,
    max_same_errors: int | None = None,
    store: Store | str | None = None,
    commit_interval: float = DEFAULT_COMMIT_INTERVAL,
    executable: str | None = None,
    output_filename: str | None = None,
    preload: Sequence[str] = (),
    priority: int = 0,
) -> list[Result]:
    """Run ``fn`` in processes whose number may change while it runs; ``hvd.elastic.run`` in ``fn`` handles changes.

    If a rank is lost, the others continue from their last commit, and a new process replaces it as soon as there is a
    slot. New ranks get the state from the others.

    Examples:
        >>> def train():
        ...     import sparkhvd.torch as hvd
        ...
        ...     hvd.init()
        ...     state = hvd.elastic.ObjectState(step=0)
        ...     return train_loop(state)  # decorated with @hvd.elastic.run
        >>> sparkhvd.run_elastic(train, num_proc=2, min_num_proc=1)  # doctest: +SKIP

    Args:
        fn: runs once per rank, in a process of its own.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: number of ranks that the job waits for at its start; None means ``min_num_proc``, or else
            ``max_num_proc``.
        min_num_proc: smallest number of ranks to train with; None means ``num_proc``.
        max_num_proc: largest number of ranks; None means all slots of ``discovery``, ``hosts`` or the Ray cluster, or
            else ``num_proc``. On Spark, the job requests this many tasks of ``spark.task.cpus`` cores each, as long as
            it runs.
        start_timeout: seconds within which the first ranks, and each later rank, must have started. The time that the
            job waits for other jobs of this driver does not count. None takes ``SPARKHVD_START_TIMEOUT`` (600).
        elastic_timeout: seconds within which enough ranks must be ready again after a loss; None means 600.
        reset_limit: largest number of changes of the ranks; None sets no limit.
        env: variables to add to the ranks' environment; the value None removes a variable.
        stdout: destination of the ranks' stdout, each line as ``[rank]<stdout>:line``; None means ``sys.stdout``.
        stderr: the same for the ranks' stderr; None means ``sys.stderr``.
        verbose: 0 shows no output unless ``stdout``, ``stderr`` or ``output_filename`` is set, 1 shows it, 2 adds
            sparkhvd's own debug lines.
        nics: network interfaces that the ranks use, the same on every host; ``local`` ignores it with a warning.
        prefix_output_with_timestamp: whether every line starts with the time of its arrival.
        spark: the session; None uses the active one.
        launcher: ``spark`` starts the ranks in ordinary Spark tasks, which may come and go with the executors, for
            example under dynamic allocation. Without Spark, ``local`` starts them on this machine, ``ssh`` on other
            machines, and ``ray`` in actors of a Ray cluster, whose nodes may come and go. ``auto`` is ``ssh`` if
            ``hosts`` is set, and ``spark`` otherwise.
        discovery: for ``local``, ``ssh`` and ``ray``: a function that returns the number of slots by host, such as
            ``{"localhost": 2}``, or a script that prints lines of ``host`` or ``host:slots``. It is called once per
            second. With ``local``, None offers ``max_num_proc``, or else ``num_proc``, slots on this machine. With
            ``ray``, hosts are addresses of the cluster's nodes, and None offers the slots of all nodes.
        hosts: for ``ssh`` without ``discovery``: the machines and their slots, for example ``host1:2,host2:2``. Python
            and sparkhvd must be installed there under the same paths.
        ssh_port: port of the hosts' ssh servers; None uses ssh's configuration.
        ssh_identity_file: the private key for the ssh servers.
        gpus_per_task: for ``ray``: the number of GPUs of each rank; None means 0.
        cpus_per_task: for ``ray``: the number of cores of each rank; None means 1.
        cooldown_range: shortest and longest time in seconds without new ranks on a host after failures there; the time
            doubles with each failure. None means (1, 60).
        max_restarts: how many times the job starts again with new ranks after all ranks that held its state were lost.
            None means 3 with ``store``, and 0 otherwise: without a Store, ``fn`` must restore its state by itself, for
            example from a checkpoint.
        max_same_errors: the job fails when ``fn`` has raised the same error this many times. Errors are the same if
            their types and their first lines are equal. A new commit resets the count, and ranks that raise the error
            together count once. None means 3. A ``DataError``, ``ParamError`` or ``MismatchError`` ends the job at
            once.
        store: a Store or its URL, where rank 0 publishes commits. If all ranks are lost, new ones resume from the last
            published commit. All hosts must reach the Store. A job that succeeds deletes its commits.
        commit_interval: seconds from one published commit to the next; 0 publishes every commit, and makes the
            ranks wait while rank 0 writes.
        executable: the Python interpreter of the ranks; None means the one of this process.
        output_filename: a folder in which each rank's output is also saved, in ``rank.<number>/stdout`` and ``stderr``.
        preload: modules that the processes import at their start.
        priority: as in ``sparkhvd.run``, for jobs on Spark.

    Returns:
        The results of ``fn`` of the ranks of the last generation, ordered by rank; at most 256 MB in all.

    Raises:
        RankFailedError: ranks failed, and the job could not continue; the message lists the reasons. ``rank`` and
            ``remote_traceback`` describe the error that ended it.
        StartTimeoutError: fewer than ``min_num_proc`` ranks were ready within ``start_timeout``.
        LaunchError: too few slots were offered for ``elastic_timeout`` seconds, no Spark task could start, or discovery
            failed at the start.
        SlotsError: ``hosts`` have fewer slots than ``num_proc``.
        ConfigError: an argument has a value that cannot work.
        ParamError: ``store`` is neither a Store nor a URL.
        StoreError: there cannot be a Store at this URL.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}. Pass it without calling it.")
    access = SshOptions(ssh_port, ssh_identity_file)
    resources = TaskResources(cpus_per_task, gpus_per_task)
    check_counts(None, resources.gpus, resources.cpus)
    name = choose_elastic_launcher(launcher, spark, discovery, hosts, access, resources)
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
    elastic = ElasticOptions(
        num_proc=num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        max_restarts=max_restarts,
        max_same_errors=max_same_errors,
        store=None if store is None else store_at("store", store),
        commit_interval=commit_interval,
        discovery=_discovery(discovery),
        launcher=name,
        hosts=() if hosts is None else parse_hosts(hosts),
        access=access,
        resources=resources,
    )
    session = LaunchRequest(None, spark).session() if name == "spark" else None
    return run_elastic_with(elastic, options, fn, args, kwargs, session)


def _discovery(source: str | DiscoveryScript | Callable[[], Mapping[str, int]] | None) -> Discovery | None:
    if source is None or isinstance(source, DiscoveryScript):
        return source
    return DiscoveryScript(source) if isinstance(source, str) else DiscoveryFunction(source)


def choose_elastic_launcher(  # noqa: PLR0917
    launcher: str, spark: object, discovery: object, hosts: object, access: SshOptions, resources: TaskResources
) -> str:
    """Return the name of the launcher for arguments of ``run_elastic``.

    Raises:
        ConfigError: the launcher is unknown, or the arguments contradict each other.
    """
    if launcher not in ELASTIC_LAUNCHERS:
        raise ConfigError(
            f"launcher={launcher!r} cannot start elastic jobs; expected one of {list(ELASTIC_LAUNCHERS)}."
        )
    name = launcher if launcher != "auto" else "spark" if hosts is None else "ssh"
    if name == "spark" and discovery is not None:
        raise ConfigError(
            "discovery requires launcher='local', 'ssh' or 'ray'; on Spark, the executors provide the slots."
        )
    if name != "spark" and spark is not None:
        raise ConfigError(f"spark has no effect with launcher={name!r}. Leave one of them out.")
    if name == "ssh" and (hosts is None) == (discovery is None):
        raise ConfigError("launcher='ssh' needs either hosts, for example hosts='host1:2,host2:2', or discovery.")
    if name != "ssh" and hosts is not None:
        raise ConfigError(f"hosts requires launcher='ssh', got launcher={name!r}. Leave one of them out.")
    if name != "ssh" and access != SshOptions():
        raise ConfigError(f"ssh_port and ssh_identity_file require launcher='ssh', got {name!r}.")
    check_elastic_resources(name, resources)
    return name


def check_elastic_resources(launcher: str, resources: TaskResources) -> None:
    """Raise ``ConfigError`` if the launcher of an elastic job cannot reserve the resources."""
    if launcher != "ray" and resources:
        raise ConfigError(
            f"gpus_per_task and cpus_per_task of elastic jobs require launcher='ray', got {launcher!r}. On Spark, set "
            "spark.task.cpus and spark.task.resource.gpu.amount instead."
        )


def run_elastic_with(  # noqa: PLR0917
    elastic: ElasticOptions,
    options: RunOptions,
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    spark: SparkSession | None = None,
) -> list[Result]:
    """Run ``fn`` with the chosen launcher, in the session ``spark`` if it is set; see ``run_elastic``."""
    check_options(options, elastic.launcher)
    changes = checked_environment(options.env)
    environment = changed_environment(changes)
    config = _with_host_timeout(options.config(environment))
    limits, cooldown = check_limits(elastic, config.start_timeout)
    warn_ignored_variables(environment)
    if config.encrypt and elastic.launcher != "local":
        check_encryption(spark)
    max_ranks = limits.max_size or limits.num_proc
    if elastic.launcher == "local":
        allow_local_ranks("num_proc" if max_ranks == limits.num_proc else "max_num_proc", max_ranks)
    with ExitStack() as stack:
        if spark is not None:
            stack.enter_context(turn_of(spark, TaskResources(), max_ranks, options.priority))
        payload = pickle_call(fn, args, kwargs or {}, _importable(elastic.launcher, options, spark))
        job = _elastic_job(new_job(payload, max_ranks, changes, config, options), elastic, spark)
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        stream = open_stream(options, max_ranks)
        stack.callback(stream.close)
        cluster = _lease_cluster(elastic, spark, stack, inbox)
        bind_host, names = _driver_addresses(elastic, cluster)
        limits = replace(limits, answer_timeout=max(ANSWER_SECONDS, config.host_timeout or 0.0))
        membership = MembershipServer(job.secret, inbox, encrypt=config.encrypt, host=bind_host, names=names)
        stack.callback(membership.close)
        workers: Workers
        if cluster is not None:
            workers = LeaseWorkers(cluster, job, max_ranks, limits.min_size, membership.address, stream, inbox)
        elif elastic.launcher == "ssh":
            workers = HostWorkers(job, elastic.access, membership.address, bind_host, stream, inbox)
        else:
            workers = LocalWorkers(job, membership.address, stream, inbox)
        stack.callback(workers.close)
        if cluster is None and elastic.discovery is not None:
            stack.callback(DiscoveryThread(elastic.discovery, inbox.put).close)
        elif cluster is None:  # otherwise the leases offer slots
            inbox.put(Offered(_fixed_slots(elastic.hosts, max_ranks)))
        contents = Controller(limits, cooldown, workers, membership, inbox).run()
    if job.commits is not None:
        _delete_commits(job.commits)
    return unpickled(contents)


def _with_host_timeout(config: Config) -> Config:
    """Return the settings with the ``host_timeout`` of elastic jobs as the default."""
    return config if config.host_timeout is not None else replace(config, host_timeout=_HOST_SECONDS)


def _fixed_slots(hosts: Sequence[Host], max_ranks: int) -> dict[str, int]:
    """Return the slots by host of a job without discovery; without hosts, they are on this machine."""
    return {host.name: host.slots for host in hosts} if hosts else {own_host(): max_ranks}


def _elastic_job(job: Job, elastic: ElasticOptions, spark: SparkSession | None) -> Job:
    """Return a job with its commit folder; on one machine, all ranks share the network and the packages."""
    job = replace(job, commits=_commit_folder(elastic, spark))
    return replace(job, nics=(), versions=()) if elastic.launcher == "local" else job


def _commit_folder(elastic: ElasticOptions, spark: SparkSession | None) -> CommitFolder | None:
    """Return the folder in which the job publishes its commits; None without a Store."""
    if elastic.store is None:
        return None
    store = elastic.store if spark is None else with_spark_credentials(elastic.store, spark)
    return CommitFolder(store, layout.commits_folder(secrets.token_hex(8)), float(elastic.commit_interval))


def _delete_commits(commits: CommitFolder) -> None:
    """Delete the commits of a job that has succeeded."""
    try:
        commits.store.delete(commits.folder)
    except StoreError as error:
        logger.warning("The commits of this job could not be deleted from its Store: %s", error)


def _importable(launcher: str, options: RunOptions, spark: SparkSession | None) -> Importable:
    """Return the function that finds out which of the user's modules the ranks can import."""
    if options.executable or launcher in {"ssh", "ray"}:  # another Python or host may lack the modules' dependencies
        return importable_nowhere
    return importable_here if spark is None else partial(importable_on, spark, start_timeout=options.start_timeout)


def _lease_cluster(
    elastic: ElasticOptions, spark: SparkSession | None, stack: ExitStack, inbox: queue.SimpleQueue[Event]
) -> LeaseCluster | None:
    """Return the cluster that schedules the ranks; None if the job itself distributes them. ``stack`` disconnects it.

    A discovery limits the leases on Ray, which offer the slots; ``inbox`` receives only its failures.

    Raises:
        LaunchError: Ray is not installed or does not connect.
    """
    if spark is not None:
        return SparkLeases(spark)
    if elastic.launcher != "ray":
        return None
    try:
        from sparkhvd.driver.elastic.ray_leases import RayLeases  # noqa: PLC0415 - Ray may be missing
        from sparkhvd.driver.ray.cluster import RankResources  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise LaunchError(not_installed("launcher='ray'", "ray")) from error
    resources = RankResources(elastic.resources.cpus or 1, float(elastic.resources.gpus or 0.0))
    stack.enter_context(RayLeases.opened())
    leases = RayLeases(resources, grows=elastic.max_num_proc is None, has_discovery=elastic.discovery is not None)

    def report(event: Offered | DiscoveryFailed) -> None:
        if isinstance(event, Offered):
            leases.offer(event.capacity)
        else:
            inbox.put(event)

    if elastic.discovery is not None:
        stack.callback(DiscoveryThread(elastic.discovery, report).close)
    return leases


def _driver_addresses(elastic: ElasticOptions, cluster: LeaseCluster | None) -> tuple[str, Sequence[str]]:
    """Return the local address to bind, and the names and addresses at which workers reach this driver."""
    if cluster is not None:
        own_name, bind_host = cluster.addresses()
        return bind_host, [bind_host, own_name]
    if elastic.launcher == "ssh":
        return driver_addresses([host.name for host in elastic.hosts] or None)
    return LOOPBACK, [LOOPBACK]


def check_limits(elastic: ElasticOptions, start_timeout: float) -> tuple[Limits, Cooldown]:
    """Return the limits with their defaults.

    Raises:
        ConfigError: a limit has a value that cannot work, or the limits contradict each other.
        SlotsError: the hosts have too few slots.
    """
    _check_counts(elastic)
    if not isinstance(elastic.commit_interval, int | float) or not 0 <= elastic.commit_interval < float("inf"):
        raise ConfigError(f"commit_interval must be a number of seconds, at least 0, got {elastic.commit_interval!r}.")
    if elastic.elastic_timeout is not None:
        check_seconds("elastic_timeout", elastic.elastic_timeout)
    smallest, num_proc, largest = _sizes(elastic)
    timeout = DEFAULT_ELASTIC_TIMEOUT if elastic.elastic_timeout is None else float(elastic.elastic_timeout)
    limits = Limits(
        num_proc,
        smallest,
        largest,
        start_timeout,
        timeout,
        reset_limit=plain_count(elastic.reset_limit),
        max_restarts=_max_restarts(elastic),
        max_same_errors=plain_count(elastic.max_same_errors) or MAX_SAME_ERRORS,
    )
    return limits, _cooldown(elastic.cooldown_range)


def _check_counts(elastic: ElasticOptions) -> None:
    minimums = {
        "num_proc": 1,
        "min_num_proc": 1,
        "max_num_proc": 1,
        "reset_limit": 0,
        "max_restarts": 0,
        "max_same_errors": 1,
    }
    for name, number in minimums.items():
        value = getattr(elastic, name)
        if value is not None and not is_count(value, number):
            raise ConfigError(f"{name} must be an integer of at least {number}, got {value!r}.")


def _sizes(elastic: ElasticOptions) -> tuple[int, int, int | None]:
    """Return the smallest number of ranks, the number at the start, and the largest; None leaves it to the discovery.

    Raises:
        ConfigError: there is no number, or they contradict each other.
        SlotsError: the hosts have too few slots.
    """
    num_proc = plain_count(elastic.num_proc or elastic.min_num_proc or elastic.max_num_proc)
    if num_proc is None:
        raise ConfigError("An elastic job needs a number of ranks. Pass num_proc, min_num_proc or max_num_proc.")
    smallest = int(elastic.min_num_proc or num_proc)
    largest = plain_count(elastic.max_num_proc)
    if elastic.hosts:
        limits_num_proc = elastic.num_proc is not None or elastic.min_num_proc is None
        check_slots(elastic.hosts, "num_proc" if limits_num_proc else "min_num_proc", num_proc)
    if largest is None and elastic.discovery is None and elastic.launcher != "ray":
        largest = sum(host.slots for host in elastic.hosts) or num_proc
    if smallest > num_proc or (largest is not None and num_proc > largest):
        raise ConfigError(
            f"min_num_proc={smallest}, num_proc={num_proc} and max_num_proc={largest} must not decrease in this order."
        )
    return smallest, num_proc, largest


def _max_restarts(elastic: ElasticOptions) -> int:
    """Return how many times the job may start again with new ranks; by default only with a Store, which has a state."""
    if elastic.max_restarts is None:
        return 0 if elastic.store is None else _RESTARTS_WITH_STORE
    return plain_count(elastic.max_restarts) or 0


def _cooldown(seconds: tuple[float, float] | None) -> Cooldown:
    if seconds is None:
        return Cooldown()
    shortest, longest = seconds
    check_seconds("cooldown_range", shortest)
    if longest < shortest:
        raise ConfigError(f"cooldown_range must be (shortest, longest) in seconds, got {seconds!r}.")
    return Cooldown(float(shortest), float(longest))
