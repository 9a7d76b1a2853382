from __future__ import annotations

import enum
from functools import cache


class Mode(enum.Enum):
    TIMES = "times"
    PLUS = "plus"


class _Missing:
    """The class of a singleton."""


MISSING = _Missing()


@cache
def times(factor: int) -> int:
    return factor
