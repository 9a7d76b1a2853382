"""Workarounds for the import of frameworks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused_for_import() -> Iterator[None]:
    """Pause garbage collection inside ``with``, and exempt the objects that exist at its end from later collections.

    Importing a framework creates hardly any garbage, yet collections during import and exit take a third of the time
    that a rank needs to import torch and exit.
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
    """Hide triton from PyTorch if TensorFlow is loaded, because importing triton would then crash the process.

    ``torch.compile`` on GPUs then reports that triton is missing. Users who need it together with TensorFlow import
    triton first.
    """
    if "tensorflow" in sys.modules and "triton" not in sys.modules:
        sys.modules["triton"] = None  # type: ignore[assignment]  # an import of it now raises ImportError
