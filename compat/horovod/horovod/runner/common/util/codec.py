"""Python objects as texts."""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle

__all__ = ["dumps_base64", "loads_base64"]


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Return a pickled object in base64: a string, or bytes if ``to_ascii`` is False."""
    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded


def loads_base64(encoded: str | bytes) -> Any:
    """Return the object of ``dumps_base64``, whose origin you must trust: loading a pickle can execute any code."""
    return cloudpickle.loads(base64.b64decode(encoded))
