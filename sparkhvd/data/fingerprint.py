"""What identifies the rows that a preparation would write, so that an earlier one can be used instead.

A fingerprint is given only where everything that decides the rows is known; everything else has none and is prepared
anew. What is known:

- the analysed plan of the DataFrame, made only of operators and expressions of an allow-list, all deterministic.
  User-defined functions, the current time and unseeded randomness have no place on it;
- its leaves: ranges, rows that are part of the plan, and files. Of files, everything that Spark's listing says: path,
  size and modification time, listed now and equal to the listing that the DataFrame reads by;
- no part of it is cached: a cache holds the rows of then, whatever the files hold now;
- the session's ``spark.sql`` settings, the versions of Spark and of this writing, the selection and the split's seed.

Two things follow from Spark and not from this module: ``limit`` without an order, and functions such as ``first``, may
choose other rows in every evaluation; the rows of an earlier evaluation are as right as those of a new one. A file that
is replaced by one of the same path, size and modification time (in milliseconds) cannot be told from the old one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sparkhvd.data.spark_job import is_connect

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger(__name__)

# Raise when the same plan would be written differently.
_WRITING = 1

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
_PLAN_PACKAGE = "org.apache.spark.sql.catalyst.plans.logical."
_EXPRESSION_PACKAGE = "org.apache.spark.sql.catalyst.expressions."
_EXPRESSION_ID = re.compile(r'"id":(\d+),"jvmId":"[^"]*"')
_SHOWN_ID = re.compile(r"#(\d+)")
_ACCESS_TIME = re.compile(r"access_time=\d+; ")
# What holds no rows and differs between sessions.
_IGNORED_SETTINGS = ("spark.sql.warehouse.dir", "spark.sql.artifact.", "spark.sql.session.uuid")


class _UnknownError(Exception):
    """Why a DataFrame has no fingerprint."""


def fingerprint(df: DataFrame, *parts: object) -> str | None:
    """A text that two preparations share only if they would write the same rows.

    Args:
        df: the rows.
        parts: what else decides what is written; their ``repr`` counts.

    Returns:
        None where that cannot be known; the reason is logged (at level debug).
    """
    if is_connect(df.sparkSession):  # the client sees neither the plan nor the files
        return None
    try:
        identity = [_WRITING, _session(df), _plan(df), [repr(part) for part in parts]]
    except _UnknownError as reason:
        logger.debug("The rows of this DataFrame cannot be recognised later: %s", reason)
        return None
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def _session(df: DataFrame) -> list[object]:
    spark = df.sparkSession
    settings = dict(spark.conf.getAll)
    chosen = {
        name: value
        for name, value in settings.items()
        if name.startswith("spark.sql.") and not name.startswith(_IGNORED_SETTINGS)
    }
    return [spark.version, sorted(chosen.items())]


def _plan(df: DataFrame) -> list[object]:
    # A new query over the rows: one that ran before remembers what was cached then.
    execution = df.select("*")._jdf.queryExecution()  # noqa: SLF001  (nothing public tells the plan in full)
    plan = execution.analyzed()
    if not plan.deterministic():
        raise _UnknownError("an expression is not deterministic")
    # One call gives every operator and expression; a call for each would take seconds for wide tables.
    description, shown = str(plan.toJSON()), str(plan.treeString(True, False, 2**31 - 1, False, False))
    _refuse_unknown(description)
    if "InMemoryRelation" in str(execution.withCachedData().toString()):
        raise _UnknownError("a part of it is cached")
    leaves = plan.collectLeaves()
    sources = [_source(df, leaves.apply(index)) for index in range(leaves.size())]
    return [*_with_own_numbers(description, shown), sources]


def _refuse_unknown(description: str) -> None:
    for node in _nodes(json.loads(description)):
        name = str(node["class"])
        short = name.rpartition(".")[2]
        known = (
            name == _RELATION
            or (name == _PLAN_PACKAGE + short and short in _PLANS)
            or (name.startswith(_EXPRESSION_PACKAGE) and short in _EXPRESSIONS)
            or name.endswith("UDT")  # a type, not an expression
        )
        if not known:
            raise _UnknownError(f"{name} is not known to be the same every time")
        # Arrays, maps and binary values are not shown in full.
        if short == "Literal" and node.get("value") is not None:
            kind = node.get("dataType")
            if isinstance(kind, dict) or kind == "binary":
                raise _UnknownError("a literal is no simple value")


def _nodes(found: object) -> Iterator[dict[str, object]]:
    """The operators, expressions and types of a plan's JSON."""
    waiting = [found]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if "class" in one:
                yield one
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _with_own_numbers(description: str, shown: str) -> list[str]:
    """The plan without the numbers that Spark gives to columns, which differ between equal plans."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f'"id":{numbers.setdefault(match[1], len(numbers))}'

    described = _EXPRESSION_ID.sub(number, description)
    return [described, _SHOWN_ID.sub(lambda match: f"#{numbers.setdefault(match[1], len(numbers))}", shown)]


def _source(df: DataFrame, leaf: Any) -> list[str]:
    name = str(leaf.getClass().getName())
    if name == _PLAN_PACKAGE + "LocalRelation":
        serialized = df.sparkSession._jvm.org.apache.spark.util.Utils.serialize(leaf.data())  # type: ignore[union-attr]  # noqa: SLF001
        return [name, hashlib.sha256(bytes(serialized)).hexdigest()]
    if name != _RELATION:
        return [name]  # on the list, and described by the plan itself
    relation = leaf.relation()
    if str(relation.getClass().getName()) != "org.apache.spark.sql.execution.datasources.HadoopFsRelation":
        raise _UnknownError(f"{relation.getClass().getName()} does not say what it reads")
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
    """Paths, sizes and modification times of a relation's files, listed now."""
    location = relation.location()
    kind = "org.apache.spark.sql.execution.datasources.InMemoryFileIndex"
    if str(location.getClass().getName()) != kind:
        raise _UnknownError(f"{location.getClass().getName()} may change its mind about the files")
    jvm: Any = df.sparkSession._jvm  # noqa: SLF001
    datasources = jvm.org.apache.spark.sql.execution.datasources
    nothing = getattr(getattr(jvm.scala, "None$"), "MODULE$")
    fresh = datasources.InMemoryFileIndex(
        df.sparkSession._jsparkSession,  # noqa: SLF001
        location.rootPaths(),
        relation.options(),
        nothing,
        getattr(getattr(datasources, "NoopCache$"), "MODULE$"),
        nothing,
        nothing,
    )
    now, then = (_listing(index) for index in (fresh, location))
    if now != then:
        raise _UnknownError("files have changed since the DataFrame was made")
    return now


def _listing(index: Any) -> str:
    listing = _ACCESS_TIME.sub("", str(index.allFiles().mkString("\n")))
    return "\n".join(sorted(listing.split("\n")))
