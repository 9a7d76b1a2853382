"""Elastic jobs on Ray under Horovod's names: ``ElasticRayExecutor``, and the elastic side of ``RayExecutor``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.driver.arguments import check_seconds
from sparkhvd.driver.elastic.run import DEFAULT_ELASTIC_TIMEOUT, run_elastic
from sparkhvd.driver.ray.cluster import RankResources
from sparkhvd.errors import ConfigError, LaunchError
from sparkhvd.ray.settings import RaySettings, names_of, rank_resources
from sparkhvd.task.log_files import LogFiles

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass
class ElasticRaySettings:
    """The settings that ``ElasticRayExecutor.create_settings`` returns, under Horovod's names; they may be changed.

    Attributes:
        min_num_proc: smallest number of ranks to train with.
        max_num_proc: largest number of ranks; None means all slots of the Ray cluster, also those that join later.
        reset_limit: largest number of changes of the ranks; None sets no limit.
        elastic_timeout: seconds within which enough ranks must be ready again after a loss.
        timeout_s: seconds within which ``min_num_proc`` ranks must be ready at the start.
        nics: network interfaces whose addresses the ranks use; empty means those that all nodes can reach.
        verbose: 0 shows no output of the ranks, 1 shows it, 2 adds sparkhvd's own debug lines.
        cooldown_range: shortest and longest time in seconds without new ranks on a node after failures there; None
            means (1, 60).
        discovery: a function that returns the number of slots by address of a node, or an object with Horovod's method
            ``find_available_hosts_and_slots``; only for ``ElasticRayExecutor(override_discovery=False)``.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = DEFAULT_ELASTIC_TIMEOUT
    timeout_s: float = 300.0
    nics: tuple[str, ...] = ()
    verbose: int = 1
    cooldown_range: tuple[float, float] | None = None
    discovery: object = None

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)


class ElasticJobs:
    """Runs elastic jobs with the same ranks, resources and environment.

    Args:
        settings: the limits of the jobs.
        resources: the resources of each rank.
        num_proc: the number of ranks that a job waits for at its start; None means ``settings.min_num_proc``.
        discovery: as in ``sparkhvd.run_elastic``.
        **output: ``stdout``, ``stderr`` and ``output_filename`` of ``sparkhvd.run_elastic``.
    """

    def __init__(
        self,
        settings: ElasticRaySettings,
        resources: RankResources,
        num_proc: int | None = None,
        discovery: Callable[[], Mapping[str, int]] | None = None,
        **output: TextIO | LogFiles | str | None,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "num_proc": num_proc,
            "min_num_proc": settings.min_num_proc,
            "max_num_proc": settings.max_num_proc,
            "reset_limit": settings.reset_limit,
            "elastic_timeout": settings.elastic_timeout,
            "start_timeout": settings.timeout_s,
            "nics": settings.nics,
            "verbose": settings.verbose,
            "cooldown_range": settings.cooldown_range,
            "cpus_per_task": resources.cpus,
            "gpus_per_task": resources.gpus or None,
            "discovery": discovery,
            **output,
        }
        self._env: Mapping[str, str | None] | None = None
        self._has_started = False
        self._executable: tuple[Callable[..., object] | None, tuple[Any, ...], dict[str, Any]] = (None, (), {})

    def start(
        self,
        executable_cls: Callable[..., object] | None = None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        """Note the environment, and the class of the object that ``execute`` passes; every job starts its own ranks."""
        self._executable = (executable_cls, tuple(args or ()), dict(kwargs or {}))
        self._env, self._has_started = env, True

    def run(
        self, fn: Callable[..., Result], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Result]:
        """Run ``fn`` in an elastic job; see ``sparkhvd.run_elastic``.

        Raises:
            LaunchError: ``start`` was not called, or the job has failed.
        """
        if not self._has_started:
            raise LaunchError("This executor has not been started. Call start() first.")
        return run_elastic(fn, tuple(args or ()), kwargs, env=self._env, launcher="ray", **self._arguments)

    def execute(self, fn: Callable[[Any], Result]) -> list[Result]:
        """Run ``fn(executable)`` in an elastic job, where every rank creates its own ``executable``."""
        return self.run(_create_and_call, (fn, *self._executable))

    def end(self) -> None:
        """Require another call of ``start``; the ranks of a job have ended with it."""
        self._has_started = False


def _create_and_call(
    fn: Callable[[Any], Result],
    executable_cls: Callable[..., object] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Result:
    return fn(None if executable_cls is None else executable_cls(*args, **kwargs))


def elastic_settings(  # noqa: PLR0917
    settings: RaySettings,
    min_workers: int | None,
    max_workers: int | None,
    reset_limit: int | None,
    cooldown_range: tuple[float, float] | None,
    elastic_timeout: float | None,
) -> ElasticRaySettings:
    """Return the settings of the elastic jobs of a ``RayExecutor``."""
    return ElasticRaySettings(
        1 if min_workers is None else min_workers,
        max_workers,
        reset_limit,
        DEFAULT_ELASTIC_TIMEOUT if elastic_timeout is None else elastic_timeout,
        settings.timeout_s,
        settings.nics,
        settings.verbose,
        cooldown_range,
    )


class ElasticRayExecutor:
    """Runs elastic jobs on Ray, with Horovod's methods; ``sparkhvd.run_elastic(fn, launcher="ray")`` does the same.

    Args:
        settings: the result of ``create_settings``; None means the defaults.
        use_gpu: whether the ranks have GPUs.
        cpus_per_slot: the number of cores of each rank.
        gpus_per_slot: the number of GPUs of each rank; None means 1 with ``use_gpu``.
        env_vars: changes to the environment of the ranks; None removes a variable.
        override_discovery: whether all nodes of the Ray cluster provide slots. Otherwise, those of
            ``settings.discovery`` do.
        stdout: destination of the ranks' stdout, as in ``sparkhvd.run_elastic``.
        stderr: the same for stderr.

    Raises:
        ConfigError: an argument has a value that cannot work.

    Examples:
        >>> executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2))  # doctest: +SKIP
        >>> executor.start()  # doctest: +SKIP
        >>> executor.run(train)  # doctest: +SKIP
    """

    def __init__(  # noqa: PLR0917 - the order of the arguments is Horovod's
        self,
        settings: ElasticRaySettings | None = None,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str | None] | None = None,
        override_discovery: bool = True,
        *,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        own = ElasticRaySettings() if settings is None else settings
        if not isinstance(own, ElasticRaySettings):
            raise ConfigError(f"settings={settings!r} must come from ElasticRayExecutor.create_settings().")
        discovery = None if override_discovery else _discovery_of(own.discovery)
        resources = rank_resources(cpus_per_slot, use_gpu, gpus_per_slot, "cpus_per_slot", "gpus_per_slot")
        self._jobs = ElasticJobs(own, resources, discovery=discovery, stdout=stdout, stderr=stderr)
        self._env = env_vars

    @staticmethod
    def create_settings(  # noqa: PLR0917 - the order of the arguments is Horovod's
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = DEFAULT_ELASTIC_TIMEOUT,
        timeout_s: float = 300.0,
        ssh_identity_file: str | None = None,
        nics: Iterable[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        verbose: int = 1,
        cooldown_range: tuple[float, float] | None = None,
    ) -> ElasticRaySettings:
        """Return settings for an ``ElasticRayExecutor``; see ``ElasticRaySettings``.

        Args:
            min_num_proc: see ``ElasticRaySettings``, like the arguments below.
            max_num_proc: None means all slots of the Ray cluster.
            reset_limit: None sets no limit.
            elastic_timeout: in seconds.
            timeout_s: in seconds.
            ssh_identity_file: has no effect, because Ray starts the ranks.
            nics: names of network interfaces.
            min_np: Horovod's former name of ``min_num_proc``.
            max_np: Horovod's former name of ``max_num_proc``.
            verbose: 0, 1 or 2.
            cooldown_range: in seconds.
        """
        if ssh_identity_file is not None:
            logger.warning("ssh_identity_file has no effect: Ray starts the ranks, without ssh.")
        return ElasticRaySettings(
            min_num_proc if min_np is None else min_np,
            max_num_proc if max_np is None else max_np,
            reset_limit,
            elastic_timeout,
            timeout_s,
            names_of(nics),
            verbose,
            cooldown_range,
        )

    def start(self) -> None:
        """Prepare ``run``, which starts the ranks."""
        self._jobs.start(env=self._env)

    @brief_errors
    def run(self, worker_fn: Callable[[], Result]) -> list[Result]:
        """Run ``worker_fn()`` in an elastic job; it trains as described in ``sparkhvd.run_elastic``.

        Returns:
            The results of the ranks of the last generation, ordered by rank.

        Raises:
            RankFailedError: ranks failed, and the job could not continue.
            LaunchError: ``start`` was not called, or the job failed for another reason.
        """
        return self._jobs.run(worker_fn)


def _discovery_of(discovery: Any) -> Callable[[], Mapping[str, int]]:
    """Return the function of a discovery.

    Raises:
        ConfigError: it is neither a function nor an object with Horovod's method.
    """
    function = getattr(discovery, "find_available_hosts_and_slots", discovery)
    if not callable(function):
        raise ConfigError(
            f"override_discovery=False needs a discovery, got settings.discovery={discovery!r}. Set it to a function "
            "that returns the number of slots by address of a node, such as {'10.0.0.1': 2}."
        )
    found: Callable[[], Mapping[str, int]] = function
    return found


def check_discovery(override_discovery: bool) -> None:
    """Refuse a discovery of the user's own for a ``RayExecutor``, whose settings have none.

    Raises:
        ConfigError: ``override_discovery`` is False.
    """
    if not override_discovery:
        raise ConfigError(
            "override_discovery=False is not supported by RayExecutor. Leave it out, or pass your discovery to "
            "ElasticRayExecutor or to sparkhvd.run_elastic(launcher='ray', discovery=...)."
        )
