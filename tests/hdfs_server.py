"""A real HDFS for the tests: the name node and data nodes of Apache Hadoop."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.hadoop import START_SECONDS, configure, roomy_folder, start_daemon, stop_daemons
from tests.ports import listening_ports
from tests.waiting import happens

_SERVER = "org.apache.hadoop.hdfs.server"


@dataclass
class Hdfs:
    """A running HDFS.

    Attributes:
        url: such as ``hdfs://127.0.0.1:41234``.
        conf: the folder for ``HADOOP_CONF_DIR``.
        data_nodes: the processes of the data nodes.
        data_ports: the ports on which the data nodes listen.
    """

    url: str
    conf: Path
    data_nodes: list[subprocess.Popen[bytes]]
    data_ports: set[int]


@contextmanager
def running_hdfs(folder: Path, data_nodes: int = 1, address: str = "127.0.0.1") -> Iterator[Hdfs]:
    """Run an HDFS at one address, with its files in ``folder`` or in memory and one replica per data node."""
    with roomy_folder(folder) as roomy:
        yield from _run(roomy, data_nodes, address)


def _run(folder: Path, data_nodes: int, address: str) -> Iterator[Hdfs]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        log = folder / "name.log"
        conf = _configuration(folder, "conf", f"hdfs://{address}:0", data_nodes)
        name_node = f"{_SERVER}.namenode.NameNode"
        format_node = start_daemon(conf, name_node, folder / "format.log", "-format", "-nonInteractive")
        assert format_node.wait(START_SECONDS) == 0, (folder / "format.log").read_text()
        started.append(start_daemon(conf, name_node, log))
        url = f"hdfs://{address}:{_listening_port(started[0], log, address)}"
        conf = _configuration(folder, "conf", url, data_nodes)
        for index in range(data_nodes):
            node_conf = _configuration(folder, f"conf-{index}", url, data_nodes, f"data-{index}")
            started.append(start_daemon(node_conf, f"{_SERVER}.datanode.DataNode", folder / f"data-{index}.log"))
        _wait_until_writable(url, folder, data_nodes)
        yield Hdfs(url, conf, started[1:], set(listening_ports(node.pid for node in started[1:])))
    finally:
        stop_daemons(started)


def _configuration(folder: Path, name: str, url: str, replicas: int, data: str = "data") -> Path:
    address = url.removeprefix("hdfs://").partition(":")[0]
    any_port = f"{address}:0"
    return configure(
        folder / name,
        {
            "core-site": {"fs.defaultFS": url, "hadoop.tmp.dir": folder / "tmp"},
            "hdfs-site": {
                "dfs.replication": replicas,
                "dfs.namenode.name.dir": folder / "name",
                "dfs.datanode.data.dir": folder / data,
                "dfs.namenode.http-address": any_port,
                "dfs.datanode.address": any_port,
                "dfs.datanode.http.address": any_port,
                "dfs.datanode.ipc.address": any_port,
                "dfs.datanode.hostname": address,
                "dfs.namenode.fs-limits.min-block-size": 1024,
                "dfs.heartbeat.interval": 1,
                "dfs.namenode.delegation.token.always-use": "true",
                "dfs.namenode.heartbeat.recheck-interval": 1000,
            },
        },
    )


def _listening_port(process: subprocess.Popen[bytes], log: Path, address: str) -> int:
    """Return the port of the name node's RPC server: the listening port that does not speak HTTP."""
    assert happens(lambda: process.poll() is not None or len(listening_ports([process.pid])) >= 2, START_SECONDS), (
        f"The name node did not start:\n{log.read_text()}"
    )
    assert process.poll() is None, log.read_text()
    return next(port for port in listening_ports([process.pid]) if not _speaks_http(address, port))


def _speaks_http(address: str, port: int) -> bool:
    import http.client  # noqa: PLC0415

    connection = http.client.HTTPConnection(address, port, timeout=10)
    try:
        connection.request("GET", "/")
        # Hadoop's RPC server answers HTTP requests with this sentence and no header.
        return b"It looks like you are making an HTTP request" not in connection.getresponse().read()
    except http.client.HTTPException:
        return False
    finally:
        connection.close()


def _wait_until_writable(url: str, folder: Path, data_nodes: int) -> None:
    from hdfs_native import Client, WriteOptions  # noqa: PLC0415

    client = Client(url, {"dfs.client.failover.max.attempts": "2"})
    deadline = time.monotonic() + START_SECONDS
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
    assert client.read("/ready").read() == b"ready"  # starts the client's persistent threads
    client.delete("/ready", False)
