"""The limit on the open files and sockets of this process."""

from __future__ import annotations

import resource
from pathlib import Path

from sparkhvd.errors import ConfigError

_RESERVE = 64  # for other files of the program


def allow_files(least: int, most: int, purpose: str) -> None:
    """Raise the soft limit so that this process can open ``most`` more files, as far as its hard limit permits.

    Args:
        least: the number of files that the process certainly opens.
        most: the number of files that it may open.
        purpose: what needs the files, as the subject of a sentence.

    Raises:
        ConfigError: the hard limit is too low for ``least``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir())) + _RESERVE
    if soft == resource.RLIM_INFINITY or in_use + most <= soft:
        return
    if hard != resource.RLIM_INFINITY and in_use + least > hard:
        raise ConfigError(
            f"{purpose} needs {in_use + least} open files, but this process may have {hard} (ulimit -Hn). Raise the "
            "hard limit of open files on this host."
        )
    wanted = in_use + most if hard == resource.RLIM_INFINITY else min(in_use + most, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
