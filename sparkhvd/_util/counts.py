"""Counts with their noun, for messages."""

from __future__ import annotations


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return the count and the noun in the right number.

    Example:
        >>> counted(1, "row"), counted(2, "row"), counted(0, "entry", "entries")
        ('1 row', '2 rows', '0 entries')
    """
    return f"{count} {singular if count == 1 else plural or singular + 's'}"
