"""The job that the driver sends to every task, and the schema of the rows that tasks return."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from sparkhvd._util.processes.process_identity import ProcessOnMachine
from sparkhvd.comm.connect.commit_folder import CommitFolder
from sparkhvd.config import Config
from sparkhvd.task.log_files import LogFiles

# The limit for the combined size of all ranks' results, which pass through the driver's memory.
RESULT_CAP_BYTES = 256 * 1024 * 1024
# A result is split into chunks of this size, one per row, so that no row is large.
CHUNK_BYTES = 8 * 1024 * 1024

RESULT_SCHEMA = "rank int, kind string, chunk int, content binary"
RESULT = "result"
FAILURE = "failure"


@dataclass(frozen=True)
class Job:
    """One call of ``run``, as sent to the tasks inside the Spark closure.

    Attributes:
        payload: ``(fn, args, kwargs)``, pickled.
        num_proc: the number of ranks.
        env: changes to the workers' environment; None removes a variable.
        preload: modules that a worker imports while it waits for the other workers.
        config: settings of the core and the launchers, the same on every rank.
        driver_addresses: the driver's addresses; if empty, output stays in the executors' logs.
        driver: the driver's process.
        driver_connection: whether every task keeps a connection to the driver, over which tasks exchange introductions
            and each side notices the loss of the other.
        secret: authenticates connections to the driver. Barrier and elastic jobs derive the secret that the ranks share
            from this one. On Spark, it is part of the closure, which is as private as Spark's own channels.
        streamed: the streams (``stdout``, ``stderr``) that go to the driver; the others stay in the executors' logs.
        log_files: the files in a Store that ``stdout`` or ``stderr`` goes to instead of the driver, by stream.
        log_level: the level of the ``sparkhvd`` logger in the workers.
        executable: the workers' Python interpreter; if empty, the interpreter of the process that starts them.
        nics: network interfaces to use; if empty, each task chooses suitable ones.
        has_rows: whether each rank receives the rows of its task's partition.
        versions: the driver's framework versions, with which each task compares its own.
        commits: the folder in which an elastic job publishes commits; None keeps them in memory only.
    """

    payload: bytes = field(repr=False)
    num_proc: int
    env: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    preload: tuple[str, ...] = ()
    config: Config = field(default_factory=Config)
    driver_addresses: tuple[tuple[str, int], ...] = ()
    driver: ProcessOnMachine | None = None
    driver_connection: bool = False
    secret: bytes = field(default=b"", repr=False)
    streamed: tuple[str, ...] = ("stdout", "stderr")
    log_files: tuple[tuple[str, LogFiles], ...] = field(default=(), repr=False)
    log_level: int = logging.INFO
    executable: str = ""
    nics: tuple[str, ...] = ()
    has_rows: bool = False
    versions: tuple[str, ...] = ()
    commits: CommitFolder | None = None

    @property
    def start_timeout(self) -> float:
        """Return the seconds within which workers must be ready for ``fn``, and ``init()`` must connect them."""
        return self.config.start_timeout

    def with_driver_addresses(self, addresses: tuple[tuple[str, int], ...]) -> Job:
        """Return a copy of the job with the driver's addresses."""
        return replace(self, driver_addresses=addresses)
