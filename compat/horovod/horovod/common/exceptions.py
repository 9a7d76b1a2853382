"""Horovod's exceptions, which sparkhvd defines."""

from __future__ import annotations

from sparkhvd.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """Never raised: sparkhvd is not compiled for a version of a framework. Programs may catch it."""
