"""Which of the user's modules can be imported where a pickle is opened: executors are asked, once per session."""

from __future__ import annotations

import logging
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sparkhvd.config import from_environment
from sparkhvd.data.spark.job import is_connect, run_job
from sparkhvd.driver.user_code.user_modules import loaded_user_modules
from sparkhvd.task.user_code.importable import Findings, look_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_MOST_TASKS = 64
_SCHEMA = "found binary"


def importable_elsewhere(modules: Mapping[str, str]) -> frozenset[str]:
    """The modules that the executors of the active session can import; without a session, another Python here.

    Args:
        modules: the SHA-256 of each module's file, by the module's name.
    """
    spark = _active_session()
    return importable_here(modules) if spark is None else importable_on(spark, modules)


def importable_here(modules: Mapping[str, str]) -> frozenset[str]:
    """The modules that another Python finds that has the import path of this one."""
    return look_for(modules).same


def importable_nowhere(modules: Mapping[str, str]) -> frozenset[str]:  # noqa: ARG001
    """No module: for machines that nobody has asked."""
    return frozenset()


def importable_on(spark: SparkSession, modules: Mapping[str, str]) -> frozenset[str]:
    """The modules that the executors of a session can import, with the driver's content.

    One small Spark job asks about all modules of the user's that are loaded; a later question about them needs none.
    """
    known = _answers(_identity(spark))
    if any(item not in known for item in modules.items()):
        asked = {**{module.name: module.digest for module in loaded_user_modules()}, **modules}
        new = {name: digest for name, digest in asked.items() if (name, digest) not in known}
        answers = _ask(spark, new)
        if answers is not None:
            known.update({(name, digest): name in answers for name, digest in new.items()})
    return importable_by(known, modules)


def importable_by(known: Mapping[tuple[str, str], bool], modules: Mapping[str, str]) -> frozenset[str]:
    """The modules that executors import with the driver's content, by what they have said.

    Spark goes on using processes that have a module as it was before the user changed it, and Python keeps that one.
    """
    were_there = Counter(name for (name, _), there in known.items() if there)
    return frozenset(name for name, digest in modules.items() if known.get((name, digest)) and were_there[name] == 1)


def _ask(spark: SparkSession, modules: Mapping[str, str]) -> frozenset[str] | None:
    """The modules that every executor that was asked can import; None where they did not answer."""
    # Spark spreads the tasks over idle executors.
    tasks = None if is_connect(spark) else min(_MOST_TASKS, spark.sparkContext.defaultParallelism)
    asked = spark.range(tasks or _MOST_TASKS, numPartitions=tasks).mapInArrow(partial(_answer, dict(modules)), _SCHEMA)
    try:
        rows = run_job(spark, asked.collect, from_environment().start_timeout)
    except Exception as error:  # noqa: BLE001 - Spark may raise anything; whatever it is, the code can be sent
        logger.warning("The executors did not say which modules they can import, so code is sent to them: %s", error)
        return None
    found: list[Findings] = [pickle.loads(row["found"]) for row in rows]
    if stale := sorted({name for each in found for name in each.other}):
        logger.warning(
            "Executors have another version of %s than the driver. The driver's code is sent to them.", ", ".join(stale)
        )
    return frozenset.intersection(*(each.same for each in found)) if found else None


def _answer(modules: Mapping[str, str], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:  # Spark wants its input read
        continue
    yield pa.RecordBatch.from_pydict({"found": pa.array([pickle.dumps(look_for(modules))], pa.binary())})


def _active_session() -> SparkSession | None:
    if "pyspark.sql" not in sys.modules:  # as in a rank
        return None
    from pyspark.sql import SparkSession  # noqa: PLC0415

    return SparkSession.getActiveSession()


def _identity(spark: SparkSession) -> str:
    if is_connect(spark):
        session: Any = spark
        return str(session.session_id)
    return str(spark.sparkContext.applicationId)


@lru_cache(maxsize=8)
def _answers(identity: str) -> dict[tuple[str, str], bool]:  # noqa: ARG001
    """Whether the executors of a session can import a module, by its name and digest, as far as they were asked."""
    return {}
