"""``horovod.spark``: runs functions on the executors of a Spark cluster."""

from __future__ import annotations

from typing import Any, Never

from sparkhvd import run
from sparkhvd.compat.horovod import ELASTIC

__all__ = ["run", "run_elastic"]


def run_elastic(*_: Any, **__: Any) -> Never:
    """Raise ``NotImplementedError``: elastic jobs do not run on Spark yet."""
    raise NotImplementedError(ELASTIC)
