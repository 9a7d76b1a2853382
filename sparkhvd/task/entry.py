"""Where a task begins: nothing of the driver's is unpickled by another version of sparkhvd."""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import cloudpickle
import pyarrow as pa

import sparkhvd
from sparkhvd.errors import LaunchError

TaskFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class Entry:
    """A task function that runs only where the driver's version of sparkhvd is installed.

    What this module and its fields are called has to stay, so that other versions can say that they are others.

    Attributes:
        version: of the driver's sparkhvd.
        content: the function, pickled.
    """

    version: str
    content: bytes = field(repr=False)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run it.

        Raises:
            LaunchError: the versions differ.
        """
        if self.version != sparkhvd.__version__:
            raise LaunchError(
                f"The driver has sparkhvd {self.version}, but {sys.executable} on host {socket.gethostname()} has "
                f"{sparkhvd.__version__}. Install the same version on the driver and all executors."
            )
        function: TaskFunction = pickle.loads(self.content)
        yield from function(batches)


def entry_of(function: TaskFunction) -> Entry:
    """The entry for a module-level function and its data."""
    return Entry(sparkhvd.__version__, cloudpickle.dumps(function))
