"""Seeds of random generators, and PyTorch's state, so that a resumed run draws the numbers of an uninterrupted one."""

from __future__ import annotations

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
    """Return the state of this process's generators for the CPU and the device."""
    state = torch.get_rng_state().numpy().tobytes()
    return state if device.type == "cpu" else state + torch.cuda.get_rng_state(device).numpy().tobytes()


def restore_random(state: bytes, device: torch.device) -> None:
    """Restore a result of ``random_state``, perhaps from another kind of device."""
    size = len(torch.get_rng_state())
    numbers = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    torch.set_rng_state(numbers[:size])
    if device.type == "cuda" and len(numbers) > size:
        torch.cuda.set_rng_state(numbers[size:], device)
