"""The resources of a rank's Spark task."""

from __future__ import annotations

from sparkhvd.config import own_devices

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark assigned to this rank's task."""
    return own_devices()
