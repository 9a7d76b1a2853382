"""The arguments of ``run`` that all launchers share, and their validation before any work starts."""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import TextIO

from sparkhvd._util.counts import is_count, is_integer
from sparkhvd._util.processes.file_descriptors import allow_files
from sparkhvd.config import Config, from_environment
from sparkhvd.errors import ConfigError
from sparkhvd.task.log_files import LogFiles

logger = logging.getLogger(__name__)

# Linux does not start a process with a longer variable. The terminating zero byte counts.
_MAX_VARIABLE_BYTES = 128 * 1024 - 1


@dataclass(frozen=True)
class RunOptions:
    """Arguments of ``run`` that all launchers share, under the same names."""

    start_timeout: float | None = None
    env: Mapping[str, str | None] | None = field(default=None, repr=False)
    stdout: TextIO | LogFiles | None = None
    stderr: TextIO | LogFiles | None = None
    verbose: int = 1
    nics: Sequence[str] = ()
    prefix_output_with_timestamp: bool = False
    executable: str | None = None
    output_filename: str | None = None
    preload: Sequence[str] = ()
    priority: int = 0

    def config(self, environment: Mapping[str, str]) -> Config:
        """Return the settings of an environment. If these options set ``start_timeout``, it also limits ``init()``."""
        config = from_environment(environment)
        return config if self.start_timeout is None else replace(config, start_timeout=float(self.start_timeout))


def check_options(options: RunOptions, launcher: str) -> None:
    """Reject options that cannot work, and warn of options without effect.

    Args:
        options: the options to validate.
        launcher: name of the launcher that will start the ranks.

    Raises:
        ConfigError: an option has a value that cannot work.
    """
    if options.start_timeout is not None:
        check_seconds("start_timeout", options.start_timeout)
    if not isinstance(options.verbose, int):
        raise ConfigError(f"verbose must be 0, 1 or 2, got {options.verbose!r}.")
    if not is_integer(options.priority):
        raise ConfigError(f"priority must be an integer, got {options.priority!r}.")
    check_names("nics", options.nics)
    check_names("preload", options.preload)
    if launcher == "local":
        if options.executable is not None and shutil.which(options.executable) is None:
            raise ConfigError(
                f"executable={options.executable!r} is not a program on this machine. Pass the path of a Python "
                "interpreter."
            )
        if options.nics:
            logger.warning("nics=%s has no effect: all ranks run on this machine.", list(options.nics))
    if launcher == "mpi" and isinstance(options.env, Mapping) and options.env.get("PATH", "") is None:
        raise ConfigError(
            "env={'PATH': None} removes PATH, but Open MPI starts no rank without it. Leave PATH out of env, or use "
            "launcher='barrier'."
        )
    check_sink("stdout", options.stdout)
    check_sink("stderr", options.stderr)
    if options.output_filename is not None:
        check_folder(options.output_filename)


def check_names(name: str, values: Iterable[str] | None) -> None:
    """Reject a string in place of a list of names.

    Raises:
        ConfigError: the value is a string.
    """
    if isinstance(values, str):
        raise ConfigError(f"{name} must be a list of names, got the string {values!r}. Pass [{values!r}].")


def check_counts(num_proc: int | None, gpus_per_task: float | None = None, cpus_per_task: int | None = None) -> None:
    """Reject invalid numbers of ranks, GPUs and cores.

    Raises:
        ConfigError: a number is not positive, or Spark does not accept it.
    """
    for name, value in (("num_proc", num_proc), ("cpus_per_task", cpus_per_task)):
        if value is not None and not is_count(value, 1):
            hint = " Leave it out to use all slots." if name == "num_proc" else ""
            raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.{hint}")
    if gpus_per_task is not None:
        amount = _number(gpus_per_task)
        if not (0 < amount <= 1 or (amount > 0 and amount.is_integer())):
            raise ConfigError(
                "gpus_per_task must be a positive integer or a fraction between 0 and 1 (Spark accepts no other "
                f"amounts), got {gpus_per_task!r}."
            )


def allow_local_ranks(name: str, number: int) -> None:
    """Let this process open the files that it needs for as many ranks on its machine: at least one for each.

    Raises:
        ConfigError: its hard limit of open files is lower.
    """
    allow_files(number, 4 * number, f"{name}={number:,} with launcher='local'")


def check_seconds(name: str, value: float) -> None:
    """Reject a duration that is not positive.

    Raises:
        ConfigError: the value is not a positive number.
    """
    if not _number(value) > 0:
        raise ConfigError(f"{name} must be a positive number of seconds, got {value!r}.")


def checked_environment(env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return a validated copy of the user's ``env``.

    Raises:
        ConfigError: ``env`` is not a mapping, or a name or value is not a valid string.
    """
    if env is not None and not isinstance(env, Mapping):
        raise ConfigError(
            f"env must be a mapping of names to values, like env={{'NAME': 'value'}}, got the type "
            f"{type(env).__name__}."
        )
    changes = dict(env or {})
    for name, value in changes.items():
        if not isinstance(name, str):
            raise ConfigError(f"env has the name {name!r} of type {type(name).__name__}. Names must be strings.")
        if not (value is None or isinstance(value, str)):
            raise ConfigError(
                f"env[{name!r}] has a value of type {type(value).__name__}. Values must be strings, or None to remove "
                "the variable."
            )
        if not name or "=" in name or "\0" in name or "\0" in (value or ""):
            raise ConfigError(
                f"env[{name!r}] is not a valid environment variable: a name must not be empty or contain '=', and "
                "neither name nor value may contain a zero byte."
            )
        size = len(os.fsencode(f"{name}={value}"))
        if value is not None and size > _MAX_VARIABLE_BYTES:
            raise ConfigError(
                f"env[{name!r}] has {size:,} bytes with its name, more than Linux's limit of {_MAX_VARIABLE_BYTES:,} "
                "for a variable. Pass large values as arguments of fn."
            )
    return changes


def split_arguments(name: str, arguments: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the arguments of a program, given as one string in shell syntax or as a list.

    Raises:
        ConfigError: the string is not valid shell syntax.
    """
    try:
        return tuple(shlex.split(arguments)) if isinstance(arguments, str) else tuple(arguments or ())
    except ValueError as error:
        raise ConfigError(f"{name}={arguments!r} is not valid shell syntax: {error}.") from None


def check_sink(name: str, sink: TextIO | LogFiles | None) -> None:
    """Reject a destination for output that does not accept text.

    Raises:
        ConfigError: writing to the destination fails.
    """
    if sink is None or isinstance(sink, LogFiles):
        return
    try:
        sink.write("")
        sink.flush()
    except Exception as error:
        raise ConfigError(
            f"{name}={sink!r} does not accept text: {str(error).rstrip('.')}. Pass an open text file or "
            "sparkhvd.LogFiles; to write to a folder, pass its name as output_filename."
        ) from error


def check_folder(output_filename: str) -> None:
    """Create the folder for the ranks' output, and check that files can be created there.

    Raises:
        ConfigError: the folder is not writable.
    """
    try:
        Path(output_filename).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_filename) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"output_filename={output_filename!r} is not a folder in which files can be created: {error.strerror}."
        ) from error


def _number(value: object) -> float:
    return float(value) if isinstance(value, Real) else math.nan
