from __future__ import annotations

from . import modes
from .modes import Mode


def is_times(mode: object) -> bool:
    return mode is Mode.TIMES and modes.times(8) == 8
