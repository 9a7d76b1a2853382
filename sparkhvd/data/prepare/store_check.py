"""Checks that the driver and the executors share a Store, before a job whose failure would be hard to explain."""

from __future__ import annotations

import logging
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from sparkhvd.compat.spark import is_connect
from sparkhvd.config import from_environment
from sparkhvd.data.spark.job import is_local, run_job
from sparkhvd.errors import SparkHvdError, StartTimeoutError, StoreError
from sparkhvd.store.probe import StoreProbe, new_store_probe
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

logger = logging.getLogger(__name__)

# If Spark chooses the number of tasks: enough rows for all of them, and the most tasks.
_ROWS = 4096
_MAX_TASKS = 256
_SCHEMA = "host string, name string, problem string"


def needs_check(spark: SparkSession, store: Store) -> bool:
    """Return whether a Store may not be shared; with a ``local`` master, a folder always is."""
    master = "connect" if is_connect(spark) else str(spark.sparkContext.master)
    return not (store.url.startswith("file:") and is_local(master))


def check_store(
    spark: SparkSession, store: Store, slots: Callable[[], int] | None = None, seconds: float | None = None
) -> None:
    """Check that the executors read what the driver writes to a Store, and vice versa.

    One Spark job runs as many short tasks as there are slots, so that Spark spreads them over all idle executors. Each
    task reads one file and writes one. With a ``local`` master, a folder is not checked, because all processes are on
    one machine.

    Args:
        spark: the session whose executors are checked.
        store: the Store.
        slots: counts the slots; None uses as many tasks as Spark chooses for a query (by default one per core), at most
            256.
        seconds: how long to wait for the answers; None means the start_timeout of the environment.

    Raises:
        StartTimeoutError: the tasks did not run and answer in time.
        StoreError: an executor cannot use the Store, or does not see the same files; the message names the host.
    """
    if not needs_check(spark, store):
        return
    tasks = None if slots is None else max(1, slots())
    probe = new_store_probe(store)
    # As bytes, so that a task can report that its executor lacks the package of the Store.
    pickled_probe = pickle.dumps(probe)
    try:
        probe.leave()
        requests = spark.range(tasks or _ROWS, numPartitions=tasks)
        requests = requests.coalesce(_MAX_TASKS) if tasks is None else requests
        seconds = from_environment().start_timeout if seconds is None else seconds
        rows = _answers_within(
            spark, requests.mapInArrow(partial(answer, pickled_probe), _SCHEMA).collect, store, seconds
        )
        judge(probe, [(row["host"], row["name"], row["problem"]) for row in rows])
    finally:
        remove(probe)


def _answers_within(spark: SparkSession, collect: Callable[[], list[Row]], store: Store, seconds: float) -> list[Row]:
    try:
        return run_job(spark, collect, seconds)
    except TimeoutError:
        raise StartTimeoutError(
            f"The executors did not report within start_timeout={seconds:g} s whether they see the Store {store.url}: "
            "other jobs keep the slots busy, or the Store does not answer them. Wait for those jobs, give this one a "
            "cluster of its own, or raise start_timeout."
        ) from None


def answer(pickled_probe: bytes, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Answer a probe in a Spark task."""
    from pyspark import TaskContext  # noqa: PLC0415  (this runs in Spark's tasks)

    for _ in batches:  # Spark expects tasks to consume their input
        continue
    context = TaskContext.get()
    name = "task" if context is None else f"{context.partitionId()}-{context.taskAttemptId()}"
    try:
        problem = pickle.loads(pickled_probe).answer(name)
    except ImportError as error:
        problem = f"cannot use it: {error}"
    row = {"host": [socket.gethostname()], "name": [name], "problem": [problem]}
    yield pa.RecordBatch.from_pydict({key: pa.array(value, pa.string()) for key, value in row.items()})


def judge(probe: StoreProbe, answers: Sequence[tuple[str, str, str]]) -> None:
    """Raise an error if the answers show that the Store is not shared.

    Args:
        probe: the probe that the tasks answered.
        answers: host, name and problem (empty without one) of every task.

    Raises:
        StoreError: an executor cannot use the Store or sees other files; the message names the host.
    """
    store = probe.store
    for host, _, problem in answers:
        if problem:
            sentence = problem.rstrip(".")  # it may end with another error's sentence
            raise StoreError(f"The Store {store.url} is not shared: the executor on host {host} {sentence}. {_ADVICE}")
    unseen = set(probe.unseen([name for _, name, _ in answers]))
    for host, name, _ in answers:
        if name in unseen:
            raise StoreError(
                f"The Store {store.url} is not shared: the driver does not see what the executor on host {host} has "
                f"just written. {_ADVICE}"
            )


_ADVICE = "Use a folder that all machines mount at the same path, or HDFS or an object store that all can reach."


def remove(probe: StoreProbe) -> None:
    """Remove the files of a probe; a failure is logged."""
    try:
        probe.remove()
    except SparkHvdError as error:  # the result of the check is the one to report
        logger.warning("Could not remove the files of the Store check: %s", error)
