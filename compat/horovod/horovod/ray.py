"""Raises ``ImportError``: sparkhvd does not start ranks on Ray yet."""

from __future__ import annotations

raise ImportError("sparkhvd does not start ranks on Ray yet. Use horovod.spark.run, horovod.run or horovodrun.")
