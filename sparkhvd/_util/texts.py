"""Parts of messages."""

from __future__ import annotations


def first_line(message: object) -> str:
    """Return the first line of a message that is not empty; the message may be an error."""
    return str(message).strip().partition("\n")[0]
