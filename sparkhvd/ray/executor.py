"""``RayExecutor``: ranks in a Ray cluster whose processes continue between calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Never, Self, TextIO, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util import get_current_placement_group

from sparkhvd._util.background import is_done_within
from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.driver.arguments import RunOptions
from sparkhvd.driver.launcher import LaunchRequest
from sparkhvd.driver.launchers.ray import RayHandle, RayLauncher
from sparkhvd.driver.ray.gang import RayPlacement
from sparkhvd.driver.run import launched
from sparkhvd.driver.user_code.importable import importable_nowhere
from sparkhvd.driver.user_code.payload import pickle_call
from sparkhvd.errors import ConfigError, LaunchError, RankFailedError
from sparkhvd.ray.elastic import ElasticJobs, check_discovery, elastic_settings
from sparkhvd.ray.settings import RaySettings, layout_of, names_of, rank_resources, settings_from
from sparkhvd.task.log_files import LogFiles
from sparkhvd.task.ray.commands import EXECUTE, LEAVE, RUN, run_commands

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_POLL_SECONDS = 0.5
# How long the job may take to end after the failure of a rank, and how long idle ranks may take to leave it.
_FAILED_SECONDS = 20.0
_LEAVE_SECONDS = 10.0
_OWN = (
    "num_workers",
    "num_hosts",
    "num_workers_per_host",
    "min_workers",
    "max_workers",
    "cpus_per_worker",
    "use_gpu",
    "gpus_per_worker",
)
# Former names of Horovod.
_FORMER_NAMES = MappingProxyType(
    {"num_slots": "num_workers_per_host", "cpus_per_slot": "cpus_per_worker", "gpus_per_slot": "gpus_per_worker"}
)


class RayExecutor:
    """Ranks in a Ray cluster that stay between calls, with Horovod's methods.

    The process of a rank keeps its state between calls: imports, an initialized ``hvd``, and an object of
    ``executable_cls``. If a rank fails, all ranks end; call ``start`` again.

    With ``min_workers`` or ``max_workers``, every call of ``run`` or ``execute`` is an elastic job with ranks of its
    own, see ``sparkhvd.run_elastic``.

    Args:
        settings: the result of ``create_settings``, or an object with the same attributes; None means the defaults.
        num_workers: the number of ranks; Ray packs them on few nodes.
        num_hosts: the number of nodes, instead of ``num_workers``.
        num_workers_per_host: the number of ranks on each of these nodes; None means 1.
        cpus_per_worker: the number of cores of each rank.
        use_gpu: whether the ranks have GPUs.
        gpus_per_worker: the number of GPUs of each rank; None means 1.
        use_current_placement_group: whether the ranks run in the placement group of the calling Ray task, if it has
            one. With ``num_hosts``, they always get a placement group of their own. Elastic jobs use none.
        min_workers: the smallest number of ranks of an elastic job; None means 1 with ``max_workers``. Then
            ``num_workers`` is the number of ranks that the job waits for at its start.
        max_workers: the largest number of ranks of an elastic job; None means all slots of the Ray cluster.
        reset_limit: the largest number of changes of the ranks of an elastic job.
        cooldown_range: as in ``sparkhvd.run_elastic``.
        elastic_timeout: as in ``sparkhvd.run_elastic``; a job that is not elastic ignores it with a warning.
        override_discovery: must be True; ``ElasticRayExecutor`` accepts a discovery of your own.
        placement_group_timeout_s: replaces the value in ``settings``.
        stdout: destination of the ranks' stdout, as in ``sparkhvd.run``.
        stderr: the same for stderr.
        output_filename: a folder for the ranks' output, as in ``sparkhvd.run``.
        **unknown: an error with the closest name.

    Raises:
        ConfigError: an argument has a value that cannot work, or arguments contradict each other.
        TypeError: an argument is unknown.

    Examples:
        >>> with RayExecutor(num_workers=2) as executor:  # doctest: +SKIP
        ...     executor.start()
        ...     executor.run(train, args=("s3://bucket/rows",))
    """

    def __init__(  # noqa: PLR0917 - the order of the arguments is Horovod's
        self,
        settings: object = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = None,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: tuple[float, float] | None = None,
        elastic_timeout: float | None = None,
        override_discovery: bool = True,
        *,
        placement_group_timeout_s: float | None = None,
        stdout: TextIO | LogFiles | None = None,
        stderr: TextIO | LogFiles | None = None,
        output_filename: str | None = None,
        **unknown: Never,
    ) -> None:
        for name in unknown:
            hint = did_you_mean(_FORMER_NAMES.get(name, name), _OWN, show=str)
            raise TypeError(f"RayExecutor() takes no argument {name!r}. {hint}".rstrip())
        own = settings_from(settings)
        if placement_group_timeout_s is not None:
            own = replace(own, placement_group_timeout_s=placement_group_timeout_s)
        self._settings = own
        self._stack = ExitStack()
        self._job: RayHandle | None = None
        self._failure = ""
        self._elastic: ElasticJobs | None = None
        if min_workers is not None or max_workers is not None:
            if num_hosts is not None or num_workers_per_host is not None:
                raise ConfigError("num_hosts and num_workers_per_host have no effect with min_workers or max_workers.")
            check_discovery(override_discovery)
            self._elastic = ElasticJobs(
                elastic_settings(own, min_workers, max_workers, reset_limit, cooldown_range, elastic_timeout),
                rank_resources(cpus_per_worker, use_gpu, gpus_per_worker),
                num_workers,
                stdout=stdout,
                stderr=stderr,
                output_filename=output_filename,
            )
            return
        for name, value in (("reset_limit", reset_limit), ("cooldown_range", cooldown_range)):
            if value is not None:
                raise ConfigError(f"{name} is for elastic jobs. Set min_workers or max_workers, too, or leave it out.")
        if elastic_timeout is not None:  # programs for Horovod may pass it to all of their executors
            logger.warning("elastic_timeout has no effect without min_workers or max_workers: this job is not elastic.")
        self._layout = layout_of(
            num_workers=num_workers,
            num_hosts=num_hosts,
            num_workers_per_host=num_workers_per_host,
            cpus_per_worker=cpus_per_worker,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_worker,
        )
        self._uses_current_group = use_current_placement_group and num_hosts is None
        self._options = RunOptions(
            start_timeout=own.timeout_s,
            nics=own.nics,
            verbose=own.verbose,
            stdout=stdout,
            stderr=stderr,
            output_filename=output_filename,
        )

    @classmethod
    def create_settings(  # noqa: PLR0917 - the order of the arguments is Horovod's
        cls,
        timeout_s: float = 300.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: Iterable[str] | None = None,
        verbose: int = 1,
    ) -> RaySettings:
        """Return settings for a ``RayExecutor``.

        Args:
            timeout_s: seconds within which all ranks must be ready, after Ray has reserved their resources.
            ssh_identity_file: has no effect, because Ray starts the ranks.
            ssh_str: also has no effect.
            placement_group_timeout_s: seconds within which Ray must have reserved the resources.
            nics: network interfaces whose addresses the ranks use.
            verbose: 0 shows no output of the ranks, 1 shows it, 2 adds sparkhvd's own debug lines.
        """
        for name, value in (("ssh_identity_file", ssh_identity_file), ("ssh_str", ssh_str)):
            if value is not None:
                logger.warning("%s has no effect: Ray starts the ranks, without ssh.", name)
        return RaySettings(timeout_s, placement_group_timeout_s, names_of(nics), verbose)

    @brief_errors
    def start(
        self,
        executable_cls: Callable[..., object] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str | None] | None = None,
    ) -> None:
        """Start the ranks, and wait until they are ready. The ranks of elastic jobs start with ``run``.

        Args:
            executable_cls: the class of the object that each rank creates once, for ``execute``.
            executable_args: its positional arguments.
            executable_kwargs: its keyword arguments.
            extra_env_vars: changes to the environment of the ranks; None removes a variable.

        Raises:
            SlotsError: the cluster has fewer resources than the ranks need.
            StartTimeoutError: the cluster has enough resources, but they stayed busy, or a rank did not become ready.
            RankFailedError: ``executable_cls`` raised.
            LaunchError: the ranks are already running, or could not be started.
        """
        if self._elastic is not None:
            self._elastic.start(executable_cls, executable_args, executable_kwargs, extra_env_vars)
            return
        if self._job is not None:
            raise LaunchError("The ranks of this RayExecutor are already running. Call shutdown() before start().")
        job = launched(
            LaunchRequest(self._layout.num_proc),
            "ray",
            replace(self._options, env=extra_env_vars),
            run_commands,
            (executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})),
            make=partial(RayLauncher, placement=self._placement(), takes_commands=True),
        )
        with ExitStack() as stack:
            handle = stack.enter_context(job)
            if not isinstance(handle, RayHandle):
                raise TypeError(f"The ray launcher returned a {type(handle).__name__} instead of a RayHandle.")
            is_done_within(handle.started)
            handle.started.result()
            self._job, self._failure = handle, ""
            self._stack = stack.pop_all()
        self._results(self._send(RUN, _is_ready))

    @brief_errors
    def run(
        self, fn: Callable[..., Result], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Result]:
        """Run ``fn(*args, **kwargs)`` on all ranks, and return the results in rank order.

        Raises:
            RankFailedError: a rank failed, which ends all ranks.
            LaunchError: the ranks are not running, ``fn`` cannot be sent, or a result cannot be unpickled here.
        """
        if self._elastic is not None:
            return self._elastic.run(fn, args, kwargs)
        return self._results(self._send(RUN, fn, args, kwargs))

    @brief_errors
    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on all ranks in the background.

        Returns:
            Ray's references to the results, in rank order. ``ray.get`` raises ``RankFailedError`` if a rank failed.

        Raises:
            LaunchError: the ranks are not running, or ``fn`` cannot be sent.
        """
        return self._send(RUN, fn, args, kwargs)

    @brief_errors
    def execute(self, fn: Callable[[Any], Result]) -> list[Result]:
        """Run ``fn(executable)`` on all ranks, where ``executable`` is the rank's own object of ``executable_cls``.

        Returns:
            The results in rank order.

        Raises:
            RankFailedError: a rank failed, which ends all ranks.
            LaunchError: the ranks are not running, ``fn`` cannot be sent, or a result cannot be unpickled here.
        """
        if self._elastic is not None:
            return self._elastic.execute(fn)
        return self._results(self._send(EXECUTE, fn))

    @brief_errors
    def execute_single(self, fn: Callable[[Any], Result]) -> Result:
        """Run ``fn(executable)`` on rank 0 alone, and return the result; see ``execute``."""
        result: Result = self._results(self._send(EXECUTE, fn, ranks=(0,)))[0]
        return result

    def shutdown(self) -> None:
        """End the ranks. If a function is still running, it is ended after some seconds. Can be called again."""
        job, self._job = self._job, None
        if self._elastic is not None:
            self._elastic.end()
        with self._stack:
            if job is not None and not job.has_ended() and ray.is_initialized():
                job.execute(LEAVE, range(self._layout.num_proc))
                job.has_ended(_LEAVE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
        self.shutdown()

    def _placement(self) -> RayPlacement:
        layout, settings = self._layout, self._settings
        group = None
        if self._uses_current_group and ray.is_initialized():
            group = get_current_placement_group()
        seconds = settings.placement_group_timeout_s
        return RayPlacement(layout.resources, layout.ranks_per_node, group, seconds, "placement_group_timeout_s")

    def _send(
        self,
        kind: bytes,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        if self._elastic is not None:
            raise LaunchError("The ranks of an elastic job end with each call. Use run() or execute() instead.")
        if self._job is not None and self._job.has_ended():  # a rank failed while no call waited for a result
            self._fail(None)
        if self._job is None:
            raise LaunchError(f"The ranks of this RayExecutor are not running. {self._failure}Call start() first.")
        if not callable(fn):
            raise TypeError(f"fn must be a function, got {fn!r}. Pass it without calling it.")
        command = kind + pickle_call(fn, tuple(args or ()), dict(kwargs or {}), importable_nowhere)
        return self._job.execute(command, range(self._layout.num_proc) if ranks is None else ranks)

    def _results(self, refs: Sequence[Any]) -> list[Any]:
        waiting = list(refs)
        job = self._job
        while waiting and job is not None:
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_SECONDS)
            if waiting and job.has_ended():
                self._fail(None)
        try:
            return list(ray.get(list(refs)))
        except (RayTaskError, RayActorError) as error:
            self._fail(error)
        except RayError as error:
            raise LaunchError(
                f"fn succeeded on all ranks, but a result cannot be unpickled here: {error}. Return plain values, such "
                "as numbers, strings and arrays."
            ) from error

    def _fail(self, error: Exception | None) -> Never:
        """End the job after the failure of a rank, and raise the failure."""
        failure = self._reason(error)
        self._failure = f"They ended because of a failure: {str(failure).splitlines()[0]} "
        self._abandon()
        raise failure from (None if isinstance(failure, RankFailedError) else error)

    def _reason(self, error: Exception | None) -> LaunchError:
        try:
            if self._job is not None and self._job.has_ended(_FAILED_SECONDS):
                self._job.results()
        except LaunchError as failure:
            return failure
        return LaunchError(f"The ranks of this RayExecutor have ended. {error or ''}".rstrip())

    def _abandon(self) -> None:
        """End the ranks without waiting for their function."""
        self._job = None
        self._stack.close()


def _is_ready() -> None:
    """Do nothing: the response shows that a rank is ready."""
