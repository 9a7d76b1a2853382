"""The entry point of a task: a check of versions before anything else from the driver is unpickled."""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import cloudpickle
import pyarrow as pa

import sparkhvd
from sparkhvd.compat.spark import pyspark_version, release
from sparkhvd.errors import LaunchError

TaskFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Entry:
    """A task function that runs only with the driver's versions of sparkhvd and Spark.

    The names of this module and its fields must never change, so that every version can report a mismatch.

    Attributes:
        version: the driver's version of sparkhvd.
        content: the pickled function.
        spark: the driver's version of pyspark.
    """

    version: str
    content: bytes = field(repr=False)
    spark: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the function.

        Raises:
            LaunchError: the versions differ.
        """
        if self.version != sparkhvd.__version__:
            raise _mismatch("sparkhvd", self.version, sparkhvd.__version__)
        if release(self.spark) != release(pyspark_version()):
            raise _mismatch("pyspark", self.spark, pyspark_version())
        function: TaskFunction = pickle.loads(self.content)
        yield from function(batches)


def _mismatch(package: str, driver: str, here: str) -> LaunchError:
    return LaunchError(
        f"The driver has {package} {driver}, but {sys.executable} on host {socket.gethostname()} has {here}. Install "
        "the same version on the driver and all executors."
    )


def entry_of(function: TaskFunction) -> Entry:
    """Return the entry for a module-level function and its data."""
    return Entry(sparkhvd.__version__, cloudpickle.dumps(function), pyspark_version())
