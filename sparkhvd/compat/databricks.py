"""What differs on Databricks, in one place.

Nothing here was tried on Databricks itself: it follows from what its documentation says (read in November 2026), and
the tests set what Databricks sets.

- A process of a cluster knows where it is by ``DATABRICKS_RUNTIME_VERSION``, which other tools go by, too
  (https://rdrr.io/cran/brickster/src/R/databricks-helpers.R); ``sparkhvd.config`` reads it.
- Clusters with GPUs come with Spark's GPU scheduling: one GPU per task, unless ``spark.task.resource.gpu.amount`` of
  the cluster says otherwise, and none of it on a cluster of a single node
  (https://learn.microsoft.com/azure/databricks/compute/gpu). In Python tasks the GPUs of the task are numbered from 0
  (https://www.databricks.com/blog/2020/06/26/announcing-gpu-aware-scheduling-and-enhanced-deep-learning-capabilities.html),
  which is what CUDA_VISIBLE_DEVICES does. So ``task_gpus`` takes the names that this variable gives, whether Spark's
  addresses count as the machine does or within it.
- The machines of a cluster mount the files of DBFS at ``/dbfs`` and those of Unity Catalog at ``/Volumes``
  (https://learn.microsoft.com/azure/databricks/files/); Spark calls both by ``dbfs:``. ``mounted_path`` translates.
- Clusters in standard (once: shared) access mode have neither RDDs nor a SparkContext, only Spark Connect; they have no
  GPUs, no ML runtime, and mount volumes but not DBFS
  (https://docs.databricks.com/compute/access-mode-limitations.html). Nothing differs in code: the barrier launcher
  uses no RDD anywhere. Databricks lists distributed training among what Databricks Connect does not have
  (https://docs.databricks.com/dev-tools/databricks-connect/python/limitations.html).
- A notebook's cell shows 10 MB of text, and job clusters 30 MB for a whole notebook; up to runtime 16.4 it was 50,000
  characters, and what was longer was dropped (https://docs.databricks.com/en/notebooks/notebook-limitations.html). So
  what ranks print without end belongs into files (``output_filename``, ``LogFiles``), as the guide says; nothing
  differs in code: ``LogStream`` writes to the ``sys.stdout`` of the moment, which in a notebook is the cell's.
- A cluster has as many executors as worker machines
  (https://databrickslabs.github.io/brickster/reference/db_cluster_resize.html), so the ranks of a machine are tasks of
  one executor, as they may be on any cluster.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_WAYS_TO_SAY_IT = re.compile(
    r"(?:file:(?://)?)?(?P<mounted>/dbfs(?:/.*)?|/Volumes/.+)|dbfs:(?P<folder>/(?!/).*)", re.DOTALL
)


def mounted_path(url: str) -> str | None:
    """The path at which the machines of a cluster see ``url``; None where it is no folder on DBFS or of a volume.

    Example:
        >>> mounted_path("dbfs:/a"), mounted_path("file:/dbfs/a"), mounted_path("dbfs:/Volumes/c/s/v/a")
        ('/dbfs/a', '/dbfs/a', '/Volumes/c/s/v/a')
    """
    found = _WAYS_TO_SAY_IT.fullmatch(url)
    if found is None:
        return None
    folder = found["folder"]
    if folder is None:
        return found["mounted"]
    return folder if folder.startswith("/Volumes/") else f"/dbfs{folder}"


def spark_url_of(path: str) -> str:
    """What Spark calls a mounted ``path``."""
    return f"dbfs:{path.removeprefix('/dbfs')}"


def task_gpus(addresses: Sequence[str], visible: Sequence[str]) -> tuple[str, ...] | None:
    """What CUDA calls the GPUs of a task that sees its own alone; None where it sees others, too.

    Args:
        addresses: Spark's.
        visible: the entries of CUDA_VISIBLE_DEVICES.
    """
    return tuple(visible) if len(visible) == len(addresses) else None
