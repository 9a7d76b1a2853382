"""The differences between the versions of Spark from 3.5 to 4.3. No other module branches on Spark's version.

The functions use the version of the installed pyspark; ``check_spark`` checks that the cluster has the same release.
Spark Connect is supported from 4.0 on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from sparkhvd.errors import LaunchError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import BarrierTaskContext
    from pyspark.resource import ResourceProfile
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from sparkhvd.compat.pandas_exchange import ArrowFunction

T = TypeVar("T")

_OLDEST_SPARK = (3, 5)
_OLDEST_CONNECT = (4, 0)


def is_connect(spark: SparkSession) -> bool:
    """Return whether this is a session of Spark Connect, which has no local JVM."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_stopped(spark: SparkSession) -> bool:
    """Return whether a session has been stopped, is about to stop, or has lost its JVM."""
    session: Any = spark
    if is_connect(spark):
        return bool(session.is_stopped)
    context = session.sparkContext._jsc  # noqa: SLF001
    try:
        return context is None or bool(context.sc().isStopped())
    except Exception:  # noqa: BLE001 - py4j and its socket raise different errors if the JVM has ended
        return True


def current_session() -> SparkSession | None:
    """Return the session that is active in this thread, or the session created last; None without either.

    Threads that Python has started, such as the threads of ``CrossValidator``, often have no active session.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - importing this module needs no Spark

    session = SparkSession.getActiveSession()
    if session is None:
        session = getattr(SparkSession, "_instantiatedSession", None)  # ``stop()`` resets it
    return session


def active_session() -> SparkSession:
    """Return the session that is active in this thread, or the session created last.

    Raises:
        LaunchError: there is no session.
    """
    session = current_session()
    if session is None:
        raise LaunchError(
            "There is no active SparkSession. Create one with SparkSession.builder.getOrCreate(), pass spark=, or run "
            "the ranks on this machine with launcher='local'."
        )
    return session


def pyspark_version() -> str:
    """Return the version of the pyspark of this process, like ``3.5.4``."""
    from pyspark.version import __version__  # noqa: PLC0415 - importing this module needs no Spark

    return str(__version__)


def check_spark(spark: SparkSession) -> None:
    """Check that sparkhvd supports the Spark of a session, and that pyspark has the same major and minor version.

    Raises:
        LaunchError: Spark is too old, or pyspark has another release.
    """
    own, cluster, connect = pyspark_version(), str(spark.version), is_connect(spark)
    if release(cluster) < _OLDEST_SPARK:
        raise LaunchError(
            f"This session runs Spark {cluster}, but sparkhvd needs Spark 3.5 or later. Use a newer cluster or runtime."
        )
    if connect and release(cluster) < _OLDEST_CONNECT:
        raise LaunchError(
            f"This is a Spark Connect session with Spark {cluster}, but sparkhvd supports Spark Connect from Spark 4.0 "
            "on: use a classic session, or a newer cluster."
        )
    if release(own) != release(cluster):
        here, there = ("client", "Spark Connect server") if connect else ("driver's Python", "session")
        advice = "." if connect else ", or unset SPARK_HOME if it names another Spark."
        raise LaunchError(
            f"The {here} has pyspark {own}, but the {there} runs Spark {cluster}. Install pyspark {cluster} in this "
            f"Python{advice}"
        )


def java_versions() -> str:
    """Return the Java versions that the installed pyspark runs on."""
    return "Java 17 or later" if _has_at_least(4, 0) else "Java 8, 11 or 17"


def inheriting(spark: SparkSession, act: Callable[[], T]) -> Callable[[], T]:
    """Return ``act`` for a new thread, with the tags, job group and pool that the calling thread has now."""
    from pyspark import util  # noqa: PLC0415

    if _has_at_least(4, 0):
        wrapped: Callable[[], T] = util.inheritable_thread_target(spark)(act)
    else:
        wrapped = util.inheritable_thread_target(act)
    return wrapped


def map_in_barrier(
    rows: DataFrame,
    task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
    schema: str,
    profile: ResourceProfile | None,
) -> DataFrame:
    """Return the rows that ``task`` yields per partition in a barrier stage, with the resources of a profile."""
    if profile is None:
        return rows.mapInArrow(task, schema, barrier=True)
    if _has_at_least(4, 0):
        return rows.mapInArrow(task, schema, barrier=True, profile=profile)
    # DataFrames have no profiles before 4.0, but their RDDs do.
    from pyspark.sql import DataFrame  # noqa: PLC0415

    frame: Any = rows.mapInArrow(task, schema, barrier=True)
    spark: Any = rows.sparkSession
    rdd = frame._jdf.queryExecution().toRdd().withResources(profile._java_resource_profile)  # noqa: SLF001
    return DataFrame(spark._jsparkSession.internalCreateDataFrame(rdd, frame._jdf.schema(), False), spark)  # noqa: SLF001


def task_number(context: BarrierTaskContext) -> int:
    """Return a number for an attempt of a barrier task: its stage's smallest attempt id, plus the task's index.

    Spark starts the tasks of a barrier stage in one step, so their attempt ids are consecutive. From 4.0 on, they are
    in the order of the indices. Spark 3.5 with Scala 2.12 assigns them in the order of a hash table, so its tasks
    exchange their ids, which takes about a second. The driver's start timeout limits that time.
    """
    attempt_id = context.taskAttemptId()
    if _has_at_least(4, 0):
        return attempt_id
    return min(int(text) for text in context.allGather(str(attempt_id))) + context.partitionId()


def arrow_column(
    df: DataFrame, function: ArrowFunction, result_type: DataType, columns: Sequence[Column | str]
) -> Column:
    """Return the column that an Arrow function computes from columns of ``df``.

    Args:
        df: the rows.
        function: a picklable function.
        result_type: the type of the arrays that ``function`` yields.
        columns: names or columns of ``df``.
    """
    if not _has_at_least(4, 1):
        from sparkhvd.compat.pandas_exchange import arrow_column_by_pandas  # noqa: PLC0415

        return arrow_column_by_pandas(df, function, result_type, columns)
    from pyspark.sql.pandas.functions import arrow_udf  # noqa: PLC0415

    # If a column is passed twice, Spark computes it first, in compiled code, and sends it once. Otherwise Spark would
    # work row by row and hold a copy of every column in the meantime.
    udf: Any = arrow_udf(_without_repetition(function, len(columns)), result_type)  # type: ignore[call-overload]  # the function takes tuples
    return udf(*columns, *columns)  # type: ignore[no-any-return]


def to_arrow(df: DataFrame) -> pa.Table:
    """Return the rows as an Arrow table."""
    if _has_at_least(4, 0):
        return df.toArrow()
    import pyarrow as pa  # noqa: PLC0415  (heavy)
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    batches = df._collect_as_arrow()  # type: ignore[operator]  # noqa: SLF001 - 3.5 has no public function
    return pa.Table.from_batches(batches) if batches else to_arrow_schema(df.schema).empty_table()


def data_type(ddl: str) -> DataType:
    """Return the type that a DDL text describes, such as ``array<float>``."""
    from pyspark.sql import types  # noqa: PLC0415

    return types.DataType.fromDDL(ddl) if _has_at_least(4, 0) else types._parse_datatype_string(ddl)  # noqa: SLF001


def session_settings(spark: SparkSession) -> dict[str, str]:
    """Return all settings of a session by name."""
    if _has_at_least(4, 0):
        return dict(spark.conf.getAll)
    return {row["key"]: row["value"] for row in spark.sql("SET").collect()}


def is_case_sensitive(spark: SparkSession) -> bool:
    """Return whether column names are case-sensitive."""
    return str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"


def rows_of_plan(jvm: Any, jsession: Any, plan: Any) -> Any:
    """Return the JVM's DataFrame of an analyzed plan in a JVM session."""
    sql = jvm.org.apache.spark.sql
    datasets = sql.classic.Dataset if _has_at_least(4, 0) else sql.Dataset
    return datasets.ofRows(jsession, plan)


def text_of_plan(plan: Any) -> str:
    """Return the text of a JVM plan, with all columns of every operator."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415

    arguments = (True, False, 2**31 - 1, False)
    try:
        return str(plan.treeString(*arguments, False))
    except Py4JError:  # 4.1 added the last argument
        return str(plan.treeString(*arguments))


def _without_repetition(function: ArrowFunction, count: int) -> Callable[..., Any]:
    """Return the function for columns that are passed twice, with the annotations that Spark reads."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    def predict(batches: Any) -> Any:
        return function(batch[:count] for batch in batches)

    predict.__annotations__ = {"batches": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
    return predict


def _has_at_least(major: int, minor: int) -> bool:
    """Return whether the installed pyspark has this release or a later one."""
    return release(pyspark_version()) >= (major, minor)


@cache
def release(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version; vendors append suffixes, as in ``3.5.5-amzn-1``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)
