"""The GPUs of this machine, as NVIDIA's tool lists them."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def listed() -> list[str]:
    """A line per GPU; empty where there is no driver, or no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return [line for line in listing.stdout.splitlines() if line.startswith("GPU ")] if listing.returncode == 0 else []


GPUS = listed()

needs_gpu = pytest.mark.skipif(not GPUS, reason="nvidia-smi shows no GPU on this machine")
needs_two_gpus = pytest.mark.skipif(len(GPUS) < 2, reason=f"needs two GPUs; nvidia-smi shows {len(GPUS)}")
