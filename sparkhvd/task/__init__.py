"""The code of a Spark task: it starts one worker process per rank, supervises it and reports its outcome."""

from __future__ import annotations

from sparkhvd.config import own_devices

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """Return the GPUs of the calling rank by their CUDA names, like ``["2"]``.

    These are the GPUs that Spark assigned to the rank's task; the list is empty when it assigned none. Device
    ``hvd.local_rank()`` of the rank's CUDA_VISIBLE_DEVICES is the first of them.
    """
    return own_devices()
