"""Settings of a process, read from the environment in this one place.

Everything else receives the frozen ``Config``. ``SPARKHVD_*`` names are ours; where a ``HOROVOD_*`` name has been in
use for the same thing it is read as a fallback.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sparkhvd.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Settings of the collective core and of the launchers.

    Attributes:
        collective_timeout: seconds a rank waits inside a collective for the others before it raises. A dead peer is
            noticed at once; this bounds only the wait for a slow or hanging one.
        start_timeout: seconds within which all ranks must have started.
        fusion_threshold: bytes up to which ready allreduces are packed into one.
        cache_capacity: tensor names whose negotiation is remembered.
        shared_memory: whether ranks of one host exchange data through shared memory.
    """

    collective_timeout: float = 1800.0
    start_timeout: float = 600.0
    fusion_threshold: int = 64 * 1024 * 1024
    cache_capacity: int = 1024
    shared_memory: bool = True


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """The configuration that the environment describes.

    Args:
        environment: read instead of the process environment when given.

    Raises:
        ConfigError: a variable has a value that cannot be read; the message names both.
    """
    env = os.environ if environment is None else environment
    base = Config()
    return Config(
        collective_timeout=_number(
            env, ("SPARKHVD_COLLECTIVE_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS"), base.collective_timeout
        ),
        start_timeout=_number(env, ("SPARKHVD_START_TIMEOUT", "HOROVOD_SPARK_START_TIMEOUT"), base.start_timeout),
        fusion_threshold=int(
            _number(env, ("SPARKHVD_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD"), base.fusion_threshold)
        ),
        cache_capacity=int(_number(env, ("SPARKHVD_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY"), base.cache_capacity)),
        shared_memory=_number(env, ("SPARKHVD_SHARED_MEMORY",), 1) != 0,
    )


def _number(env: Mapping[str, str], names: tuple[str, ...], default: float) -> float:
    for name in names:
        if (text := env.get(name, "")) != "":
            try:
                value = float(text)
            except ValueError:
                raise ConfigError(f"{name}={text!r} is not a number.") from None
            if value < 0:
                raise ConfigError(f"{name}={text!r} is negative.")
            return value
    return default


def changed_environment(changes: Mapping[str, str | None], defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with ``changes`` applied, for a child process.

    Args:
        changes: replace what is there; None removes a variable.
        defaults: hold where neither the environment nor ``changes`` says anything.
    """
    merged = {**(defaults or {}), **os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def export(variables: Mapping[str, str]) -> None:
    """Set variables of this process's environment, for user code to read."""
    os.environ.update(variables)
