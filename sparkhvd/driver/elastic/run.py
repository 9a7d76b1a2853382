"""``run_elastic``: runs a function in a number of processes that may change while it runs."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, TextIO, TypeVar

from sparkhvd._util.counts import is_count, plain_count
from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.config import changed_environment, from_environment, warn_ignored_variables
from sparkhvd.driver.arguments import RunOptions, check_options, check_seconds, checked_environment
from sparkhvd.driver.elastic.controller import Controller
from sparkhvd.driver.elastic.discovery import Discovery, DiscoveryFunction, DiscoveryScript, DiscoveryThread
from sparkhvd.driver.elastic.local_workers import LocalWorkers, own_host
from sparkhvd.driver.elastic.membership_server import MembershipServer
from sparkhvd.driver.elastic.policy import Limits
from sparkhvd.driver.elastic.roster import Cooldown
from sparkhvd.driver.elastic.workers import Event, Offered
from sparkhvd.driver.results import unpickled
from sparkhvd.driver.run import log_level_of, open_stream
from sparkhvd.driver.user_code.importable import importable_here, importable_nowhere
from sparkhvd.driver.user_code.payload import pickle_call
from sparkhvd.errors import ConfigError
from sparkhvd.task.job import Job

Result = TypeVar("Result")

DEFAULT_ELASTIC_TIMEOUT = 600.0
_NOT_ON_SPARK = "Elastic jobs are not available on Spark yet; run them on this machine with launcher='local'."


@dataclass(frozen=True)
class ElasticOptions:
    """The arguments of ``run_elastic`` that concern the number of ranks, under the same names."""

    num_proc: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    elastic_timeout: float | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None
    discovery: Discovery | None = field(default=None, repr=False)


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
    launcher: str = "auto",
    discovery: str | Callable[[], Mapping[str, int]] | None = None,
    cooldown_range: tuple[float, float] | None = None,
    executable: str | None = None,
    output_filename: str | None = None,
    preload: Sequence[str] = (),
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
        >>> sparkhvd.run_elastic(train, num_proc=2, min_num_proc=1, launcher="local")  # doctest: +SKIP

    Args:
        fn: runs once per rank, in a process of its own.
        args: positional arguments of ``fn``.
        kwargs: keyword arguments of ``fn``.
        num_proc: number of ranks that the job waits for at its start.
        min_num_proc: smallest number of ranks to train with; None is ``num_proc``.
        max_num_proc: largest number of ranks; None uses all slots that ``discovery`` returns.
        start_timeout: seconds within which the first ranks must have started, and each later one; None takes
            ``SPARKHVD_START_TIMEOUT`` (600).
        elastic_timeout: seconds within which enough ranks must be ready again after a loss; None is 600.
        reset_limit: largest number of changes of the ranks; None sets no limit.
        env: variables to add to the ranks' environment; the value None removes a variable.
        stdout: destination of the ranks' stdout, each line as ``[rank]<stdout>:line``; None is ``sys.stdout``.
        stderr: the same for stderr.
        verbose: 0 shows no output unless ``stdout``, ``stderr`` or ``output_filename`` is set, 1 shows it, 2 adds
            sparkhvd's own debug lines.
        nics: ignored with a warning: all ranks run on this machine.
        prefix_output_with_timestamp: whether every line starts with the time of its arrival.
        launcher: must be ``local``, which starts the ranks on this machine; elastic jobs on Spark are not available.
        discovery: returns the number of slots by host, such as ``{"localhost": 2}``, and is called once per second: a
            function, or a script that prints lines of ``host`` or ``host:slots``. None offers ``max_num_proc``, or else
            ``num_proc``, slots on this machine.
        cooldown_range: shortest and longest time in seconds without new ranks on a host after failures there; the time
            doubles with each failure. None is (1, 60).
        executable: the Python of the ranks; None is this one.
        output_filename: a folder in which each rank's output is also saved, in ``rank.<number>/stdout`` and ``stderr``.
        preload: modules that the processes import at their start.

    Returns:
        The results of ``fn`` of the ranks of the last generation, ordered by rank; at most 256 MB in all.

    Raises:
        RankFailedError: ranks failed, and the job could not continue; the message lists the reasons.
        StartTimeoutError: fewer than ``min_num_proc`` ranks were ready within ``start_timeout``.
        LaunchError: too few slots were left for ``elastic_timeout``, or discovery failed at the start.
        ConfigError: an argument has a value that cannot work.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}. Pass it without calling it.")
    if launcher not in {"auto", "local"}:
        raise ConfigError(f"launcher={launcher!r} starts no elastic jobs. Pass launcher='local'.")
    if launcher == "auto":
        raise ConfigError(_NOT_ON_SPARK)
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
    elastic = ElasticOptions(
        num_proc,
        min_num_proc,
        max_num_proc,
        elastic_timeout,
        reset_limit,
        cooldown_range,
        DiscoveryScript(discovery)
        if isinstance(discovery, str)
        else None
        if discovery is None
        else DiscoveryFunction(discovery),
    )
    return run_elastic_with(elastic, options, fn, args, kwargs)


def run_elastic_with(
    elastic: ElasticOptions,
    options: RunOptions,
    fn: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Result]:
    """Run ``fn`` with checked or unchecked options; see ``run_elastic``."""
    check_options(options, "local")
    changes = checked_environment(options.env)
    environment = changed_environment(changes)
    config = from_environment(environment)
    if options.start_timeout is not None:
        config = replace(config, start_timeout=float(options.start_timeout))
    limits, cooldown = check_limits(elastic, config.start_timeout)
    warn_ignored_variables(environment)
    payload = pickle_call(fn, args, kwargs or {}, importable_nowhere if options.executable else importable_here)
    most = limits.max_size or limits.num_proc
    job = Job(
        payload=payload,
        num_proc=most,
        env=tuple(changes.items()),
        preload=tuple(options.preload),
        config=config,
        secret=secrets.token_bytes(32),
        log_level=log_level_of(options.verbose) if config.log_level is None else config.log_level,
        executable=options.executable or "",
    )
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with ExitStack() as stack:
        stream = open_stream(options, most)
        stack.callback(stream.close)
        membership = MembershipServer(job.secret, inbox, encrypt=config.encrypt)
        stack.callback(membership.close)
        workers = LocalWorkers(job, membership.address, stream, inbox)
        stack.callback(workers.close)
        if elastic.discovery is None:
            inbox.put(Offered({own_host(): most}))
        else:
            stack.callback(DiscoveryThread(elastic.discovery, inbox).close)
        contents = Controller(limits, cooldown, workers, membership, inbox).run()
    return unpickled(contents)


def check_limits(elastic: ElasticOptions, start_timeout: float) -> tuple[Limits, Cooldown]:
    """Return the limits with their defaults.

    Raises:
        ConfigError: a limit has a value that cannot work, or the limits contradict each other.
    """
    for name in ("num_proc", "min_num_proc", "max_num_proc"):
        value = getattr(elastic, name)
        if value is not None and not is_count(value, 1):
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
    limit = elastic.reset_limit
    if limit is not None and not is_count(limit, 0):
        raise ConfigError(f"reset_limit must be an integer of at least 0, got {limit!r}.")
    num_proc = plain_count(elastic.num_proc or elastic.min_num_proc or elastic.max_num_proc)
    if num_proc is None:
        raise ConfigError("An elastic job needs num_proc or min_num_proc, the number of ranks at its start.")
    smallest = int(elastic.min_num_proc or num_proc)
    largest = plain_count(elastic.max_num_proc)
    if largest is None and elastic.discovery is None:
        largest = num_proc
    if smallest > num_proc or (largest is not None and num_proc > largest):
        raise ConfigError(
            f"min_num_proc={smallest}, num_proc={num_proc} and max_num_proc={largest} must not decrease in this order."
        )
    if elastic.elastic_timeout is not None:
        check_seconds("elastic_timeout", elastic.elastic_timeout)
    cooldown = Cooldown()
    if elastic.cooldown_range is not None:
        shortest, longest = elastic.cooldown_range
        check_seconds("cooldown_range", shortest)
        if longest < shortest:
            raise ConfigError(f"cooldown_range={elastic.cooldown_range!r} must be the shortest and the longest time.")
        cooldown = Cooldown(float(shortest), float(longest))
    timeout = DEFAULT_ELASTIC_TIMEOUT if elastic.elastic_timeout is None else float(elastic.elastic_timeout)
    return Limits(num_proc, smallest, largest, start_timeout, timeout, plain_count(limit)), cooldown
