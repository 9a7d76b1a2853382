"""The arguments of ``run`` that hold for all launchers, and what may be wrong with them: said before any work."""

from __future__ import annotations

import logging
import math
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TextIO

from sparkhvd.errors import ConfigError
from sparkhvd.task.log_files import LogFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """Arguments of ``run`` that hold for all launchers, by their names there."""

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


def check_options(options: RunOptions, launcher: str) -> None:
    """Refuse what cannot work, and say what changes nothing.

    Args:
        options: to look at.
        launcher: the name of the one that will start the ranks.

    Raises:
        ConfigError: one of them cannot work.
    """
    if options.start_timeout is not None:
        check_seconds("start_timeout", options.start_timeout)
    if not isinstance(options.verbose, int):
        raise ConfigError(f"verbose={options.verbose!r} is not 0, 1 or 2.")
    check_names("nics", options.nics)
    check_names("preload", options.preload)
    if launcher == "local":
        if options.executable is not None and shutil.which(options.executable) is None:
            raise ConfigError(f"executable={options.executable!r} is no program on this machine; give a Python's path.")
        if options.nics:
            logger.warning("nics=%s has no effect: all ranks run on this machine.", list(options.nics))
    check_sink("stdout", options.stdout)
    check_sink("stderr", options.stderr)
    if options.output_filename is not None:
        check_folder(options.output_filename)


def check_names(name: str, given: Iterable[str] | None) -> None:
    """Refuse one text where several are wanted.

    Raises:
        ConfigError: it is one.
    """
    if isinstance(given, str):
        raise ConfigError(f"{name}={given!r} is one text; give a list of names, like [{given!r}].")


def check_counts(num_proc: int | None, gpus_per_task: float | None = None, cpus_per_task: int | None = None) -> None:
    """Refuse amounts that no job can have.

    Raises:
        ConfigError: one is none.
    """
    for name, value in (("num_proc", num_proc), ("cpus_per_task", cpus_per_task)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            what, or_all = ("processes", ", or leave it out for all slots") if name == "num_proc" else ("cores", "")
            raise ConfigError(f"{name}={value!r} is not a number of {what}; give 1 or more{or_all}.")
    if gpus_per_task is not None:
        amount = _number(gpus_per_task)
        if not (0 < amount <= 1 or (amount > 0 and amount.is_integer())):
            raise ConfigError(
                f"gpus_per_task={gpus_per_task!r} is no amount that Spark takes; give a whole number or less than 1."
            )


def check_seconds(name: str, value: float) -> None:
    """Refuse what is no time to wait.

    Raises:
        ConfigError: it is none.
    """
    if not _number(value) > 0:
        raise ConfigError(f"{name}={value!r} is not above 0 seconds.")


def checked_environment(env: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """The user's ``env``, copied.

    Raises:
        ConfigError: it is no mapping, or a name or value is not a string.
    """
    if env is not None and not isinstance(env, Mapping):
        raise ConfigError(f"env is of type {type(env).__name__}; give names and values, like env={{'NAME': 'value'}}.")
    changes = dict(env or {})
    for name, value in changes.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            raise ConfigError(
                f"env[{name!r}] has a value of type {type(value).__name__}; names and values are strings."
            )
        if not name or "=" in name or "\0" in name or "\0" in (value or ""):
            raise ConfigError(
                f"env[{name!r}] cannot be in an environment: a name is not empty and has no '=', and neither name nor "
                "value has a zero byte."
            )
    return changes


def words_of(name: str, arguments: str | Sequence[str] | None) -> tuple[str, ...]:
    """Arguments of a program that were given as one text, as a shell would part it, or as a list.

    Raises:
        ConfigError: the text cannot be parted.
    """
    try:
        return tuple(shlex.split(arguments)) if isinstance(arguments, str) else tuple(arguments or ())
    except ValueError as error:
        raise ConfigError(f"{name}={arguments!r} cannot be read as a shell would: {error}.") from None


def check_sink(name: str, given: TextIO | LogFiles | None) -> None:
    """Refuse what cannot take text.

    Raises:
        ConfigError: it does not.
    """
    if given is None or isinstance(given, LogFiles):
        return
    try:
        given.write("")
        given.flush()
    except Exception as error:
        raise ConfigError(
            f"{name}={given!r} takes no text: {error}. Give an open text file, or sparkhvd.LogFiles; the argument "
            "output_filename takes the name of a folder."
        ) from error


def check_folder(output_filename: str) -> None:
    """Make the folder for the ranks' output, and see whether files can be made there.

    Raises:
        ConfigError: they cannot.
    """
    try:
        Path(output_filename).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_filename) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(
            f"output_filename={output_filename!r}: no files can be made in that folder: {error.strerror}."
        ) from error


def _number(value: object) -> float:
    return float(value) if isinstance(value, Real) else math.nan
