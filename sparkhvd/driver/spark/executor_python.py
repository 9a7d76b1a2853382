"""A check that the Python of Spark's tasks can run ranks."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparkhvd.compat.spark import is_connect
from sparkhvd.data.spark.job import is_local
from sparkhvd.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IMPORT_SECONDS = 120.0


def check_executor_python(spark: SparkSession) -> None:
    """Check that the tasks' Python can import sparkhvd, if the tasks run on this machine.

    Spark runs ``python3`` from the path unless ``PYSPARK_PYTHON`` is set, and would start every task four times before
    it aborts the job.

    Raises:
        LaunchError: the tasks' Python cannot import sparkhvd.
    """
    if is_connect(spark) or not str(spark.sparkContext.master).startswith("local"):
        return
    configured = str(spark.sparkContext.pythonExec)
    is_relative = os.sep in configured and not Path(configured).is_absolute()
    if is_relative and not is_local(str(spark.sparkContext.master)):
        return  # the path is relative to the folder of an executor, where Spark unpacks archives
    python = shutil.which(configured) or configured
    if Path(python).parent == Path(sys.executable).parent:  # both belong to one environment
        return
    # The variables of spark.executorEnv.*, which Spark adds to those of this process.
    variables = tuple(sorted(spark.sparkContext.environment.items()))
    try:
        _import_sparkhvd(python, variables)
    except (OSError, subprocess.SubprocessError) as error:
        activate = Path(sys.executable).with_name("activate")
        advice = f"activate the environment of this driver (source {activate}), or set" if activate.exists() else "set"
        raise LaunchError(
            f"Spark's tasks run in {python}, which cannot import sparkhvd; this driver runs in {sys.executable}. "
            f"Before the session is created, {advice} PYSPARK_PYTHON={sys.executable}."
        ) from error


@functools.cache  # caches successes only, because failures raise
def _import_sparkhvd(python: str, environment: tuple[tuple[str, str], ...]) -> None:
    variables = dict(environment)
    paths = [path for path in (variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if path]
    command = [python, "-c", "import sparkhvd.task.entry"]
    merged = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, capture_output=True, timeout=_IMPORT_SECONDS, check=True, env=merged)
