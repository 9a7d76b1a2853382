"""What runs inside a Spark task: it starts one worker process per rank, watches over it and reports its outcome."""

from __future__ import annotations

from sparkhvd.config import own_devices

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """The GPUs of the rank that calls this, as CUDA calls them, like ``["2"]``.

    They are those that Spark assigned to the rank's task; the list is empty where Spark assigned none. Device
    ``hvd.local_rank()`` of the rank's CUDA_VISIBLE_DEVICES is the first of them.
    """
    return own_devices()
