"""A check that this host can encrypt."""

from __future__ import annotations

from sparkhvd import _core
from sparkhvd.errors import LaunchError


def encryption_problem(host: str) -> str:
    """Return why this host, named ``host``, cannot encrypt a job's traffic; empty if it can."""
    try:
        _core.check_encryption()
    except _core.CoreError as error:
        return f"Host {host} cannot encrypt the job's traffic (SPARKHVD_ENCRYPT): {error.args[1]}."
    return ""


def require_encryption(host: str) -> None:
    """Check that this host can encrypt, before it sends anything.

    Raises:
        LaunchError: this host, named ``host``, cannot encrypt.
    """
    if why := encryption_problem(host):
        raise LaunchError(why)
