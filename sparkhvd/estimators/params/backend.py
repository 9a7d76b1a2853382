"""Backends, which start the ranks of a ``fit``: a launcher by name, ``SparkBackend``, or an object of the user's."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, runtime_checkable

from sparkhvd.compat.horovod import unknown_argument
from sparkhvd.compat.spark import check_spark
from sparkhvd.config import changed_environment, from_environment
from sparkhvd.deadline import Deadline
from sparkhvd.driver.arguments import check_seconds
from sparkhvd.driver.launcher import LAUNCHERS, LaunchRequest, launcher_class
from sparkhvd.driver.preflight.preflight import RequestedTasks
from sparkhvd.driver.run import launch_request, run
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.errors import ParamError, RankFailedError
from sparkhvd.task import failure_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TRAINING_TERMS = {
    failure_report.STARTING: "before training started",
    failure_report.IN_FN: "in training",
    failure_report.CONNECTED: "in training",
    failure_report.ENDED: "after training ended",
}


@runtime_checkable
class Backend(Protocol):
    """Runs a function once per rank; Horovod's interface, which needs no base class."""

    def num_processes(self) -> int:
        """Return the number of ranks."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank, where ``hvd.init()`` works, with ``env`` in the environment.

        Returns:
            The return values in rank order.
        """


class SparkBackend:
    """Starts the ranks with ``sparkhvd.run``.

    Args:
        num_proc: number of ranks; None uses all slots.
        env: variables to add to the ranks' environment.
        **options: more arguments of ``sparkhvd.run``: ``launcher``, ``gpus_per_task``, ``nics`` and the others. The
            estimator chooses those that are left out.

    Raises:
        TypeError: ``sparkhvd.run`` has no such argument.

    Examples:
        >>> TorchEstimator(backend=SparkBackend(4, gpus_per_task=1), store=store, ...)  # doctest: +SKIP
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str | None] | None = None, **options: Any
    ) -> None:
        known = inspect.signature(run).parameters
        for name in options:
            if name not in known:
                raise TypeError(unknown_argument(name, known))
        self.env = dict(env or {})
        self._options = {"num_proc": num_proc, **options}

    def without_env(self) -> SparkBackend:
        """Return a backend with the same options that adds nothing to the environment."""
        return SparkBackend(**self._options)

    def completed(self, **options: Any) -> Self:
        """Return a copy with more arguments of ``sparkhvd.run``; those that are set already win."""
        own_options = {name: value for name, value in self._options.items() if value is not None}
        copied = copy.copy(self)
        copied._options = {**options, **own_options}  # noqa: SLF001 - of a copy of its own
        return copied

    def launch(self, spark: SparkSession | None = None) -> tuple[str, LaunchRequest]:
        """Return the name of the launcher, and the request for it.

        Raises:
            ConfigError: the options contradict each other.
        """
        return launch_request(**{**self._options, "spark": self._options.get("spark") or spark})

    def reserve(self, spark: SparkSession | None = None) -> int:
        """Return the number of ranks to start.

        Raises:
            SlotsError: the cluster has too few slots for the requested ranks.
            LaunchError: the launcher cannot run the ranks there.
        """
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
        """Whether the destination of the ranks' stdout is left to the estimator."""
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
        return run(fn, args, kwargs, env={**self.env, **(env or {})}, **self._options)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The parameters that decide how many ranks start, and where; ``EstimatorParams`` describes them."""

    num_proc: int | None
    backend: Backend | str
    backend_env: Mapping[str, str | None] | None
    verbose: int


def spark_backend(placement: Placement) -> SparkBackend | None:
    """Return the backend that starts the ranks with ``sparkhvd.run``; None for a backend of the user's own."""
    backend = _backend(placement)
    return backend if isinstance(backend, SparkBackend) else None


def _backend(placement: Placement) -> Backend:
    named = placement.backend
    return SparkBackend(placement.num_proc, launcher=named) if isinstance(named, str) else named


def requested_tasks(placement: Placement) -> RequestedTasks:
    """Return the number and resources of the tasks that the ranks will need."""
    backend = _backend(placement)
    if not isinstance(backend, SparkBackend):
        return RequestedTasks(int(backend.num_processes()), TaskResources())
    _, request = backend.launch()
    config = from_environment(changed_environment({**backend.env, **(placement.backend_env or {})}))
    return RequestedTasks(request.num_proc, request.resources, backend.nics, config.encrypt)


def shows_output(placement: Placement) -> bool:
    """Return whether the estimator can read the ranks' stdout before it is shown."""
    backend = spark_backend(placement)
    return backend is not None and backend.shows_output


def reserve_ranks(placement: Placement, spark: SparkSession) -> int:
    """Return the number of ranks, so that too few slots are reported before the data is prepared."""
    check_spark(spark)  # Spark prepares the rows for every launcher
    backend = _backend(placement)
    return backend.reserve(spark) if isinstance(backend, SparkBackend) else int(backend.num_processes())


def backend_or_launcher(name: str, value: object) -> Backend | str:
    """Accept the name of a launcher, or an object with ``run`` and ``num_processes``."""
    launchers = ["auto", "barrier", "mpi", "local"]  # those of this package that need no arguments of their own
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
    """Raise ``ParamError`` for parameters that contradict the backend or that it does not support."""
    if placement.num_proc is not None and not isinstance(placement.backend, str):
        raise ParamError(
            'At most one of the parameters "backend" and "num_proc" may be specified. The backend sets the number of '
            "ranks: leave num_proc out."
        )
    own = spark_backend(placement)
    launcher = own.launch()[0] if own is not None else None
    if data == "direct" and (launcher is None or not launcher_class(launcher).takes_rows):
        name = f"{type(placement.backend).__name__}(...)" if launcher is None else repr(launcher)
        raise ParamError(
            f"backend={name} cannot send the rows of a DataFrame to the ranks (data='direct', the default without a "
            "Store). Pass a Store and data='store'."
        )


def run_ranks(
    placement: Placement,
    fn: Callable[..., Any],
    args: Sequence[object],
    *,
    spark: SparkSession,
    env: Mapping[str, str | None],
    preload: Sequence[str],
    rows: DataFrame | None,
    stdout: TextIO | None = None,
) -> list[Any]:
    """Run ``fn`` on every rank, by the backend of the placement."""
    backend = _backend(placement)
    if not isinstance(backend, SparkBackend):
        return list(backend.run(fn, args, None, env))
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
    """Name phases of the training instead of ``fn`` in a message's first line, because users of ``fit`` pass no fn."""
    first, *rest = message.split("\n", 1)
    for phase, term in _TRAINING_TERMS.items():
        first = first.replace(f"({phase})", f"({term})")
    return "\n".join([first, *rest])
