"""Horovod's exceptions, which sparkhvd defines."""

from __future__ import annotations

from sparkhvd.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
