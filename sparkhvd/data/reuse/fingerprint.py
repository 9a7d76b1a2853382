"""Fingerprints of the rows that a preparation would write, so that an earlier preparation can be reused.

A DataFrame has a fingerprint only if everything that determines its rows is known; any other DataFrame is prepared
again. The fingerprint covers:

- the analyzed plan of the DataFrame, which may contain only operators and expressions of an allow-list, all
  deterministic. User-defined functions, the current time and unseeded randomness are not on the list;
- functions of Spark ML's own transformers (``VectorAssembler``), by the name of their code and their state;
- the leaves of the plan: ranges, rows that are part of the plan, caches, and files. Files count by path, size and
  modification time. They are listed now, and the list must equal that of the DataFrame. A cache holds the original
  rows, whatever its files contain now. So a cache is identified by the number of its RDD, which is unique in the
  application, and its rows are recognized as long as the cache exists;
- the session's ``spark.sql`` settings and time zone, the versions of Spark and of the written format, the selection and
  the split's seed;
- with ``sample`` or ``randomSplit``, which choose rows by their position in partitions, the parallelism that partitions
  files and ranges.

Two limits come from Spark. ``limit`` without an order, and functions such as ``first``, may choose other rows in every
evaluation; the rows of an earlier evaluation are as valid as new ones. If a file is replaced by one of the same path,
size and modification time (in milliseconds), the two cannot be distinguished.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkhvd._util.processes.process_identity import is_running, machine_id, process_start
from sparkhvd.compat.spark import is_connect, session_settings, text_of_plan
from sparkhvd.data.spark.job import run_job

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

# Increase this when the same plan would be written differently.
_FORMAT_VERSION = 2

# In groups: names and values; arithmetic and comparison; NULL and choice; numbers; texts; arrays and structs; times;
# aggregates and windows.
_EXPRESSION_NAMES = """
Alias AttributeReference OuterReference Literal Cast SortOrder
Add Subtract Multiply Divide IntegralDivide Remainder Pmod UnaryMinus UnaryPositive Abs EqualTo EqualNullSafe
GreaterThan GreaterThanOrEqual LessThan LessThanOrEqual And Or Not In InSet Between Greatest Least BitwiseAnd
BitwiseOr BitwiseXor BitwiseNot ShiftLeft ShiftRight
If CaseWhen Coalesce IsNull IsNotNull IsNaN NaNvl NullIf Nvl Nvl2
Acos Asin Atan Atan2 Cbrt Ceil Cos Cosh Exp Expm1 Floor Hypot Log Log10 Log1p Log2 Pow Rint Round BRound Signum Sin
Sinh Sqrt Tan Tanh ToDegrees ToRadians Murmur3Hash XxHash64 Crc32 Md5 Sha1 Sha2
Concat ConcatWs Contains EndsWith StartsWith Length Like Lower Upper RLike RegExpExtract RegExpReplace StringSplit
StringTrim StringTrimLeft StringTrimRight Substring StringReplace StringRepeat
ArrayContains ArrayMax ArrayMin ArrayRepeat ArraySize CreateArray CreateNamedStruct CreateMap ElementAt Flatten
GetArrayItem GetArrayStructFields GetMapValue GetStructField Reverse Sequence Size Slice SortArray UnwrapUDT Explode
ScalaUDF
PosExplode ArrayTransform ArrayFilter LambdaFunction NamedLambdaVariable ArrayAggregate ArraysZip
DateAdd DateSub DateDiff DayOfMonth DayOfWeek DayOfYear Hour Minute Month Quarter Second UnixDate UnixMicros
UnixMillis UnixSeconds WeekDay WeekOfYear Year
AggregateExpression Average Count Max Min Sum StddevPop StddevSamp VariancePop VarianceSamp DenseRank Lag Lead Rank
RowNumber SpecifiedWindowFrame WindowExpression WindowSpecDefinition CurrentRow$ UnboundedFollowing$
UnboundedPreceding$ RowFrame$ RangeFrame$
"""
_PLAN_NAMES = """
Aggregate CTERelationDef CTERelationRef Deduplicate Distinct Except Expand Filter Generate GlobalLimit Intersect
Join LocalLimit LocalRelation Offset Project Range Repartition RepartitionByExpression ResolvedHint Sample Sort
SubqueryAlias Union View Window WithCTE
"""
_EXPRESSIONS = frozenset(_EXPRESSION_NAMES.split())
_PLANS = frozenset(_PLAN_NAMES.split())
_RELATION = "org.apache.spark.sql.execution.datasources.LogicalRelation"
_CACHE = "org.apache.spark.sql.execution.columnar.InMemoryRelation"
_OWN_FUNCTIONS = "org.apache.spark.ml."
_PLAN_PACKAGE = "org.apache.spark.sql.catalyst.plans.logical."
_SAMPLE = f"{_PLAN_PACKAGE}Sample"
_EXPRESSION_PACKAGE = "org.apache.spark.sql.catalyst.expressions."
_FUNCTION = f"{_EXPRESSION_PACKAGE}ScalaUDF"
_VIEW = f"{_PLAN_PACKAGE}View"
# Fields of the JSON of caches, functions and views that are ignored: how a cache is filled, repetitions, and the time
# when a view was created.
_IGNORED_FIELDS = {
    _CACHE: ("cacheBuilder", "outputOrdering"),
    _FUNCTION: ("inputEncoders", "outputEncoder"),
    _VIEW: ("desc",),
}
_EXPRESSION_ID = re.compile(r'"id":(\d+),"jvmId":"[^"]*"')
# The random id of a transformer, which is part of the names of its fields.
_TRANSFORMER_ID = re.compile(r"(?<=_)VectorAssembler_[0-9a-f]{12}")
_SHOWN_ID = re.compile(r"#(\d+)")
_CACHE_SHOWN = re.compile(r"[ :+-]*InMemoryRelation \[")
_INDENTATION = re.compile(r"[ :+-]*")
_ACCESS_TIME = re.compile(r"access_time=\d+; ")
# The JVM in the name of an application. If the JVM was not visible to its driver's Python, the name has no start time,
# so it does not match.
_PROCESS = re.compile(r"[^/]*/\d+/(?P<pid>\d{1,9})@(?P<start>\d+)@(?P<machine>.*)", re.DOTALL)
# Settings that do not affect rows and differ between sessions.
_IGNORED_SETTINGS = ("spark.sql.warehouse.dir", "spark.sql.artifact.", "spark.sql.session.uuid")
_TIME_ZONE = "spark.sql.session.timeZone"


class _UnknownError(Exception):
    """The reason why a DataFrame has no fingerprint."""


@dataclass(frozen=True)
class Fingerprint:
    """A value that is equal for two preparations only if they would write the same rows.

    Attributes:
        text: a digest of everything that determines the rows.
        caches: the caches that the rows come from; without caches, the fingerprint is valid in every application.
    """

    text: str
    caches: tuple[str, ...] = ()


def _log(reason: str) -> None:
    logger.debug("The rows of this DataFrame cannot be recognized later: %s", reason)


def fingerprint(
    df: DataFrame, *parts: object, caches: bool = True, report: Callable[[str], None] = _log
) -> Fingerprint | None:
    """Return the fingerprint of the rows of a DataFrame.

    Args:
        df: the rows.
        parts: further values that determine what is written; their ``repr`` is part of the fingerprint.
        caches: whether rows of a cache have a fingerprint, which is valid in this application only.
        report: receives the reason if there is no fingerprint; by default it is logged at level debug.

    Returns:
        The fingerprint, or None if the rows cannot be identified.

    Raises:
        Exception: Spark's error if the plan has a cache that is not filled yet, and a stage below it fails.
    """
    if is_connect(df.sparkSession):
        report("a Spark Connect client sees neither the plan nor the files of a DataFrame")
        return None
    try:
        plan, cached = _plan(df, caches=caches)
        identity = [_FORMAT_VERSION, _session(df), plan, [repr(part) for part in parts]]
        if f'"{_SAMPLE}"' in str(plan[0]):
            identity.append(df.sparkSession.sparkContext.defaultParallelism)
    except _UnknownError as reason:
        report(str(reason))
        return None
    return Fingerprint(hashlib.sha256(json.dumps(identity).encode()).hexdigest(), cached)


def living_caches(spark: SparkSession) -> Callable[[str], bool]:
    """Return a predicate for whether one of ``Fingerprint.caches`` may exist; caches of other machines always may."""
    if is_connect(spark):
        return lambda _cache: True
    application, machine = _application(spark), machine_id()
    alive = {str(number) for number in spark.sparkContext._jsc.getPersistentRDDs()}  # noqa: SLF001

    def may_live(cache: str) -> bool:
        owner, _, number = cache.rpartition("/")
        if owner == application:
            return number in alive
        process = _PROCESS.fullmatch(owner)
        if process is None or process["machine"] != machine:
            return True
        return is_running(int(process["pid"]), process["start"])

    return may_live


def _application(spark: SparkSession) -> str:
    """Return a unique name of the application, even if several masters number their applications alike."""
    context = spark.sparkContext
    management: Any = context._jvm.java.lang.management.ManagementFactory  # type: ignore[union-attr]  # noqa: SLF001
    pid = int(str(management.getRuntimeMXBean().getName()).partition("@")[0])  # Java 8 has no ProcessHandle
    return f"{context.applicationId}/{context.startTime}/{pid}@{process_start(pid)}@{machine_id()}"


def _session(df: DataFrame) -> list[object]:
    spark = df.sparkSession
    chosen = {
        name: value
        for name, value in session_settings(spark).items()
        if name.startswith("spark.sql.") and not name.startswith(_IGNORED_SETTINGS)
    }
    # Unless it is set, the time zone is that of the machine. Files with texts of times are read in it.
    chosen[_TIME_ZONE] = str(spark.conf.get(_TIME_ZONE))
    return [spark.version, sorted(chosen.items())]


def _plan(df: DataFrame, *, caches: bool) -> tuple[list[object], tuple[str, ...]]:
    # Use a new query over the rows: the DataFrame's own query remembers the caches that existed when it was analyzed.
    plan = df.select("*")._jdf.queryExecution().withCachedData()  # noqa: SLF001  (no public access to the full plan)
    # One call returns every operator and expression; a call for each would take seconds for wide tables.
    described, shown = json.loads(plan.toJSON()), text_of_plan(plan)
    nodes = []
    for node in _nodes(described):
        for name in _IGNORED_FIELDS.get(str(node["class"]), ()):
            node.pop(name, None)
        nodes.append(node)
    description = json.dumps(described, separators=(",", ":"))
    _refuse_unknown(nodes)
    if not caches and any(node["class"] == _CACHE for node in nodes):
        raise _UnknownError("a cache cannot be identified in another application")
    functions = _functions(df, plan)
    if len(functions) != sum(node["class"] == _FUNCTION for node in nodes):
        raise _UnknownError("the plan has a function that cannot be inspected")
    # VectorAssembler claims to be non-deterministic, so that Spark calls it once per row.
    if not functions and not plan.deterministic():
        raise _UnknownError("an expression is not deterministic")
    leaves = plan.collectLeaves()
    sources = [_source(df, leaves.apply(index)) for index in range(leaves.size())]
    cached = tuple(source[1] for source in sources if source[0] == _CACHE)
    return [*_renumbered(description, _without_cached_plans(shown)), functions, sources], cached


def _without_cached_plans(shown: str) -> str:
    """Return the plan's text without the plans below its caches, which change."""
    kept, inside = [], None
    for line in shown.split("\n"):
        depth = len(_INDENTATION.match(line)[0])  # type: ignore[index]  # the pattern matches every line
        if inside is not None and depth > inside:
            continue
        inside = depth if _CACHE_SHOWN.match(line) else None
        kept.append(line)
    return "\n".join(kept)


def _functions(df: DataFrame, plan: Any) -> list[str]:
    """Return digests of the plan's Scala functions, which must all be Spark ML's own; equal digests mean equal code."""
    kind = df.sparkSession._jvm.org.apache.spark.sql.catalyst.trees.TreePattern.SCALA_UDF()  # type: ignore[union-attr]  # noqa: SLF001
    digests: list[str] = []
    pending = [(plan, True)]
    while pending:
        node, has_expressions = pending.pop()
        if not node.containsPattern(kind):
            continue
        if str(node.getClass().getName()) == _FUNCTION:
            name = str(node.function().getClass().getName())
            if not name.startswith(_OWN_FUNCTIONS):
                raise _UnknownError(f"{name} is a user-defined function")
            digests.append(_digest(df, node.function()))
        children = node.children()
        pending.extend((children.apply(index), has_expressions) for index in range(children.size()))
        if has_expressions:
            expressions = node.expressions()
            pending.extend((expressions.apply(index), False) for index in range(expressions.size()))
    return digests


def _digest(df: DataFrame, content: Any) -> str:
    """Return a digest of an object as Java serializes it."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # noqa: PLC0415  (comes with pyspark)

    try:
        serialized = df.sparkSession._jvm.org.apache.spark.util.Utils.serialize(content)  # type: ignore[union-attr]  # noqa: SLF001
    except Py4JJavaError as error:
        raise _UnknownError(f"{content.getClass().getName()} cannot be serialized") from error
    return hashlib.sha256(bytes(serialized)).hexdigest()


def _refuse_unknown(nodes: list[dict[str, object]]) -> None:
    for node in nodes:
        name = str(node["class"])
        short = name.rpartition(".")[2]
        known = (
            name in {_RELATION, _CACHE}
            or (name == _PLAN_PACKAGE + short and short in _PLANS)
            or (name.startswith(_EXPRESSION_PACKAGE) and short in _EXPRESSIONS)
            or name.endswith("UDT")  # a type, not an expression
        )
        if not known:
            what = f"the function {node['name']!r} ({short})" if isinstance(node.get("name"), str) else short
            raise _UnknownError(f"{what} is not known to be deterministic")
        # Arrays, maps and binary values are not shown in full.
        if short == "Literal" and node.get("value") is not None:
            kind = node.get("dataType")
            if isinstance(kind, dict) or kind == "binary":
                raise _UnknownError("a literal is not a simple value")


def _nodes(tree: object) -> Iterator[dict[str, object]]:
    """Yield the operators, expressions and types of a plan's JSON."""
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "class" in value:
                yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _renumbered(description: str, shown: str) -> list[str]:
    """Return the plan with new numbers for columns and transformers, because Spark's differ between equal plans."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f'"id":{numbers.setdefault(match[1], len(numbers))}'

    def transformer(match: re.Match[str]) -> str:
        return f"VectorAssembler_{numbers.setdefault(match[0], len(numbers))}"

    description, shown = (_TRANSFORMER_ID.sub(transformer, text) for text in (description, shown))
    described = _EXPRESSION_ID.sub(number, description)
    return [described, _SHOWN_ID.sub(lambda match: f"#{numbers.setdefault(match[1], len(numbers))}", shown)]


def _source(df: DataFrame, leaf: Any) -> list[str]:
    name = str(leaf.getClass().getName())
    if name == _PLAN_PACKAGE + "LocalRelation":
        return [name, _digest(df, leaf.data())]
    if name == _CACHE:
        # The first access to a cache runs all of its stages except the last.
        number = run_job(df.sparkSession, lambda: leaf.cacheBuilder().cachedColumnBuffers().id())
        return [name, f"{_application(df.sparkSession)}/{number}"]
    if name != _RELATION:
        return [name]  # on the allow-list, and described by the plan itself
    relation = leaf.relation()
    if str(relation.getClass().getName()) != "org.apache.spark.sql.execution.datasources.HadoopFsRelation":
        raise _UnknownError(f"{relation.getClass().getName()} does not report what it reads")
    return [
        name,
        str(relation.fileFormat().getClass().getName()),
        str(relation.options().toString()),
        str(relation.dataSchema().json()),
        str(relation.partitionSchema().json()),
        str(relation.bucketSpec().toString()),
        _files(df, relation),
    ]


def _files(df: DataFrame, relation: Any) -> str:
    """Return the paths, sizes and modification times of a relation's files, listed now."""
    location = relation.location()
    kind = "org.apache.spark.sql.execution.datasources.InMemoryFileIndex"
    if str(location.getClass().getName()) != kind:
        raise _UnknownError(f"{location.getClass().getName()} may list other files later")
    jvm: Any = df.sparkSession._jvm  # noqa: SLF001
    datasources = jvm.org.apache.spark.sql.execution.datasources
    scala_none = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    new_index = datasources.InMemoryFileIndex(
        df.sparkSession._jsparkSession,  # noqa: SLF001
        location.rootPaths(),
        relation.options(),
        scala_none,
        getattr(getattr(datasources, "NoopCache$"), "MODULE$"),
        scala_none,
        scala_none,
    )
    current, original = (_listing(index) for index in (new_index, location))
    if current != original:
        raise _UnknownError("files have changed since the DataFrame was created")
    return current


def _listing(index: Any) -> str:
    listing = _ACCESS_TIME.sub("", str(index.allFiles().mkString("\n")))
    return "\n".join(sorted(listing.split("\n")))
