"""Raises ``ImportError``: there is no MXNet on sparkhvd."""

from __future__ import annotations

raise ImportError(
    "sparkhvd has no MXNet interface; MXNet was retired in 2023. Use horovod.torch or horovod.tensorflow."
)
