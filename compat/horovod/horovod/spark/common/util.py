"""Preparation of rows, and helpers of estimators."""

from __future__ import annotations

from typing import Any

from sparkhvd import prepare_data
from sparkhvd.config import runs_on_databricks as is_databricks

__all__ = ["is_databricks", "prepare_data", "to_list"]


def to_list(var: Any, length: int) -> list[Any] | None:
    """Return a list of ``length`` entries; one object, or a list with one entry, is repeated. None stays None.

    Raises:
        ValueError: a list has another length.
    """
    if var is None:
        return None
    entries = var if isinstance(var, list) else [var]
    if len(entries) not in {1, length}:
        raise ValueError(f"The list {var!r} must have {length} entries, but has {len(entries)}.")
    return entries * length if len(entries) == 1 else entries
