"""The file systems of a Spark session: their settings, and whether Spark can write to them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkhvd.compat.spark import is_connect, rows_of_plan, session_settings
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

# Schemes whose Stores take Hadoop's settings.
_CONFIGURABLE = frozenset({"s3", "hdfs", "viewfs"})
_STORE_SETTINGS = (
    r"^(fs\.s3a\.(.+\.)?(access\.key|secret\.key|session\.token|endpoint|endpoint\.region|path\.style\.access|"
    r"connection\.ssl\.enabled|aws\.credentials\.provider)|fs\.defaultFS|fs\.viewfs\.mounttable\..+|"
    r"dfs\.(ha\.namenodes|namenode\.rpc-address|client\.failover\.proxy\.provider)\..+|"
    r"dfs\.data\.transfer\.protection|dfs\.client\.use\.datanode\.hostname|hadoop\.security\.authentication)$"
)
_LOCAL = "file:///"
_HADOOP = "spark.hadoop."
# Spark writes to these without additional jars (to ``dbfs`` on Databricks). With Spark Connect, the client cannot see
# which other connectors the server has.
_BUILT_IN = frozenset({"file", "hdfs", "viewfs", "dbfs"})


def with_spark_credentials(store: Store, spark: SparkSession | None) -> Store:
    """Return the Store, with missing credentials and addresses filled in from the settings of Spark's connectors.

    These are ``fs.s3a.*``, ``fs.defaultFS`` and the settings of HDFS name services, in the session's ``spark.hadoop.*``
    and in Hadoop's configuration files. Without a session, the Store is unchanged.
    """
    if spark is None or _scheme_of(store.url) not in _CONFIGURABLE:
        return store
    return store.with_spark_settings(_hadoop_settings(spark))


def spark_can_write(spark: SparkSession, url: str | None) -> bool:
    """Return whether Spark has a connector for a URL of ``Store.spark_url``."""
    if url is None:
        return False
    scheme = _scheme_of(url)
    if scheme in _BUILT_IN or is_connect(spark):
        return scheme in _BUILT_IN
    # Ranks read this package without Spark.
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415

    context = spark.sparkContext
    jvm = context._jvm  # noqa: SLF001  (no public interface lists the connectors)
    if jvm is None:
        return False
    try:
        jvm.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, _hadoop_configuration(spark))
    except Py4JError:
        return False
    return True


def in_default_file_system(spark: SparkSession, path: str) -> str:
    """Return a path without a scheme as Spark's writers take it: a URL if the default file system is not local."""
    if is_connect(spark):
        default = spark.conf.get("spark.hadoop.fs.defaultFS", _LOCAL) or _LOCAL
        return path if default.startswith("file:") else f"{default.rstrip('/')}/{path.lstrip('/')}"
    conf = _hadoop_configuration(spark)
    if str(conf.get("fs.defaultFS", _LOCAL)).startswith("file:"):
        return path
    hadoop_path = spark.sparkContext._jvm.org.apache.hadoop.fs.Path(path)  # type: ignore[union-attr]  # noqa: SLF001
    return str(hadoop_path.getFileSystem(conf).makeQualified(hadoop_path).toString())


def with_own_settings(rows: DataFrame, settings: Mapping[str, str]) -> DataFrame | None:
    """Return the same rows in a copy of their session with these settings; None if the session cannot be copied.

    No public function copies a session, so a version of Spark that lacks the private one is not an error.
    """
    spark = rows.sparkSession
    if is_connect(spark):
        return None
    # Ranks read this package without Spark.
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.sql import DataFrame as ClassicDataFrame  # noqa: PLC0415

    try:
        copy = spark._jsparkSession.cloneSession()  # noqa: SLF001
        for name, value in settings.items():
            copy.conf().set(name, value)
        copied = rows_of_plan(spark.sparkContext._jvm, copy, rows._jdf.queryExecution().analyzed())  # noqa: SLF001
    except (Py4JError, TypeError, AttributeError) as error:
        logger.debug("This Spark does not copy its session: %s", error)
        return None
    return ClassicDataFrame(copied, spark)


def _hadoop_settings(spark: SparkSession) -> dict[str, str]:
    if is_connect(spark):
        wanted = re.compile(_STORE_SETTINGS)
        hadoop = {name.removeprefix(_HADOOP): value for name, value in session_settings(spark).items()}
        return {name: value for name, value in hadoop.items() if wanted.match(name)}
    conf = _hadoop_configuration(spark)
    return {str(name): str(value) for name, value in dict(conf.getValByRegex(_STORE_SETTINGS)).items()}


def _hadoop_configuration(spark: SparkSession) -> Any:
    """Return the Hadoop configuration of a classic session, which includes Hadoop's configuration files."""
    return spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001  (there is no public access)


def _scheme_of(url: str) -> str:
    return url.partition(":")[0]
