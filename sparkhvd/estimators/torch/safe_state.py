"""What a checkpoint may hold: it is opened by ``torch.load(..., weights_only=True)``, which runs no code."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from sparkhvd.errors import ParamError


def refuse_unsafe_model(model: torch.nn.Module) -> None:
    """Look at what ``get_extra_state`` of the model's modules returns.

    Raises:
        ParamError: a checkpoint with it could not be opened again.
    """
    extra = {name: value for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)}
    if not extra:
        return
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    refuse_unsafe(buffer, f"The model's state ({', '.join(extra)}: see get_extra_state)")


def refuse_unsafe(checkpoint: Path | io.BytesIO, what: str) -> None:
    """Say while it is written what would otherwise be said where a run is to go on from it.

    Raises:
        ParamError: it holds objects that ``torch.load(..., weights_only=True)`` does not make.
    """
    unsafe_globals = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
    found = [] if unsafe_globals is None else unsafe_globals(checkpoint)  # torch 2.4 and 2.5 cannot tell
    if found:
        raise ParamError(
            f"{what} holds {', '.join(sorted(found))}. Checkpoints are opened without running any code in them, so "
            "they must be made of tensors, numbers, strings, lists and dicts. torch.serialization.add_safe_globals "
            "allows more, where it is called in the ranks, too."
        )
