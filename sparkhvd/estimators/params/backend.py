"""Backends, which start the ranks of a ``fit``: a launcher's name, a ``SparkBackend``, or the user's own object."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, runtime_checkable

from sparkhvd._util.addresses import LOOPBACK
from sparkhvd.compat.horovod import unknown_argument
from sparkhvd.compat.spark import active_session, check_spark, current_session
from sparkhvd.config import changed_environment, from_environment, setting_variables, variable_of
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import check_seconds
from sparkhvd.driver.elastic.driver_addresses import driver_addresses
from sparkhvd.driver.elastic.run import (
    ELASTIC_LAUNCHERS,
    ElasticOptions,
    check_elastic_resources,
    check_limits,
    run_elastic,
)
from sparkhvd.driver.launcher import LAUNCHERS, LaunchRequest, launcher_class
from sparkhvd.driver.preflight.preflight import RequestedTasks
from sparkhvd.driver.run import launch_request, run
from sparkhvd.driver.spark.driver_address import driver_hosts
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.errors import ConfigError, ParamError, RankFailedError
from sparkhvd.task import failure_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# How long the executors keep an idle process that has imported the frameworks, from which the ranks of a search fork.
_WARM_SECONDS = 60.0
_TRAINING_PHASES = {
    failure_report.STARTING: "before training started",
    failure_report.IN_FN: "in training",
    failure_report.CONNECTED: "in training",
    failure_report.ENDED: "after training ended",
}


@runtime_checkable
class Backend(Protocol):
    """Runs a function once per rank. This is Horovod's interface; a backend needs no base class."""

    def num_processes(self) -> int:
        """Return the number of ranks."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank, with ``env`` in the environment. ``fn`` may call ``hvd.init()``.

        Returns:
            The return values in rank order.
        """


# Arguments of ``run_elastic``; either of the first two makes the ranks elastic.
ELASTIC_ARGUMENTS = (
    "min_num_proc",
    "max_num_proc",
    "elastic_timeout",
    "reset_limit",
    "cooldown_range",
    "max_restarts",
    "max_same_errors",
)
# The number of times that a fit restarts from the last checkpoint in its Store after the loss of all ranks.
_MAX_RESTARTS = 3


class SparkBackend:
    """Starts the ranks with ``sparkhvd.run``, or with ``sparkhvd.run_elastic``.

    Args:
        num_proc: number of ranks; None uses all slots.
        env: variables to add to the ranks' environment.
        **options: more arguments of ``sparkhvd.run``, such as ``launcher``, ``gpus_per_task`` and ``nics``. The
            estimator sets ``spark``, ``preload``, ``verbose``, ``rows`` and ``stdout`` unless they are passed here.
            ``min_num_proc`` or ``max_num_proc`` makes the ranks elastic; then the arguments are those of
            ``sparkhvd.run_elastic``.

    Raises:
        TypeError: ``sparkhvd.run`` or ``sparkhvd.run_elastic`` has no such argument.

    Examples:
        >>> TorchEstimator(backend=SparkBackend(4, gpus_per_task=1), store=store, ...)  # doctest: +SKIP
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str | None] | None = None, **options: Any
    ) -> None:
        self._elastic = {name: options.pop(name) for name in ELASTIC_ARGUMENTS if options.get(name) is not None}
        parameters = (inspect.signature(run_elastic) if self.is_elastic else inspect.signature(run)).parameters
        for name in options:
            if name not in parameters and name not in ELASTIC_ARGUMENTS:
                raise TypeError(unknown_argument(name, parameters))
        self.env = dict(env or {})
        self._options = {"num_proc": num_proc, **{name: options[name] for name in options if name in parameters}}

    def without_env(self) -> SparkBackend:
        """Return a backend with the same options that adds nothing to the environment."""
        return SparkBackend(**self._options, **self._elastic)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change while they run."""
        return "min_num_proc" in self._elastic or "max_num_proc" in self._elastic

    def check_elastic(self) -> None:
        """Refuse arguments of elastic jobs that contradict each other.

        Raises:
            ConfigError: the message names the argument.
        """
        launcher = self._options.get("launcher", "auto")
        if self.is_elastic:
            check_limits(ElasticOptions(self.requested_ranks, **self._elastic), self.start_seconds)
            if launcher not in ELASTIC_LAUNCHERS:
                raise ConfigError(
                    f"The launcher {launcher!r} cannot start elastic ranks. Leave it out or use 'spark', 'local', "
                    "'ssh' or 'ray', or leave min_num_proc and max_num_proc out."
                )
            resources = TaskResources(self._options.get("cpus_per_task"), self._options.get("gpus_per_task"))
            check_elastic_resources(launcher, resources)
        elif self._elastic:
            raise ConfigError(
                f"{next(iter(self._elastic))} is for elastic training. Set min_num_proc or max_num_proc, too, or leave "
                "it out."
            )

    @property
    def largest(self) -> int | None:
        """The largest number of ranks; None if it is unknown before the ranks start."""
        if not self.is_elastic:
            return self.requested_ranks
        return int(self._elastic.get("max_num_proc") or self.start_size)

    @property
    def smallest(self) -> int:
        """The smallest number of ranks of an elastic fit."""
        return int(self._elastic.get("min_num_proc") or self.start_size)

    @property
    def start_size(self) -> int:
        """The number of ranks that an elastic fit starts with if enough slots are available."""
        elastic = self._elastic
        return int(self.requested_ranks or elastic.get("min_num_proc") or elastic["max_num_proc"])

    def completed(self, **options: Any) -> Self:
        """Return a copy with more arguments of ``sparkhvd.run``; arguments that are already set take precedence."""
        own_options = {name: value for name, value in self._options.items() if value is not None}
        if self.is_elastic:
            options.pop("rows")  # elastic ranks read their rows from a Store
            options["max_restarts"] = _MAX_RESTARTS
            if own_options.get("launcher") in {"local", "ssh", "ray"} or "hosts" in own_options:
                options.pop("spark")  # these launchers need no session
        copied = copy.copy(self)
        copied._options = {**options, **own_options}  # noqa: SLF001 - of this object's own copy
        return copied

    def launch(self, spark: SparkSession | None = None) -> tuple[str, LaunchRequest]:
        """Return the name of the launcher, and the request for it.

        Raises:
            ConfigError: the options contradict each other.
        """
        options = {**self._options, "spark": self._options.get("spark") or spark}
        if self.is_elastic and options.get("launcher") == "spark":
            options["launcher"] = "barrier"  # the name of the launcher for a fixed number of ranks in Spark tasks
        return launch_request(**options)

    def reserve(self, spark: SparkSession | None = None) -> int:
        """Return the number of ranks to start.

        Raises:
            SlotsError: the cluster has too few slots for the requested ranks.
            LaunchError: the launcher cannot run ranks on this cluster.
        """
        if self.is_elastic:
            return self.start_size  # the job waits for slots itself, because new executors may provide them
        name, request = self.launch(spark)
        return launcher_class(name)(request).reserve(Deadline.after(self.start_seconds))

    @property
    def start_seconds(self) -> float:
        """The seconds to wait for slots and for the tasks in them to start."""
        seconds = self._options.get("start_timeout")
        if seconds is None:
            seconds = from_environment().start_timeout
        check_seconds("start_timeout", seconds)
        return float(seconds)

    @property
    def nics(self) -> str | Sequence[str]:
        """The network interfaces that the ranks may use; empty for all."""
        nics: str | Sequence[str] = self._options.get("nics") or ()
        return nics

    @property
    def requested_ranks(self) -> int | None:
        """The requested number of ranks; None for all slots."""
        num_proc: int | None = self._options["num_proc"]
        return num_proc

    @property
    def shows_output(self) -> bool:
        """Whether the estimator chooses the destination of the ranks' stdout."""
        return self._options.get("stdout") is None

    def num_processes(self) -> int:
        """Return the number of ranks."""
        num_proc = self._options["num_proc"]
        return self.reserve() if num_proc is None else int(num_proc)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        """See ``Backend.run``."""
        env = {**self.env, **(env or {})}
        if self.is_elastic:
            sizes = {"max_num_proc": self.largest}  # the rows are divided for this number
            return run_elastic(fn, args, kwargs, env=env, **{**self._options, **sizes, **self._elastic})
        return run(fn, args, kwargs, env=env, **self._options)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The parameters that decide how many ranks start, and where; ``EstimatorParams`` describes them."""

    num_proc: int | None
    min_num_proc: int | None
    max_num_proc: int | None
    elastic_timeout: float | None
    reset_limit: int | None
    backend: Backend | str
    backend_env: Mapping[str, str | None] | None
    verbose: int


def spark_backend(placement: Placement) -> SparkBackend | None:
    """Return the ``SparkBackend`` that starts the ranks; None for a backend of the user's own class."""
    backend = _backend(placement)
    return backend if isinstance(backend, SparkBackend) else None


def _backend(placement: Placement) -> Backend:
    backend = placement.backend
    if not isinstance(backend, str):
        return backend
    return SparkBackend(placement.num_proc, launcher=backend, **_elastic_arguments(placement))


def _elastic_arguments(placement: Placement) -> dict[str, Any]:
    return {name: getattr(placement, name, None) for name in ELASTIC_ARGUMENTS}


def is_elastic(placement: Placement) -> bool:
    """Return whether the number of ranks may change while they train."""
    backend = spark_backend(placement)
    return backend is not None and backend.is_elastic


def largest_size(placement: Placement, num_proc: int) -> int:
    """Return the largest number of ranks that may train; ``num_proc`` ranks start."""
    backend = spark_backend(placement)
    return num_proc if backend is None else backend.largest or num_proc


def requested_tasks(placement: Placement) -> RequestedTasks:
    """Return the number and resources of the tasks that the ranks will need."""
    backend = _backend(placement)
    if not isinstance(backend, SparkBackend):
        return RequestedTasks(int(backend.num_processes()), TaskResources())
    _, request = backend.launch()
    tasks = RequestedTasks(request.num_proc, request.resources, backend.nics, encrypts(placement))
    return replace(tasks, min_num_proc=backend.smallest, max_num_proc=backend.largest) if backend.is_elastic else tasks


def shows_output(placement: Placement) -> bool:
    """Return whether the estimator receives the ranks' stdout, so that it can show a progress bar."""
    backend = spark_backend(placement)
    return backend is not None and backend.shows_output


def driver_address(placement: Placement, spark: SparkSession | None) -> tuple[str, Sequence[str]]:
    """Return the local address to bind, and the addresses at which the ranks may reach this driver."""
    backend = spark_backend(placement)
    name, request = ("", None) if backend is None else backend.launch(spark)
    if name == "local":
        return LOOPBACK, [LOOPBACK]
    if request is not None and request.hosts:
        return driver_addresses([host.name for host in request.hosts])
    if spark is None or name == "ray":
        return driver_addresses(None)
    host, bind = driver_hosts(spark)
    return bind, [host]


def encrypts(placement: Placement) -> bool:
    """Return whether the traffic of the ranks is encrypted."""
    backend = spark_backend(placement)
    changes = {**({} if backend is None else backend.env), **(placement.backend_env or {})}
    return from_environment(changed_environment(changes)).encrypt


def session_of(placement: Placement) -> SparkSession | None:
    """Return the session for a fit on existing files; None if there is none and the ranks do not need Spark.

    Raises:
        LaunchError: there is no session, but the ranks run in Spark tasks or on a backend of the user's own class.
    """
    backend = spark_backend(placement)
    launcher = backend.launch()[0] if backend is not None else None
    if launcher is None or launcher_class(launcher).on_spark:
        return active_session()
    return current_session()


def reserve_ranks(placement: Placement, spark: SparkSession | None) -> int:
    """Return the number of ranks; raise an error about missing slots before the data is prepared."""
    if spark is not None:
        check_spark(spark)  # Spark prepares the rows for every launcher
    backend = _backend(placement)
    return backend.reserve(spark) if isinstance(backend, SparkBackend) else int(backend.num_processes())


def backend_or_launcher(name: str, value: object) -> Backend | str:
    """Accept the name of a launcher, or an object with ``run`` and ``num_processes``."""
    launchers = ["auto", "barrier", "mpi", "local", "ray"]  # not ssh, which requires hosts
    if isinstance(value, str) and value not in launchers:
        launchers += LAUNCHERS.added()
    if isinstance(value, str) and value in launchers:
        return value
    if not isinstance(value, str) and isinstance(value, Backend):
        return value
    raise ParamError(
        f"{name}={value!r} must be one of {', '.join(map(repr, launchers))}, or an object with run(fn, args, kwargs, "
        "env) and num_processes(), such as sparkhvd.SparkBackend."
    )


def check_backend(placement: Placement, data: str) -> None:
    """Raise ``ParamError`` if parameters contradict the backend or the backend does not support them."""
    sizes = {"num_proc": placement.num_proc, **_elastic_arguments(placement)}
    for name, value in sizes.items():
        if value is not None and not isinstance(placement.backend, str):
            raise ParamError(
                f'At most one of the parameters "backend" and "{name}" may be specified. The backend sets the number '
                f"of ranks: leave {name} out."
            )
    backend = spark_backend(placement)
    if backend is not None:
        backend.check_elastic()
    launcher = backend.launch()[0] if backend is not None else None
    if data == "direct" and (launcher is None or not launcher_class(launcher).takes_rows):
        name = f"{type(placement.backend).__name__}(...)" if launcher is None else repr(launcher)
        raise ParamError(
            f"backend={name} cannot send the rows of a DataFrame to the ranks (data='direct', the default without a "
            "Store). Pass a Store and data='store'."
        )


def warm_by_default() -> dict[str, str]:
    """Return the variables with which ranks of a search start warm, unless the user has set how long to keep warm."""
    variable = variable_of("warm_seconds")
    return {} if variable in setting_variables() else {variable: str(_WARM_SECONDS)}


def run_ranks(
    placement: Placement,
    fn: Callable[..., Any],
    args: Sequence[object],
    *,
    spark: SparkSession | None,
    env: Mapping[str, str | None],
    default_env: Mapping[str, str],
    preload: Sequence[str],
    rows: DataFrame | None,
    stdout: TextIO | None = None,
) -> list[Any]:
    """Run ``fn`` on every rank, with the backend of the placement, which may override ``default_env``."""
    backend = _backend(placement)
    if not isinstance(backend, SparkBackend):
        return list(backend.run(fn, args, {}, {**default_env, **env}))
    env = {**default_env, **backend.env, **env}
    backend = backend.completed(
        num_proc=placement.num_proc,
        spark=spark,
        preload=preload,
        verbose=placement.verbose,
        rows=rows,
        stdout=stdout,
    )
    try:
        return list(backend.run(fn, args, None, env))
    except RankFailedError as error:
        error.args = (in_training_terms(str(error)),)
        raise


def in_training_terms(message: str) -> str:
    """Replace phases of ``fn`` with phases of the training in a message's first line: users of ``fit`` pass no fn."""
    first, *rest = message.split("\n", 1)
    for phase, term in _TRAINING_PHASES.items():
        first = first.replace(f"({phase})", f"({term})")
    return "\n".join([first, *rest])
