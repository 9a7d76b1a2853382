"""The limit of open files and sockets of this process."""

from __future__ import annotations

import resource
from pathlib import Path

from sparkhvd.errors import ConfigError

_RESERVE = 64  # for other files of the program


def allow_files(least: int, most: int, purpose: str) -> None:
    """Let this process open up to ``most`` more files, as far as its hard limit permits.

    Args:
        least: the number of files that it certainly opens.
        most: the number of files that it may open.
        purpose: what needs the files, as the subject of a sentence.

    Raises:
        ConfigError: the hard limit is too low for ``least``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len(list(Path("/proc/self/fd").iterdir())) + _RESERVE
    if soft == resource.RLIM_INFINITY or there + most <= soft:
        return
    if hard != resource.RLIM_INFINITY and there + least > hard:
        raise ConfigError(
            f"{purpose} needs {there + least} open files, but this process may have {hard} (ulimit -Hn). Raise the "
            "hard limit of open files on this host."
        )
    wanted = there + most if hard == resource.RLIM_INFINITY else min(there + most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
