"""Horovod's exceptions, which are those of sparkhvd."""

from __future__ import annotations

from sparkhvd.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
