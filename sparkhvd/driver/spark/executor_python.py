"""Whether the Python that Spark starts for its tasks is one that ranks can run in."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparkhvd.data.spark.job import is_connect
from sparkhvd.errors import LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_IMPORT_SECONDS = 120.0


def refuse_other_python(spark: SparkSession) -> None:
    """Where the tasks run on this machine, look whether their Python has sparkhvd.

    Spark takes ``python3`` from the path unless ``PYSPARK_PYTHON`` says otherwise, and would start every task four
    times before it gives up.

    Raises:
        LaunchError: it has not.
    """
    if is_connect(spark) or not str(spark.sparkContext.master).startswith("local"):
        return
    asked = str(spark.sparkContext.pythonExec)
    python = shutil.which(asked) or asked
    if Path(python).parent == Path(sys.executable).parent:  # two names in one environment
        return
    given = tuple(sorted(spark.sparkContext.environment.items()))  # spark.executorEnv.*, beside our own
    try:
        _import_sparkhvd(python, given)
    except (OSError, subprocess.SubprocessError) as error:
        activate = Path(sys.executable).with_name("activate")
        how = f"activate the environment of this driver (source {activate}), or set" if activate.exists() else "set"
        raise LaunchError(
            f"Spark's tasks run in {python}, which cannot import sparkhvd; this driver is {sys.executable}. Before the "
            f"session is made, {how} PYSPARK_PYTHON={sys.executable}."
        ) from error


@functools.cache  # of what went well, that is
def _import_sparkhvd(python: str, environment: tuple[tuple[str, str], ...]) -> None:
    given = dict(environment)
    paths = [path for path in (given.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if path]
    command = [python, "-c", "import sparkhvd.task.entry"]
    merged = {**os.environ, **given, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, capture_output=True, timeout=_IMPORT_SECONDS, check=True, env=merged)
