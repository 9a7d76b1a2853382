"""Checks that ``torch.load(..., weights_only=True)``, which runs no code, can open a checkpoint."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from sparkhvd.errors import ParamError


def refuse_unsafe_model(model: torch.nn.Module) -> None:
    """Check the results of ``get_extra_state`` of the model's modules.

    Raises:
        ParamError: a checkpoint that contains them could not be opened.
    """
    extra = {name: value for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)}
    if not extra:
        return
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    refuse_unsafe(buffer, f"The model's state ({', '.join(extra)}: see get_extra_state)")


def refuse_unsafe(checkpoint: Path | io.BytesIO, subject: str) -> None:
    """Check a checkpoint when it is written, not only when a run resumes from it.

    Raises:
        ParamError: it holds objects that ``torch.load(..., weights_only=True)`` refuses to create.
    """
    unsafe = _unsafe_globals(checkpoint)
    if unsafe:
        raise ParamError(
            f"{subject} holds {', '.join(sorted(unsafe))}. Checkpoints are opened without running any code in them, so "
            "they may hold only tensors, numbers, strings, lists and dicts. To allow more types, call "
            "torch.serialization.add_safe_globals, on the ranks too."
        )


def is_loadable(value: object) -> bool:
    """Return whether ``torch.load(..., weights_only=True)`` can open a value that ``torch.save`` has written."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001  (any failure of the value's own pickling)
        return False
    return True


def plain_numbers(state: Any) -> Any:
    """Return ``state`` with NumPy scalars, such as a learning rate of ``numpy.logspace``, as Python numbers."""
    if isinstance(state, np.generic):
        return state.item()
    if type(state) in {dict, Counter}:  # MultiStepLR counts its milestones
        return type(state)({plain_numbers(name): plain_numbers(value) for name, value in state.items()})
    if type(state) is list:
        return [plain_numbers(value) for value in state]
    if type(state) is tuple:
        return tuple(plain_numbers(value) for value in state)
    return state


def content_of(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a Lightning checkpoint that this process has written, with placeholders for objects.

    The code of other objects in it does not run, except with PyTorch before 2.6.
    """
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        old: dict[str, Any] = torch.load(checkpoint, weights_only=False, map_location="cpu")
        return old
    unsafe = _unsafe_globals(checkpoint)
    placeholders: list[Any] = [(_OpaqueObject, name) for name in unsafe]
    with torch.serialization.safe_globals(placeholders) if unsafe else contextlib.nullcontext():
        content: dict[str, Any] = torch.load(checkpoint, weights_only=True, map_location="cpu")
    return content


class _OpaqueObject:
    """Placeholder for an object that is not created."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _unsafe_globals(checkpoint: Path | io.BytesIO) -> list[str]:
    find = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    if find is not None:
        unsafe: list[str] = find(checkpoint)
        return unsafe
    try:  # PyTorch before 2.6 names only the first unsafe object
        torch.load(checkpoint, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        return re.findall(r"GLOBAL (\S+) was not", str(error)) or ["objects of other types"]
    return []
