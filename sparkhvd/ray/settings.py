"""The settings of a ``RayExecutor``, and the validation of its arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from sparkhvd._util.counts import is_count
from sparkhvd.driver.arguments import check_seconds
from sparkhvd.driver.ray.cluster import RankResources
from sparkhvd.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RaySettings:
    """The settings that ``RayExecutor.create_settings`` returns, under Horovod's names.

    Attributes:
        timeout_s: seconds within which all ranks must be ready, after Ray has reserved their resources.
        placement_group_timeout_s: seconds within which Ray must have reserved the resources.
        nics: network interfaces whose addresses the ranks use; empty means those that all nodes can reach.
        verbose: 0 shows no output of the ranks, 1 shows it, 2 adds sparkhvd's own debug lines.
    """

    timeout_s: float = 300.0
    placement_group_timeout_s: float = 100.0
    nics: tuple[str, ...] = ()
    verbose: int = 1

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        check_seconds("placement_group_timeout_s", self.placement_group_timeout_s)


def settings_from(value: object) -> RaySettings:
    """Return the settings for the argument ``settings``: None, ``RaySettings``, or a settings object of Horovod.

    Raises:
        ConfigError: the settings are those of another executor, or have another type.
    """
    if isinstance(value, RaySettings):
        return value
    if getattr(value, "elastic", False):
        raise ConfigError("settings.elastic is set. Pass these settings to ElasticRayExecutor, or set min_workers.")
    names = [name for name in RaySettings.__dataclass_fields__ if getattr(value, name, None) is not None]
    fields = {name: getattr(value, name) for name in names}
    if value is not None and not fields:
        raise ConfigError(f"settings={value!r} must come from RayExecutor.create_settings().")
    return RaySettings(**{**fields, "nics": names_of(fields.get("nics"))})


def names_of(nics: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names of network interfaces from a collection or from a single name."""
    return (nics,) if isinstance(nics, str) else tuple(sorted(nics or ()))


@dataclass(frozen=True)
class Layout:
    """The ranks of a ``RayExecutor``.

    Attributes:
        num_proc: the number of ranks.
        ranks_per_node: the number of ranks on each node; None lets Ray choose.
        resources: the resources of each rank.
    """

    num_proc: int
    ranks_per_node: int | None
    resources: RankResources


def layout_of(
    *,
    num_workers: int | None,
    num_hosts: int | None,
    num_workers_per_host: int | None,
    cpus_per_worker: int,
    use_gpu: bool,
    gpus_per_worker: float | None,
) -> Layout:
    """Return the ranks for arguments of ``RayExecutor``.

    Raises:
        ConfigError: an argument has a value that cannot work, or arguments contradict each other.
    """
    counts = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
    for name, value in counts.items():
        if value is not None:
            _check_count(name, value)
    if (num_workers is None) == (num_hosts is None):
        raise ConfigError(
            f"Exactly one of num_workers and num_hosts must be set, got num_workers={num_workers} and "
            f"num_hosts={num_hosts}. Pass num_workers, or num_hosts with num_workers_per_host."
        )
    if num_hosts is None and num_workers_per_host is not None:
        raise ConfigError(
            f"num_workers_per_host={num_workers_per_host} requires num_hosts. Pass num_hosts instead of num_workers."
        )
    resources = rank_resources(cpus_per_worker, use_gpu, gpus_per_worker)
    if num_workers is not None:
        return Layout(int(num_workers), None, resources)
    per_host = int(num_workers_per_host or 1)
    return Layout(int(num_hosts or 1) * per_host, per_host, resources)


def rank_resources(
    cpus: int, use_gpu: bool, gpus: float | None, cpus_name: str = "cpus_per_worker", gpus_name: str = "gpus_per_worker"
) -> RankResources:
    """Return the resources of a rank for arguments of an executor, whose names are for messages.

    Raises:
        ConfigError: an argument has a value that cannot work, or arguments contradict each other.
    """
    _check_count(cpus_name, cpus)
    if gpus is None:
        return RankResources(int(cpus), 1.0 if use_gpu else 0.0)
    if not use_gpu:
        raise ConfigError(f"{gpus_name}={gpus} requires use_gpu=True.")
    if not isinstance(gpus, int | float) or not (0 < gpus <= 1 or (gpus > 0 and float(gpus).is_integer())):
        raise ConfigError(
            f"{gpus_name} must be a positive integer or a fraction between 0 and 1 (Ray accepts no other amounts), "
            f"got {gpus!r}."
        )
    return RankResources(int(cpus), float(gpus))


def _check_count(name: str, value: object) -> None:
    if not is_count(value, 1):
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
