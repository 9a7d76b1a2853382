"""Converts flags and a configuration file to variables of the ranks' environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from sparkhvd.cli.flags import FOR_HOSTS, MPI_ARGS, SETTING_FLAGS, WITHOUT_EFFECT
from sparkhvd.config import WITHOUT_EFFECT as REPORTED_BY_RUN
from sparkhvd.config import declarations, from_environment
from sparkhvd.errors import ConfigError

_CONFIG_KEYS = (*(flag.config_key for flag in SETTING_FLAGS), MPI_ARGS)  # sections and keys of a configuration file


def variables(flags: argparse.Namespace, file: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """Return the variables that flags and configuration file set; flags override the file.

    Raises:
        ConfigError: a value cannot be read.
    """
    settings = {}
    for flag in SETTING_FLAGS:
        value = getattr(flags, flag.attribute)
        if value is None:
            section, key = flag.config_key
            value = file.get(section, {}).get(key)
        if value is not None:
            try:
                text = flag.text(value)
                from_environment({flag.variable: text})
            except ConfigError as error:
                raise ConfigError(f"--{flag.name}: {error}") from None
            except (ValueError, OverflowError) as error:
                raise ConfigError(f"--{flag.name}={value!r}: {error}.") from None
            settings[flag.variable] = text
    return settings


def notices(flags: argparse.Namespace, settings: Mapping[str, str], launcher: str, *, on_hosts: bool) -> list[str]:
    """Return a line for every setting without effect, except those that ``run`` itself reports.

    Args:
        flags: flags of the command line.
        settings: the variables that the flags and the configuration file set.
        launcher: name of the launcher: ``local``, ``ssh`` or ``mpi``.
        on_hosts: whether the ranks may run on other machines, which flags or a batch job name.
    """
    known = {name for declared in declarations().values() for name in declared.readers} | set(REPORTED_BY_RUN)
    lines = [f"{flag} has no effect: {WITHOUT_EFFECT[flag]}." for flag in flags.without_effect or ()]
    unknown = [flag for flag in SETTING_FLAGS if flag.variable in settings and flag.variable not in known]
    lines += [f"--{flag.name} has no effect: sparkhvd does not read {flag.variable}." for flag in unknown]
    if not on_hosts:
        for_hosts = [
            flag for name, flag in FOR_HOSTS.items() if getattr(flags, name) and (name, launcher) != ("nics", "mpi")
        ]
        lines += [
            f"{flag} has no effect: all ranks run on this machine. Name other hosts with -H." for flag in for_hosts
        ]
    return lines


def read_file(path: str | None) -> dict[str, Mapping[str, object]]:
    """Return the sections of a YAML configuration file, empty without one; ``controller`` gets the key ``name``.

    Raises:
        ConfigError: the file cannot be read or has unknown sections or keys, or PyYAML is not installed.
    """
    if path is None:
        return {}
    try:
        import yaml  # noqa: PLC0415 - an optional dependency
    except ImportError:
        raise ConfigError("--config-file needs PyYAML. Install it with `pip install pyyaml`.") from None
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config-file {path} has no sections such as 'params:' or 'timeline:'.")
    return {str(name): _section(path, str(name), section) for name, section in content.items()}


def _normalized_logging(logging: Mapping[str, object]) -> Mapping[str, object]:
    """Replace Horovod's alternative key ``with_timestamp`` with ``hide_timestamp``."""
    normalized = dict(logging)
    if (shown := normalized.pop("with_timestamp", None)) is not None:
        normalized["hide_timestamp"] = not shown if isinstance(shown, bool) else shown
    return normalized


def _section(path: str, name: str, content: object) -> Mapping[str, object]:
    if name == "controller":
        if str(content).lower() not in {"gloo", "mpi"}:
            raise ConfigError(f"--config-file {path}: controller must be 'gloo' or 'mpi', got {content!r}.")
        return {"name": str(content).lower()}
    if name == "logging" and isinstance(content, Mapping):
        content = _normalized_logging(content)
    keys = [key for section, key in _CONFIG_KEYS if section == name]
    if not keys:
        sections = sorted({"controller", *(section for section, _ in _CONFIG_KEYS)})
        raise ConfigError(
            f"--config-file {path} has an unknown section {name}; expected some of {', '.join(sections)}."
        )
    if not isinstance(content, Mapping | None):
        raise ConfigError(f"--config-file {path}: {name} must be a section with {' or '.join(keys)}, got {content!r}.")
    unknown = [str(key) for key in content or () if key not in keys]
    if unknown:
        raise ConfigError(
            f"--config-file {path}: {name} has unknown keys {', '.join(unknown)}; expected some of {', '.join(keys)}."
        )
    return content or {}
