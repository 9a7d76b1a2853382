"""The GPUs of this machine, as NVIDIA's tool lists them, and how ranks share them."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def listed() -> list[str]:
    """Return one line per GPU; none without a driver or a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return [line for line in listing.stdout.splitlines() if line.startswith("GPU ")] if listing.returncode == 0 else []


GPUS = listed()

needs_gpu = pytest.mark.skipif(not GPUS, reason="nvidia-smi shows no GPU on this machine")


def take_device() -> None:
    """Select the device of this rank. Ranks share devices if there are fewer.

    NCCL refuses two ranks of one host on one device. Ranks that share one therefore claim to be on different hosts;
    NCCL then connects them through sockets.
    """
    import torch  # noqa: PLC0415  (this module also serves tests without torch)

    import sparkhvd.torch as hvd  # noqa: PLC0415

    if torch.cuda.device_count() < hvd.local_size():
        os.environ["NCCL_HOSTID"] = f"host of rank {hvd.rank()}"
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
