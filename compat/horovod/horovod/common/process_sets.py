"""Process sets."""

from __future__ import annotations

from sparkhvd.comm.interface import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
