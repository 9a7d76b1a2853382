"""From flags and a configuration file to variables of the ranks' environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from sparkhvd.cli.flags import TUNINGS, WITHOUT_EFFECT
from sparkhvd.config import WITHOUT_EFFECT as SAID_BY_RUN
from sparkhvd.config import declarations
from sparkhvd.errors import ConfigError


def variables(flags: argparse.Namespace, file: Mapping[str, object]) -> dict[str, str]:
    """The variables that flags and configuration file set; flags win.

    Raises:
        ConfigError: a value cannot be read.
    """
    found = {}
    for one in TUNINGS:
        value = getattr(flags, one.name)
        if value is None:
            section = file.get(one.place[0])
            value = section.get(one.place[1]) if isinstance(section, Mapping) else None
        if value is not None:
            try:
                found[one.variable] = one.text(value)
            except ValueError as error:
                raise ConfigError(f"--{one.flag}={value!r}: {error}.") from None
    return found


def notices(flags: argparse.Namespace, given: Mapping[str, str]) -> list[str]:
    """A line for everything that was asked for and changes nothing, without what ``run`` itself says."""
    known = {name for declared in declarations().values() for name in declared.readers} | set(SAID_BY_RUN)
    lines = [f"{flag} has no effect: {WITHOUT_EFFECT[flag]}." for flag in flags.without_effect or ()]
    unknown = [one for one in TUNINGS if one.variable in given and one.variable not in known]
    return lines + [f"--{one.flag} has no effect: nothing here reads {one.variable}." for one in unknown]


def read_file(path: str | None) -> dict[str, object]:
    """The sections of a YAML configuration file; empty without one.

    Raises:
        ConfigError: the file cannot be read, or PyYAML is not installed.
    """
    if path is None:
        return {}
    try:
        import yaml  # noqa: PLC0415 - nothing else needs it
    except ImportError:
        raise ConfigError("--config-file needs PyYAML; install it with pip install pyyaml.") from None
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path} has no sections such as 'params:' or 'timeline:'.")
    unknown = sorted(set(content) - {one.place[0] for one in TUNINGS} - {"controller"})
    if unknown:
        raise ConfigError(f"--config-file {path} has sections that do not exist: {', '.join(map(str, unknown))}.")
    return content
