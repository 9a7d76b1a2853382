"""Counts: validated numbers, and numbers with their noun for messages."""

from __future__ import annotations

from numbers import Integral
from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy; booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_count(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer of at least ``least``."""
    return is_integer(value) and int(value) >= least


def plain_count(value: int | None) -> int | None:
    """Return an integer of any type as a Python ``int``, which Spark and pickles need; None stays None."""
    return None if value is None else int(value)


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return the count and the noun in the right number.

    Example:
        >>> counted(1, "row"), counted(2, "row"), counted(0, "entry", "entries")
        ('1 row', '2 rows', '0 entries')
    """
    return f"{count} {singular if count == 1 else plural or singular + 's'}"
