"""What to mind when a process imports a framework."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused_for_import() -> Iterator[None]:
    """Within this block nothing is collected, and what is there afterwards is never looked at again.

    What the import of a framework makes is hardly ever garbage. To look for some, again and again while it grows and
    once more when the process ends, is a third of the time that a rank which imports torch needs to start and end.
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
