"""Horovod's exceptions; those of sparkhvd derive from them."""

from __future__ import annotations

from sparkhvd.errors import HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  the name is Horovod's
    """Raised by Horovod when the hosts of an elastic job change; never raised here, as no job is elastic.

    Args:
        skip_sync: whether the ranks may go on without an exchange of their states.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync
