"""Who starts the ranks of a ``fit``: a launcher by name, or an object of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO, runtime_checkable

from sparkhvd.driver.run import run
from sparkhvd.errors import ParamError, RankFailedError
from sparkhvd.task import report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_OF_TRAINING = {
    report.STARTING: "before the training began",
    report.IN_FN: "in training",
    report.CONNECTED: "in training",
    report.ENDED: "after the training had ended",
}
LAUNCHERS = ("auto", "barrier", "mpi", "local")  # those that need no arguments of their own


@runtime_checkable
class Backend(Protocol):
    """Runs a function once per rank; Horovod's interface, which needs no base class."""

    def num_processes(self) -> int:
        """The number of ranks."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank, where ``hvd.init()`` works, with ``env`` in the environment.

        Returns:
            What it returned, in rank order.
        """


class SparkBackend:
    """Starts the ranks with ``sparkhvd.run``.

    Args:
        num_proc: number of ranks.
        env: added to the ranks' environment.
        **options: more arguments of ``sparkhvd.run``: ``launcher``, ``gpus_per_task``, ``nics`` and the others.

    Example:
        >>> TorchEstimator(backend=SparkBackend(4, launcher="mpi"), store=store, ...)  # doctest: +SKIP
    """

    def __init__(self, num_proc: int, env: Mapping[str, str | None] | None = None, **options: Any) -> None:
        self._num_proc = num_proc
        self.env = dict(env or {})
        self._options = options

    def without_env(self) -> SparkBackend:
        """The same, with nothing added to the environment."""
        return SparkBackend(self._num_proc, **self._options)

    def num_processes(self) -> int:
        """The number of ranks."""
        return self._num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> list[Any]:
        """See ``Backend.run``."""
        return run(fn, args, kwargs, num_proc=self._num_proc, env={**self.env, **(env or {})}, **self._options)


def a_backend(name: str, value: Any) -> Backend | str:
    """A launcher's name, or an object with ``run`` and ``num_processes``."""
    if isinstance(value, str) and value in LAUNCHERS:
        return value
    if not isinstance(value, str) and isinstance(value, Backend):
        return value
    raise ParamError(
        f"{name}={value!r} must be one of {', '.join(map(repr, LAUNCHERS))}, or an object with run(fn, args, kwargs, "
        "env) and num_processes(), such as sparkhvd.SparkBackend."
    )


def check_backend(params: Mapping[str, Any]) -> None:
    """Raise ``ParamError`` for what a backend cannot do, or what contradicts it."""
    backend = params["backend"]
    if params["num_proc"] is not None and not isinstance(backend, str):
        raise ParamError(
            'At most one of the parameters "backend" and "num_proc" may be specified; the backend has one.'
        )
    if params["data"] == "direct" and backend not in {"auto", "barrier"}:
        raise ParamError(f"backend={backend!r} cannot give the rows of a DataFrame to the ranks. Pass a Store.")


def run_ranks(
    params: Mapping[str, Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    spark: SparkSession,
    env: Mapping[str, str | None],
    preload: Sequence[str],
    rows: DataFrame | None,
    stdout: TextIO | None = None,
) -> list[Any]:
    """Run ``fn`` on every rank, by the backend in ``params``."""
    backend = params["backend"]
    if not isinstance(backend, str):
        return list(backend.run(fn, args, None, env))
    try:
        return run(
            fn,
            args,
            num_proc=params["num_proc"],
            spark=spark,
            env=env,
            preload=preload,
            verbose=params["verbose"],
            rows=rows,
            stdout=stdout,
            launcher=backend,
        )
    except RankFailedError as error:
        error.args = (of_training(str(error)),)
        raise


def of_training(message: str) -> str:
    """What says how far ``fn`` was, for somebody who gave none."""
    first, *rest = message.split("\n", 1)
    for phase, said in _OF_TRAINING.items():
        first = first.replace(f"({phase})", f"({said})")
    return "\n".join([first, *rest])
