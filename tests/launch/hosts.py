"""Network namespaces as hosts: a bridge, a cable to each host, and on each a Spark worker with its own address.

Needs root, ``ip`` and the right to make namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyspark

SPARK_HOME = Path(pyspark.__file__).parent
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Host:
    """A namespace, its address, its interface, and the address of its gateway."""

    namespace: str
    address: str
    interface: str
    gateway: str

    def connect(self) -> None:
        """Connect the cable, or connect it again."""
        _ip("-n", self.namespace, "link", "set", self.interface, "up")
        _ip("-n", self.namespace, "route", "replace", "default", "via", self.gateway)

    def hide(self, other: Host) -> None:
        """Drop all traffic to another host."""
        _ip("-n", self.namespace, "route", "add", "unreachable", other.address)

    def show(self, other: Host) -> None:
        """Undo ``hide``."""
        _ip("-n", self.namespace, "route", "del", "unreachable", other.address)

    def lose(self, other: Host) -> None:
        """Lose all packets to another host on the way, so that no program on this host gets an error."""
        nobody = "02:00:00:00:00:01"
        words = ["neigh", "replace", other.address, "lladdr", nobody, "nud", "permanent", "dev", self.interface]
        _ip("-n", self.namespace, *words)

    def find(self, other: Host) -> None:
        """Undo ``lose``."""
        _ip("-n", self.namespace, "neigh", "del", other.address, "dev", self.interface)


@dataclass(frozen=True)
class Cluster:
    """A standalone cluster: the driver's address, the master's URL, the hosts."""

    address: str
    master: str
    hosts: tuple[Host, ...]


@cache
def why_not() -> str:
    """Return why this machine cannot make namespaces; empty if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and ip (Debian: iproute2)"
    name = f"shvd-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def hosts(count: int, *, ipv6: bool = False) -> Iterator[tuple[str, tuple[Host, ...]]]:
    """Yield the address of this machine on the bridge, and the hosts at the bridge's other ports.

    The hosts' interfaces have different names. As with Docker, each host also has its own bridge with the same address.

    Args:
        count: the number of hosts.
        ipv6: whether addresses on the bridge are IPv6 instead of IPv4.
    """
    number = os.getpid()
    bridge = f"shvd{number}"
    net, bits = f"10.{200 + number % 50}.{number // 50 % 250}.", "24"
    if ipv6:
        net, bits = f"fd00:{number % 0x10000:x}::", "64"
    made = tuple(Host(f"{bridge}-{index}", f"{net}{index + 2}", f"ens{index}", f"{net}1") for index in range(count))
    at_once = ("nodad",) if ipv6 else ()
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{net}1/{bits}", "dev", bridge, *at_once)
        _ip("link", "set", bridge, "up")
        for index, host in enumerate(made):
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            port = f"{bridge}p{index}"
            for words in (["link", "add", "docker0", "type", "bridge"], ["link", "set", "docker0", "up"]):
                _ip("-n", host.namespace, *words)
            _ip("-n", host.namespace, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            _ip("link", "add", port, "type", "veth", "peer", "name", host.interface, "netns", host.namespace)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/{bits}", "dev", host.interface, *at_once)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.connect()
        yield f"{net}1", made


@contextmanager
def cluster(count: int, folder: Path, *, ipv6: bool = False) -> Iterator[Cluster]:
    """Run a standalone cluster with one core on each of ``count`` hosts; the daemons' files are in ``folder``."""
    with hosts(count, ipv6=ipv6) as (address, made), ExitStack() as stack:
        log = _serve(stack, "master.Master", address, [], folder / "master.log", ())
        master = _await_line(log, r"Starting Spark master at (spark://\S+)")
        logs = [
            _serve(
                stack,
                "worker.Worker",
                host.address,
                ["ip", "netns", "exec", host.namespace],
                folder / f"worker{index}.log",
                ("--cores", "1", "--memory", "600m", "--work-dir", str(folder), master),
            )
            for index, host in enumerate(made)
        ]
        for one in logs:
            _await_line(one, r"(Successfully registered) with master")
        yield Cluster(address, master, made)


def _serve(  # noqa: PLR0917
    stack: ExitStack, name: str, address: str, prefix: list[str], log: Path, arguments: tuple[str, ...]
) -> Path:
    host = f"[{address}]" if ":" in address else address
    preferred = f"-Djava.net.preferIPv6Addresses={str(host != address).lower()}"
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": host,
        "SPARK_PREFER_IPV6": str(host != address).lower(),  # for the executors' Python
        "SPARK_LOCAL_DIRS": str(log.parent),
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_DAEMON_JAVA_OPTS": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {preferred}",
        "SPARK_NO_DAEMONIZE": "1",
    }
    command = [*prefix, str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--host", host, "--port", "0", "--webui-port", "0", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    stack.callback(_end, process)
    return log


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await_line(log: Path, pattern: str) -> str:
    deadline, pause = time.monotonic() + _START_SECONDS, threading.Event()
    while not (match := re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, f"{pattern} did not appear in time:\n{log.read_text()}"
        pause.wait(0.1)
    return match[1]
