"""Where PyTorch's random numbers are, so that a continued run draws those that an undisturbed one would."""

from __future__ import annotations

import numpy as np
import torch


def random_state(device: torch.device) -> bytes:
    """The state of this process's generators: the CPU's and that of the device."""
    state = torch.get_rng_state().numpy().tobytes()
    return state if device.type == "cpu" else state + torch.cuda.get_rng_state(device).numpy().tobytes()


def restore_random(state: bytes, device: torch.device) -> None:
    """Go on from what ``random_state`` gave, maybe on another kind of device."""
    size = len(torch.get_rng_state())
    numbers = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    torch.set_rng_state(numbers[:size])
    if device.type == "cuda" and len(numbers) > size:
        torch.cuda.set_rng_state(numbers[size:], device)
