"""What a failure on made-up rows tells: shapes and types are those of the real rows, values are not."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fails_by_shape(function: Callable[..., Any], tensors: Sequence[torch.Tensor], error: Exception) -> bool:
    """Whether ``function(*tensors)``, which raised ``error``, fails in the same place on tensors without values.

    If not, real rows may well work: an embedding may have no id 0, or a ``forward`` may check its input.
    """
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            function(*(mode.from_tensor(tensor) for tensor in tensors))
    except Exception as again:  # noqa: BLE001  (also what only tensors without values raise)
        place = _place(error)
        return type(again) is type(error) and _place(again)[: len(place)] == place
    return False


def _place(error: Exception) -> list[tuple[str, int | None]]:
    """The lines of the call that failed, without that of the caller."""
    return [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)][1:]
