"""Spark's Python daemon with all frameworks loaded, so that the workers that it forks need not import them.

Spark ends a worker after a minute without work, and spreads the tasks of a test over several workers.
"""

from __future__ import annotations

import importlib

from pyspark.daemon import manager

from sparkhvd._util.framework_imports import gc_paused_for_import

# torch._dynamo loads triton, which crashes a process that has loaded TensorFlow before.
_MODULES = ("pandas", "pyarrow", "torch._dynamo", "lightning.pytorch", "tensorflow", "keras")


if __name__ == "__main__":
    with gc_paused_for_import():
        for name in _MODULES:
            importlib.import_module(name)
    manager()
