"""The state of one rank within an epoch: its random generators, and the buffers that it changes on its own.

A checkpoint holds the buffers of all ranks, but the training continues with each rank's own buffers. Otherwise the
model would depend on the number of checkpoints, because the variance of all rows is not linear in the ranks' variances.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_NUMPY_SEEDS = 2**32


def seed_generators(seed: int) -> None:
    """Seed the global generators of PyTorch, NumPy and Python, which a user's model or step may use."""
    torch.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)


def rank_state(device: torch.device, buffers: Mapping[str, Any] | None) -> bytes:
    """Return the states of this process's global generators, and its own buffers.

    ``torch.load(..., weights_only=True)`` can load them.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "cpu": torch.get_rng_state(),
        "cuda": None if device.type == "cpu" else torch.cuda.get_rng_state(device),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": random.getstate(),
        "buffers": buffers,
    }
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return buffer.getvalue()


def restore_random(state: bytes, device: torch.device) -> None:
    """Restore the generators of a result of ``rank_state``, perhaps from another kind of device."""
    states = torch.load(io.BytesIO(state), weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])


def own_buffers(state: bytes) -> dict[str, Any] | None:
    """Return the buffers in a result of ``rank_state``; None without any, as in checkpoints of older versions."""
    content: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
    return content.get("buffers")
