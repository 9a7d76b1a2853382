"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches


def did_you_mean(
    name: str, known_names: Iterable[str], *, most: int = 1, show: Callable[[str], str] = repr, cutoff: float = 0.6
) -> str:
    """Return a question with the known names closest to ``name``; empty when none is close.

    Examples:
        >>> did_you_mean("lable_cols", ["feature_cols", "label_cols"])
        "Did you mean 'label_cols'?"

    Args:
        name: the unknown name.
        known_names: the names to choose from. A name that differs only in case is the closest.
        most: the largest number of suggestions.
        show: formats a name.
        cutoff: the least similarity of a suggestion, between 0 and 1.
    """
    choices = list(known_names)
    same_letters = [choice for choice in choices if choice.lower() == name.lower()]
    suggestions = same_letters[:most] or get_close_matches(name, choices, n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(map(show, suggestions))}?" if suggestions else ""
