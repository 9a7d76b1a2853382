"""The functions of every framework as methods of an object."""

from __future__ import annotations

from typing import Any

from horovod.common import interface
from sparkhvd.comm import session
from sparkhvd.compat.horovod import missing

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """Has the functions as methods, for programs that create such an object as Horovod's modules do.

    Args:
        pkg_path: has no effect, like ``args``: there is no library to find.
    """

    def __init__(self, pkg_path: str, *args: str) -> None: ...

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every process set, by its id; Horovod's tests call this function."""
        return session.current().process_sets()

    def __getattr__(self, name: str) -> Any:
        if name in interface.__all__:
            return getattr(interface, name)
        raise AttributeError(missing("horovod.common.basics", name, interface.__all__))
