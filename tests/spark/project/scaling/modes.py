from __future__ import annotations

import enum
from functools import cache


class Mode(enum.Enum):
    TIMES = "times"
    PLUS = "plus"


class _Missing:
    """The class of a singleton."""


MISSING = _Missing()


CALLS = 0


def calls() -> int:
    global CALLS  # noqa: PLW0603 - as users do
    CALLS += 1
    return CALLS


@cache
def times(factor: int) -> int:
    return factor
