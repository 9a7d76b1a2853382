"""Daemons of Apache Hadoop for the tests, each a child process on loopback."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_VERSION = "3.5.0"  # the version of the Hadoop client in pyspark 4.3
_SERVER_PACKAGES = (
    f"org.apache.hadoop:hadoop-client-minicluster:{_VERSION}",
    "org.slf4j:slf4j-reload4j:1.7.36",
    "org.bouncycastle:bcpkix-jdk18on:1.79",  # needed by YARN
)
_AWS_BUNDLE = "software.amazon.awssdk:bundle"  # all modules of AWS, 0.7 GB; excluded
_AWS_MODULES = ("s3", "s3-transfer-manager", "sts", "netty-nio-client", "apache-client")
_S3A_PACKAGES = (
    f"org.apache.hadoop:hadoop-aws:{_VERSION}",
    *(f"software.amazon.awssdk:{module}:2.35.4" for module in _AWS_MODULES),
)
# The next run reuses these folders; `make` targets of several checkouts may share them.
_CACHES = Path(__file__).parents[1] / "build"
_FETCH_PROGRAM = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.jars.packages", sys.argv[1]).config("spark.jars.ivy", sys.argv[2])
builder = builder.config("spark.jars.excludes", sys.argv[3])
builder.config("spark.driver.host", "127.0.0.1").getOrCreate().stop()
"""
START_SECONDS = 150.0
_STOP_SECONDS = 20.0
_MIN_FREE_BYTES = 2**30
_LOG4J_PROPERTIES = """log4j.rootLogger=WARN,E
log4j.appender.E=org.apache.log4j.ConsoleAppender
log4j.appender.E.layout=org.apache.log4j.PatternLayout
log4j.appender.E.layout.ConversionPattern=%d %p %c: %m%n
"""


def hadoop_jars() -> Path:
    """Return the folder with the jars of Hadoop's servers."""
    return _fetched(_SERVER_PACKAGES, _CACHES / "hadoop")


def s3a_jars() -> Path:
    """Return the folder with the jars of Spark's connector to S3."""
    return _fetched(_S3A_PACKAGES, _CACHES / "hadoop-aws")


def _fetched(packages: Sequence[str], cache: Path) -> Path:
    """Return the folder with the jars of these packages; Spark's own Ivy downloads missing ones."""
    cache.mkdir(parents=True, exist_ok=True)
    jars, complete = cache / "jars", cache / "complete"
    coordinates = ",".join(packages)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists() or complete.read_text() != coordinates:
            command = [sys.executable, "-c", _FETCH_PROGRAM, coordinates, str(cache), _AWS_BUNDLE]
            completed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert completed.returncode == 0, f"Jars cannot be fetched:\n{completed.stdout}{completed.stderr}"
            complete.write_text(coordinates)
    return jars


@contextmanager
def roomy_folder(folder: Path) -> Iterator[Path]:
    """Yield ``folder``, or one in memory if the disk has little room left.

    Hadoop counts only the space that is not reserved for root, so it may refuse a disk that root can still use.
    """
    if shutil.disk_usage(folder).free >= _MIN_FREE_BYTES:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="sparkhvd-hadoop-", dir="/dev/shm") as memory:
        yield Path(memory)


def configure(conf: Path, files: Mapping[str, Mapping[str, object]]) -> Path:
    """Write a folder for ``HADOOP_CONF_DIR``: settings by the name of their file, such as ``core-site``."""
    conf.mkdir(parents=True, exist_ok=True)
    for name, settings in files.items():
        entries = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in settings.items())
        (conf / f"{name}.xml").write_text(f"<configuration>{entries}</configuration>")
    (conf / "log4j.properties").write_text(_LOG4J_PROPERTIES)
    return conf


def start_daemon(conf: Path, main: str, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the main class ``main`` of Hadoop."""
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
    command = [str(java), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Djava.io.tmpdir={conf}"]
    with log.open("w") as output:
        return subprocess.Popen(
            [*command, "-cp", f"{conf}:{hadoop_jars()}/*", main, *arguments], stdout=output, stderr=subprocess.STDOUT
        )


def stop_daemons(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Stop the daemons in the reverse order of their start."""
    for process in reversed(processes):
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait(_STOP_SECONDS)
