"""For those who replaced ``horovod`` by ``sparkhvd`` and nothing else: says where the names are."""

from __future__ import annotations

from sparkhvd.compat.horovod import SPARK

raise ImportError(SPARK)
