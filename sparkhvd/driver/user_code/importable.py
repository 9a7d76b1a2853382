"""Finds out which of the user's modules can be imported where a pickle is loaded; caches the executors' answers."""

from __future__ import annotations

import logging
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkhvd.compat.spark import current_session, is_connect
from sparkhvd.config import from_environment
from sparkhvd.data.spark.job import run_job
from sparkhvd.driver.user_code.user_modules import loaded_user_modules
from sparkhvd.task.user_code.importable import Findings, find_modules

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_MAX_TASKS = 64
_SCHEMA = "found binary"


def importable_elsewhere(modules: Mapping[str, str]) -> frozenset[str]:
    """Return the modules that the executors of the active session can import.

    Without a session, return the modules that another Python on this machine can import.

    Args:
        modules: the SHA-256 of each module's file, by the module's name.
    """
    spark = _active_session()
    return importable_here(modules) if spark is None else importable_on(spark, modules)


def importable_here(modules: Mapping[str, str]) -> frozenset[str]:
    """Return the modules that another Python with the import path of this one finds."""
    return find_modules(modules).same


def importable_nowhere(modules: Mapping[str, str]) -> frozenset[str]:  # noqa: ARG001
    """Return no module, for machines that cannot be asked."""
    return frozenset()


def importable_on(
    spark: SparkSession, modules: Mapping[str, str], *, start_timeout: float | None = None
) -> frozenset[str]:
    """Return the modules that the executors of a session can import with the driver's content.

    One small Spark job asks about all of the user's loaded modules; later questions about them need no job.

    Args:
        spark: the session.
        modules: the SHA-256 of each module's file, by the module's name.
        start_timeout: seconds to wait for the answers; None takes ``SPARKHVD_START_TIMEOUT``.
    """
    known_answers = _answers_of_session(_identity(spark))
    if any(item not in known_answers for item in modules.items()):
        candidates = {**{module.name: module.digest for module in loaded_user_modules()}, **modules}
        unanswered = {name: digest for name, digest in candidates.items() if (name, digest) not in known_answers}
        seconds = from_environment().start_timeout if start_timeout is None else start_timeout
        answers = _ask_executors(spark, unanswered, seconds)
        if answers is not None:
            known_answers.update({(name, digest): name in answers for name, digest in unanswered.items()})
    return importable_by(known_answers, modules)


def importable_by(known: Mapping[tuple[str, str], bool], modules: Mapping[str, str]) -> frozenset[str]:
    """Return the modules that executors import with the driver's content, according to their answers.

    A module with several contents in the answers is excluded: Spark reuses processes, and a process that has imported
    the module before the user changed it keeps the old version.
    """
    versions = Counter(name for (name, _), is_importable in known.items() if is_importable)
    return frozenset(name for name, digest in modules.items() if known.get((name, digest)) and versions[name] == 1)


def _ask_executors(spark: SparkSession, modules: Mapping[str, str], seconds: float) -> frozenset[str] | None:
    """Return the modules that all asked executors can import; None if they did not answer."""
    # Spark spreads the tasks over idle executors.
    tasks = None if is_connect(spark) else min(_MAX_TASKS, spark.sparkContext.defaultParallelism)
    answers = spark.range(tasks or _MAX_TASKS, numPartitions=tasks).mapInArrow(
        partial(_report_modules, dict(modules)), _SCHEMA
    )
    try:
        rows = run_job(spark, answers.collect, seconds)
    except Exception as error:  # noqa: BLE001 - Spark may raise anything, and sending the code always works
        logger.warning(
            "The executors did not report which modules they can import, so the driver sends the code to them: %s",
            error,
        )
        return None
    reports: list[Findings] = [pickle.loads(row["found"]) for row in rows]
    if stale := sorted({name for findings in reports for name in findings.other}):
        logger.warning(
            "Executors have a different version of %s than the driver. The driver sends its own code to them.",
            ", ".join(stale),
        )
    return frozenset.intersection(*(findings.same for findings in reports)) if reports else None


def _report_modules(modules: Mapping[str, str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:  # Spark requires that the input is read
        continue
    yield pa.RecordBatch.from_pydict({"found": pa.array([pickle.dumps(find_modules(modules))], pa.binary())})


def _active_session() -> SparkSession | None:
    if "pyspark.sql" not in sys.modules:  # for example in a rank
        return None
    return current_session()


def _identity(spark: SparkSession) -> str:
    if is_connect(spark):
        session: Any = spark
        return str(session.session_id)
    return str(spark.sparkContext.applicationId)


@lru_cache(maxsize=8)
def _answers_of_session(identity: str) -> dict[tuple[str, str], bool]:  # noqa: ARG001
    """Return the cache of a session's answers: whether executors can import a module, by its name and digest."""
    return {}
