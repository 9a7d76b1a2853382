"""Seeds and states of random generators, so that a resumed run draws the same numbers as an uninterrupted one."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

_NUMPY_SEEDS = 2**32


def seed_generators(seed: int) -> None:
    """Seed the global generators of PyTorch, NumPy and Python, which a user's model or step may use."""
    torch.manual_seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)
    random.seed(seed)


def random_state(device: torch.device) -> bytes:
    """Return the states of this process's global generators; ``torch.load(..., weights_only=True)`` can load them."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "cpu": torch.get_rng_state(),
        "cuda": None if device.type == "cpu" else torch.cuda.get_rng_state(device),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "python": random.getstate(),
    }
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return buffer.getvalue()


def restore_random(state: bytes, device: torch.device) -> None:
    """Restore a result of ``random_state``, perhaps from another kind of device."""
    states = torch.load(io.BytesIO(state), weights_only=True)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"], device)
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])
