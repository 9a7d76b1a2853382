"""Values of NumPy's as Python's own."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """``value`` with Python's numbers and lists for those of NumPy, as ``numpy.logspace`` makes them for a grid."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if type(value) in {list, tuple}:
        return type(value)(item.item() if isinstance(item, np.generic) else item for item in value)
    if type(value) is dict:
        return {key: item.item() if isinstance(item, np.generic) else item for key, item in value.items()}
    return value
