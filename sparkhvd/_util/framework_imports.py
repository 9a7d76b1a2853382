"""Workarounds for the import of frameworks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused_for_import() -> Iterator[None]:
    """Pause garbage collection inside ``with``, and exempt all objects that exist afterwards from it.

    Importing a framework creates hardly any garbage, yet collections during the import and at exit take a third of the
    time that a rank needs to import torch and end.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def keep_triton_from_tensorflow() -> None:
    """Make PyTorch do without triton where TensorFlow is loaded; the process would crash in the import of triton.

    PyTorch then misses ``torch.compile`` on GPUs, and says so when it is asked for it. Whoever needs it beside
    TensorFlow imports triton before TensorFlow.
    """
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it now raises ImportError
