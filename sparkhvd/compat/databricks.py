"""The differences on Databricks.

This module follows the documentation of Databricks (read in November 2026). It has not run on Databricks itself; the
tests set the same variables and settings as Databricks.

- ``DATABRICKS_RUNTIME_VERSION`` marks the processes of a cluster; other tools use it, too
  (https://rdrr.io/cran/brickster/src/R/databricks-helpers.R); ``sparkhvd.config`` reads it.
- Clusters with GPUs come with Spark's GPU scheduling: one GPU per task, unless ``spark.task.resource.gpu.amount`` of
  the cluster sets another number, and no GPU for tasks on a single-node cluster
  (https://learn.microsoft.com/azure/databricks/compute/gpu). In Python tasks the GPUs of the task are numbered from 0
  (https://www.databricks.com/blog/2020/06/26/announcing-gpu-aware-scheduling-and-enhanced-deep-learning-capabilities.html),
  which is the effect of CUDA_VISIBLE_DEVICES. ``task_gpus`` therefore takes the names in this variable. It does not
  matter whether Spark's addresses number all GPUs of the machine or only the GPUs in the variable.
- The machines of a cluster mount DBFS at ``/dbfs`` and the volumes of Unity Catalog at ``/Volumes``
  (https://learn.microsoft.com/azure/databricks/files/). Spark addresses both with ``dbfs:``. ``mounted_path`` returns
  the mounted path of such a URL.
- Clusters in standard (formerly shared) access mode have neither RDDs nor a SparkContext, only Spark Connect; they have
  no GPUs, no ML runtime, and mount volumes but not DBFS
  (https://docs.databricks.com/compute/access-mode-limitations.html). They need no code of their own: the barrier
  launcher uses no RDD. Databricks lists distributed training among the limitations of Databricks Connect
  (https://docs.databricks.com/dev-tools/databricks-connect/python/limitations.html).
- A notebook's cell shows 10 MB of text, and a job cluster shows 30 MB for a whole notebook. Up to runtime 16.4, the
  limit was 50,000 characters (https://docs.databricks.com/en/notebooks/notebook-limitations.html). Long output of ranks
  therefore belongs in files (``output_filename``, ``LogFiles``). Notebooks need no code of their own: ``LogStream``
  writes to the current ``sys.stdout``, which is the cell's output in a notebook.
- A cluster has as many executors as worker machines
  (https://databrickslabs.github.io/brickster/reference/db_cluster_resize.html), so all ranks of a machine are tasks of
  one executor. Any other cluster may place ranks in this way, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MOUNTED_URL = re.compile(
    r"(?:file:(?://)?)?(?P<mounted>/dbfs(?:/.*)?|/Volumes/.+)|dbfs:(?P<folder>/(?!/).*)", re.DOTALL
)


def mounted_path(url: str) -> str | None:
    """Return the path at which the machines of a cluster mount ``url``; None unless it is on DBFS or in a volume.

    Examples:
        >>> mounted_path("dbfs:/a"), mounted_path("file:/dbfs/a"), mounted_path("dbfs:/Volumes/c/s/v/a")
        ('/dbfs/a', '/dbfs/a', '/Volumes/c/s/v/a')
    """
    match = _MOUNTED_URL.fullmatch(url)
    if match is None:
        return None
    folder = match["folder"]
    if folder is None:
        return match["mounted"]
    return folder if folder.startswith("/Volumes/") else f"/dbfs{folder}"


def spark_url_of(path: str) -> str:
    """Return Spark's URL of a mounted ``path``."""
    return f"dbfs:{path.removeprefix('/dbfs')}"


def task_gpus(addresses: Sequence[str], visible: Sequence[str]) -> tuple[str, ...] | None:
    """Return CUDA's names of a task's GPUs if the task sees only its own GPUs; None if it sees more GPUs.

    Args:
        addresses: the addresses from Spark.
        visible: the entries of CUDA_VISIBLE_DEVICES.
    """
    return tuple(visible) if len(visible) == len(addresses) else None
