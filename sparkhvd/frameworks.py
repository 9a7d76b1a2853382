"""Frameworks that do not bear each other in one process."""

from __future__ import annotations

import sys


def keep_triton_from_tensorflow() -> None:
    """Make PyTorch do without triton where TensorFlow is loaded; the process would crash in the import of triton.

    PyTorch then misses ``torch.compile`` on GPUs, and says so when it is asked for it. Whoever needs it beside
    TensorFlow imports triton before TensorFlow.
    """
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it now raises ImportError
