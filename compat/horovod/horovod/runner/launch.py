"""``horovodrun`` as a function."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from horovod.runner import _HorovodArgs, run
from sparkhvd.cli.run import main
from sparkhvd.errors import LaunchError

__all__ = ["run_commandline"]

# Arguments whose flag has another name.
_FLAGS = {
    "np": "num_proc",
    "use_gloo": "gloo",
    "use_mpi": "mpi",
    "nics": "network_interfaces",
    "slots": "slots_per_host",
    "cooldown_range": "blacklist_cooldown_range",
}


def run_commandline() -> None:
    """Run ``horovodrun`` with the arguments of this process, which exits if the job fails."""
    if code := main():
        sys.exit(code)


def _run(args: _HorovodArgs) -> list[Any] | None:
    """Run ``args.run_func`` and return its results by rank, or run ``args.command``.

    Raises:
        LaunchError: the command failed.
    """
    arguments = {name: value for name, value in vars(args).items() if value}
    command = arguments.pop("command", [])
    if function := arguments.pop("run_func", None):
        if nics := arguments.pop("nics", None):
            arguments["network_interfaces"] = nics.split(",") if isinstance(nics, str) else nics
        return run(function, **arguments)
    if code := main([*_flags(arguments), "--", *command]):
        raise LaunchError(f"The command {' '.join(command)!r} failed with exit code {code}. See its output.")
    return None


def _flags(arguments: Mapping[str, Any]) -> Iterable[str]:
    """Yield the words of a command line of ``horovodrun``."""
    for name, value in arguments.items():
        flag = "--" + _FLAGS.get(name, name).replace("_", "-")
        if value is True or name == "verbose":  # a level in Horovod
            yield flag
        elif isinstance(value, str | int | float):
            yield f"{flag}={value}"
        elif name == "nics":
            yield f"{flag}={','.join(value)}"
        else:
            yield from (flag, *map(str, value))
