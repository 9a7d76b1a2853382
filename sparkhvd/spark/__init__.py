"""An error with the new locations of ``horovod.spark``'s names, for code that only replaced the package's name."""

from __future__ import annotations

from sparkhvd.compat.horovod import SPARK

raise ImportError(SPARK)
