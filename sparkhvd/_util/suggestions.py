"""What somebody meant who wrote a name that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches


def did_you_mean(
    name: str, known: Iterable[str], *, most: int = 1, show: Callable[[str], str] = repr, cutoff: float = 0.6
) -> str:
    """A question with the names that are nearest to ``name``; empty when none is near.

    Example:
        >>> did_you_mean("lable_cols", ["feature_cols", "label_cols"])
        "Did you mean 'label_cols'?"

    Args:
        name: what was written.
        known: the names that there are. One that differs in its case alone is the nearest.
        most: how many to name.
        show: how a name is written in the question.
        cutoff: how near is near, between 0 and 1.
    """
    names = list(known)
    same = [other for other in names if other.lower() == name.lower()]
    near = same[:most] or get_close_matches(name, names, n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(show, near))}?" if near else ""
