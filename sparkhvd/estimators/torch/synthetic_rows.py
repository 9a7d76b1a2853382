"""Interpretation of failures on synthetic rows, which share only shapes and types with real rows."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fails_by_shape(function: Callable[..., Any], tensors: Sequence[torch.Tensor], error: Exception) -> bool:
    """Return whether ``function(*tensors)``, which raised ``error``, fails at the same line on tensors without values.

    If not, real rows may still work: an embedding may lack the id 0, or ``forward`` may check its input.
    """
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            function(*(mode.from_tensor(tensor) for tensor in tensors))
    except Exception as again:  # noqa: BLE001  (including errors that only tensors without values raise)
        lines = _lines(error)
        return type(again) is type(error) and _lines(again)[: len(lines)] == lines
    return False


def _lines(error: Exception) -> list[tuple[str, int | None]]:
    """Return the lines of the failed call, without the line of its caller."""
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)][1:]
