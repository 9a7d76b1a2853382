"""A real HDFS for the tests: name node and data nodes of Apache Hadoop, each a process of ours on loopback."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

# The version of Hadoop's client that pyspark 4.3 brings along.
_PACKAGES = "org.apache.hadoop:hadoop-client-minicluster:3.5.0,org.slf4j:slf4j-reload4j:1.7.36"
# A folder that the next run finds again; `make` targets of several checkouts may share it.
_CACHE = Path(__file__).parents[1] / "build" / "hadoop"
_FETCH = """
import sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.jars.packages", sys.argv[1]).config("spark.jars.ivy", sys.argv[2])
builder.config("spark.driver.host", "127.0.0.1").getOrCreate().stop()
"""
_START_SECONDS = 150.0
_STOP_SECONDS = 20.0
_SERVER = "org.apache.hadoop.hdfs.server"
_LOG = """log4j.rootLogger=WARN,E
log4j.appender.E=org.apache.log4j.ConsoleAppender
log4j.appender.E.layout=org.apache.log4j.PatternLayout
log4j.appender.E.layout.ConversionPattern=%d %p %c: %m%n
"""


def hadoop_jars() -> Path:
    """The folder of Hadoop's jars, fetched by Spark's own Ivy where they are not there yet."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    jars, complete = _CACHE / "jars", _CACHE / "complete"
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            command = [sys.executable, "-c", _FETCH, _PACKAGES, str(_CACHE)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, f"Hadoop's jars cannot be fetched:\n{done.stdout}{done.stderr}"
            complete.touch()
    return jars


@dataclass
class Hdfs:
    """A running HDFS.

    Attributes:
        url: such as ``hdfs://127.0.0.1:41234``.
        conf: the folder to use as ``HADOOP_CONF_DIR``.
        data_nodes: their processes.
        data_ports: the ports that they listen on.
    """

    url: str
    conf: Path
    data_nodes: list[subprocess.Popen[bytes]]
    data_ports: set[int]


@contextmanager
def running_hdfs(folder: Path, data_nodes: int = 1) -> Iterator[Hdfs]:
    """An HDFS whose files lie in ``folder``, with as many replicas as data nodes."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        port_file = folder / "name.log"
        conf = _configuration(folder, "conf", "hdfs://127.0.0.1:0", data_nodes)
        format_node = _start(folder, conf, f"{_SERVER}.namenode.NameNode", "format.log", "-format", "-nonInteractive")
        assert format_node.wait(_START_SECONDS) == 0, (folder / "format.log").read_text()
        started.append(_start(folder, conf, f"{_SERVER}.namenode.NameNode", port_file.name))
        url = f"hdfs://127.0.0.1:{_listening_port(started[0], port_file)}"
        conf = _configuration(folder, "conf", url, data_nodes)
        for index in range(data_nodes):
            own = _configuration(folder, f"conf-{index}", url, data_nodes, f"data-{index}")
            started.append(_start(folder, own, f"{_SERVER}.datanode.DataNode", f"data-{index}.log"))
        _wait_until_it_writes(url, folder, data_nodes)
        yield Hdfs(url, conf, started[1:], {port for node in started[1:] for port in _listening_ports(node)})
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGKILL)
        for process in started:
            process.wait(_STOP_SECONDS)


def _configuration(folder: Path, name: str, url: str, replicas: int, data: str = "data") -> Path:
    conf = folder / name
    conf.mkdir(parents=True, exist_ok=True)
    any_port = "127.0.0.1:0"
    _write(conf / "core-site.xml", {"fs.defaultFS": url, "hadoop.tmp.dir": folder / "tmp"})
    _write(
        conf / "hdfs-site.xml",
        {
            "dfs.replication": replicas,
            "dfs.namenode.name.dir": folder / "name",
            "dfs.datanode.data.dir": folder / data,
            "dfs.namenode.http-address": any_port,
            "dfs.datanode.address": any_port,
            "dfs.datanode.http.address": any_port,
            "dfs.datanode.ipc.address": any_port,
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.namenode.fs-limits.min-block-size": 1024,
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.heartbeat.recheck-interval": 1000,
        },
    )
    (conf / "log4j.properties").write_text(_LOG)
    return conf


def _write(file: Path, settings: dict[str, object]) -> None:
    entries = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in settings.items())
    file.write_text(f"<configuration>{entries}</configuration>")


def _start(folder: Path, conf: Path, main: str, log: str, *arguments: str) -> subprocess.Popen[bytes]:
    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else "java"
    command = [str(java), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    with (folder / log).open("w") as output:
        return subprocess.Popen(
            [*command, "-cp", f"{conf}:{hadoop_jars()}/*", main, *arguments], stdout=output, stderr=subprocess.STDOUT
        )


def _listening_port(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port of the name node's RPC server: of its listening ports the one that does not speak HTTP."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        ports = _listening_ports(process)
        if len(ports) >= 2:
            return next(port for port in ports if not _speaks_http(port))
        time.sleep(0.1)
    raise AssertionError(f"The name node did not start:\n{log.read_text()}")


def _listening_ports(process: subprocess.Popen[bytes]) -> list[int]:
    connections = psutil.Process(process.pid).net_connections("tcp")
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]


def _speaks_http(port: int) -> bool:
    import http.client  # noqa: PLC0415

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        # Hadoop's RPC answers HTTP too, with this sentence and no header.
        return b"It looks like you are making an HTTP request" not in connection.getresponse().read()
    except http.client.HTTPException:
        return False
    finally:
        connection.close()


def _wait_until_it_writes(url: str, folder: Path, data_nodes: int) -> None:
    from hdfs_native import Client, WriteOptions  # noqa: PLC0415

    client = Client(url, {"dfs.client.failover.max.attempts": "2"})
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with client.create("/ready", WriteOptions(overwrite=True, replication=data_nodes)) as file:
                file.write(b"ready")
            break
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                logs = "".join(log.read_text()[-3000:] for log in folder.glob("*.log"))
                raise AssertionError(f"HDFS did not start:\n{logs}") from error
            time.sleep(0.2)
    assert client.read("/ready").read() == b"ready"  # which starts what the client keeps for the life of the process
    client.delete("/ready", False)
