"""The code between the driver and ``fn``: it starts a worker process per rank, supervises it and reports its outcome.

It runs in Spark tasks, in Ray actors and in the processes that launchers start on hosts.
"""

from __future__ import annotations

from sparkhvd.config import own_devices

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """Return the GPUs of the calling rank by their CUDA names, like ``["2"]``.

    These are the GPUs that Spark or Ray assigned to the rank; the list is empty without an assignment. The first one is
    device ``hvd.local_rank()`` in the rank's CUDA_VISIBLE_DEVICES, or device 0 if the rank sees only its own GPUs. If
    the job's ``env`` sets CUDA_VISIBLE_DEVICES, these are its GPUs instead.
    """
    return own_devices()
