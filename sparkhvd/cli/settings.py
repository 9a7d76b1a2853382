"""From flags and a configuration file to variables of the ranks' environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from sparkhvd.cli.flags import FOR_HOSTS, MPI_ARGS, TUNINGS, WITHOUT_EFFECT
from sparkhvd.config import WITHOUT_EFFECT as SAID_BY_RUN
from sparkhvd.config import declarations, from_environment
from sparkhvd.errors import ConfigError


def variables(flags: argparse.Namespace, file: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """The variables that flags and configuration file set; flags win.

    Raises:
        ConfigError: a value cannot be read.
    """
    found = {}
    for one in TUNINGS:
        value = getattr(flags, one.name)
        if value is None:
            value = file.get(one.place[0], {}).get(one.place[1])
        if value is not None:
            try:
                text = one.text(value)
                from_environment({one.variable: text})
            except ConfigError as error:
                raise ConfigError(f"--{one.flag}: {error}") from None
            except (ValueError, OverflowError) as error:
                raise ConfigError(f"--{one.flag}={value!r}: {error}.") from None
            found[one.variable] = text
    return found


def notices(flags: argparse.Namespace, given: Mapping[str, str], launcher: str) -> list[str]:
    """A line for everything that was asked for and changes nothing, without what ``run`` itself says.

    Args:
        flags: of the command line.
        given: the variables that they and the configuration file set.
        launcher: who starts the ranks: ``local``, ``ssh`` or ``mpi``.
    """
    known = {name for declared in declarations().values() for name in declared.readers} | set(SAID_BY_RUN)
    lines = [f"{flag} has no effect: {WITHOUT_EFFECT[flag]}." for flag in flags.without_effect or ()]
    unknown = [one for one in TUNINGS if one.variable in given and one.variable not in known]
    lines += [f"--{one.flag} has no effect: nothing here reads {one.variable}." for one in unknown]
    if flags.hosts is None and flags.hostfile is None:
        alone = [
            flag for name, flag in FOR_HOSTS.items() if getattr(flags, name) and (name, launcher) != ("nics", "mpi")
        ]
        lines += [f"{flag} has no effect: all ranks run on this machine; -H names others." for flag in alone]
    return lines


def read_file(path: str | None) -> dict[str, Mapping[str, object]]:
    """The sections of a YAML configuration file; empty without one. ``controller`` becomes one with a ``name``.

    Raises:
        ConfigError: the file cannot be read or has something unknown in it, or PyYAML is not installed.
    """
    if path is None:
        return {}
    try:
        import yaml  # noqa: PLC0415 - nothing else needs it
    except ImportError:
        raise ConfigError("--config-file needs PyYAML; install it with pip install pyyaml.") from None
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path} has no sections such as 'params:' or 'timeline:'.")
    return {str(name): _section(path, str(name), found) for name, found in content.items()}


def _with_one_word(logging: Mapping[str, object]) -> Mapping[str, object]:
    """Without Horovod's other word for ``hide_timestamp``."""
    said = dict(logging)
    if (shown := said.pop("with_timestamp", None)) is not None:
        said["hide_timestamp"] = not shown if isinstance(shown, bool) else shown
    return said


def _section(path: str, name: str, found: object) -> Mapping[str, object]:
    if name == "controller":
        if str(found).lower() not in {"gloo", "mpi"}:
            raise ConfigError(f"--config-file {path}: controller is {found!r}; there are 'gloo' and 'mpi'.")
        return {"name": str(found).lower()}
    if name == "logging" and isinstance(found, Mapping):
        found = _with_one_word(found)
    keys = [key for section, key in (*(one.place for one in TUNINGS), MPI_ARGS) if section == name]
    if not keys:
        raise ConfigError(f"--config-file {path} has a section that does not exist: {name}.")
    if not isinstance(found, Mapping | None):
        raise ConfigError(f"--config-file {path}: {name} is {found!r}, not a section with {' or '.join(keys)}.")
    unknown = [str(key) for key in found or () if key not in keys]
    if unknown:
        raise ConfigError(f"--config-file {path}: {name} has {', '.join(unknown)}; it can have {', '.join(keys)}.")
    return found or {}
