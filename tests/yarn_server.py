"""A real YARN for the tests: a resource manager and one node of Apache Hadoop."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.hadoop import START_SECONDS, configure, roomy_folder, start_daemon, stop_daemons

_SERVER = "org.apache.hadoop.yarn.server"
_LOCAL = "127.0.0.1"


@contextmanager
def running_yarn(folder: Path) -> Iterator[Path]:
    """Run a YARN with its logs in ``folder``, and yield the folder for ``HADOOP_CONF_DIR``.

    Its one node offers 8 GB and 8 cores. The files of applications go through local folders.
    """
    names = ("address", "scheduler.address", "resource-tracker.address", "admin.address", "webapp.address")
    addresses = {
        f"yarn.resourcemanager.{name}": f"{_LOCAL}:{port}" for name, port in zip(names, _ports(len(names)), strict=True)
    }
    started: list[subprocess.Popen[bytes]] = []
    with roomy_folder(folder) as containers:
        conf = _configuration(folder, containers / "containers", addresses)
        try:
            for name, main in (("manager", "resourcemanager.ResourceManager"), ("node", "nodemanager.NodeManager")):
                started.append(start_daemon(conf, f"{_SERVER}.{main}", folder / f"{name}.log"))
            _wait_for_the_node(addresses["yarn.resourcemanager.webapp.address"], started, folder)
            yield conf
        finally:
            stop_daemons(started)


def _configuration(folder: Path, containers: Path, addresses: dict[str, str]) -> Path:
    any_port = f"{_LOCAL}:0"
    queue = "yarn.scheduler.capacity"
    return configure(
        folder / "conf",
        {
            "core-site": {"fs.defaultFS": "file:///", "hadoop.tmp.dir": folder / "tmp"},
            "yarn-site": {
                **addresses,
                "yarn.resourcemanager.hostname": _LOCAL,
                "yarn.nodemanager.hostname": _LOCAL,
                "yarn.nodemanager.address": any_port,
                "yarn.nodemanager.localizer.address": any_port,
                "yarn.nodemanager.collector-service.address": any_port,
                "yarn.nodemanager.webapp.address": any_port,
                "yarn.nodemanager.local-dirs": containers,
                "yarn.nodemanager.log-dirs": folder / "logs",
                "yarn.nodemanager.resource.memory-mb": 8192,
                "yarn.nodemanager.resource.cpu-vcores": 8,
                "yarn.nodemanager.vmem-check-enabled": "false",
                "yarn.nodemanager.disk-health-checker.enable": "false",
                "yarn.scheduler.minimum-allocation-mb": 128,
            },
            "capacity-scheduler": {
                f"{queue}.root.queues": "default",
                f"{queue}.root.default.capacity": 100,
                f"{queue}.maximum-am-resource-percent": 0.9,
            },
        },
    )


def _ports(count: int) -> list[int]:
    """Return free ports below the range from which the system assigns ports."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(15_000, 30_000)
        with closing(socket.socket()) as probe:
            if port not in ports and probe.connect_ex((_LOCAL, port)) != 0:
                ports.append(port)
    return ports


def _wait_for_the_node(web: str, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"http://{web}/ws/v1/cluster/metrics", timeout=10) as answer:
                if json.load(answer)["clusterMetrics"]["activeNodes"] == 1:
                    return
        except (OSError, ValueError):
            pass  # the daemon does not listen yet
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            logs = "".join(log.read_text()[-3000:] for log in folder.glob("*.log"))
            raise AssertionError(f"YARN did not start:\n{logs}")
        time.sleep(0.2)
