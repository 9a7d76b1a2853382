"""The differences between the versions of Spark from 3.5 to 4.3. No other module asks for a version.

The version of the installed pyspark decides; ``check_spark`` checks that the cluster runs the same one. Connect is
supported from 4.0.
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

_OLDEST = (3, 5)
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
    except Exception:  # noqa: BLE001 - of py4j or of a socket, whatever ended the JVM
        return True


def current_session() -> SparkSession | None:
    """Return the session that is active in this thread, or the one created last; None without either.

    A thread that Python has started, such as one of ``CrossValidator``, often has no active session.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - importing this module needs no Spark

    session = SparkSession.getActiveSession()
    if session is None:
        session = getattr(SparkSession, "_instantiatedSession", None)  # which ``stop()`` resets
    return session


def active_session() -> SparkSession:
    """Return the session that is active in this thread, or the one created last.

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
    """Check that sparkhvd supports the Spark of a session, and that pyspark has the same version.

    Raises:
        LaunchError: Spark is too old, or its version differs from that of pyspark.
    """
    own, cluster, connect = pyspark_version(), str(spark.version), is_connect(spark)
    if release(cluster) < _OLDEST:
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
    return "Java 17 or later" if _has_release(4, 0) else "Java 8, 11 or 17"


def inheriting(spark: SparkSession, act: Callable[[], T]) -> Callable[[], T]:
    """Return ``act`` for a new thread, with the tags, job group and pool that the calling thread has now."""
    from pyspark import util  # noqa: PLC0415

    if _has_release(4, 0):
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
    if _has_release(4, 0):
        return rows.mapInArrow(task, schema, barrier=True, profile=profile)
    # DataFrames have no profiles before 4.0, but their RDDs do.
    from pyspark.sql import DataFrame  # noqa: PLC0415

    frame: Any = rows.mapInArrow(task, schema, barrier=True)
    spark: Any = rows.sparkSession
    made = frame._jdf.queryExecution().toRdd().withResources(profile._java_resource_profile)  # noqa: SLF001
    return DataFrame(spark._jsparkSession.internalCreateDataFrame(made, frame._jdf.schema(), False), spark)  # noqa: SLF001


def task_number(context: BarrierTaskContext) -> int:
    """Return a number for an attempt of a barrier task: its stage's smallest attempt id, plus the task's index.

    Spark starts the tasks of a barrier stage in one step, so their attempt ids are consecutive. From 4.0 on, they are
    in the order of the indices. Spark 3.5 with Scala 2.12 assigns them in the order of a hash table. Therefore its
    tasks ask each other, which takes them a second. The driver limits that time, as the job has not started yet.
    """
    own = context.taskAttemptId()
    if _has_release(4, 0):
        return own
    return min(int(text) for text in context.allGather(str(own))) + context.partitionId()


def arrow_column(df: DataFrame, function: ArrowFunction, kind: DataType, columns: Sequence[Column | str]) -> Column:
    """Return the column that an Arrow function computes from columns of ``df``.

    Args:
        df: the rows.
        function: a picklable function.
        kind: the type of the arrays that ``function`` yields.
        columns: names or columns of ``df``.
    """
    if not _has_release(4, 1):
        from sparkhvd.compat.pandas_exchange import arrow_column_by_pandas  # noqa: PLC0415

        return arrow_column_by_pandas(df, function, kind, columns)
    from pyspark.sql.pandas.functions import arrow_udf  # noqa: PLC0415

    # Each column is passed twice so that Spark computes it beforehand, in compiled code. Otherwise Spark would work row
    # by row and hold a copy of every column meanwhile. The data is sent only once.
    udf: Any = arrow_udf(_first_half(function, len(columns)), kind)  # type: ignore[call-overload]  # it takes tuples
    return udf(*columns, *columns)  # type: ignore[no-any-return]


def to_arrow(df: DataFrame) -> pa.Table:
    """Return the rows as an Arrow table."""
    if _has_release(4, 0):
        return df.toArrow()
    import pyarrow as pa  # noqa: PLC0415  (heavy)
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    batches = df._collect_as_arrow()  # type: ignore[operator]  # noqa: SLF001 - 3.5 has no public function
    return pa.Table.from_batches(batches) if batches else to_arrow_schema(df.schema).empty_table()


def data_type(ddl: str) -> DataType:
    """Return the type that a DDL text describes, such as ``array<float>``."""
    from pyspark.sql import types  # noqa: PLC0415

    return types.DataType.fromDDL(ddl) if _has_release(4, 0) else types._parse_datatype_string(ddl)  # noqa: SLF001


def session_settings(spark: SparkSession) -> dict[str, str]:
    """Return all settings of a session by name."""
    if _has_release(4, 0):
        return dict(spark.conf.getAll)
    return {row["key"]: row["value"] for row in spark.sql("SET").collect()}


def rows_of_plan(jvm: Any, jsession: Any, plan: Any) -> Any:
    """Return the JVM's DataFrame of an analyzed plan in a JVM session."""
    sql = jvm.org.apache.spark.sql
    datasets = sql.classic.Dataset if _has_release(4, 0) else sql.Dataset
    return datasets.ofRows(jsession, plan)


def text_of_plan(plan: Any) -> str:
    """Return the text of a JVM plan with all columns of every operator."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415

    arguments = (True, False, 2**31 - 1, False)
    try:
        return str(plan.treeString(*arguments, False))
    except Py4JError:  # 4.1 added the last argument
        return str(plan.treeString(*arguments))


def _first_half(function: ArrowFunction, count: int) -> Callable[..., Any]:
    """Return a function that ignores the repetition of the columns, with the annotations that Spark reads."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)

    def predict(batches: Any) -> Any:
        return function(batch[:count] for batch in batches)

    predict.__annotations__ = {"batches": Iterator[tuple[pa.Array, ...]], "return": Iterator[pa.Array]}
    return predict


def _has_release(major: int, minor: int) -> bool:
    """Return whether the installed pyspark is of this release or a later one."""
    return release(pyspark_version()) >= (major, minor)


@cache
def release(version: str) -> tuple[int, int]:
    """Return the major and the minor number of a version, which vendors may extend, like ``3.5.5-amzn-1``."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
