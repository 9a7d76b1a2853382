"""Measure ranks on eight hosts with links of 100 Mbit/s, as real processes and sockets in network namespaces.

The program measures the start, a cycle of the negotiation, small and large collectives, and the time until all others
have an error that names a killed rank. Next to each time, it prints the least time that the link allows. It needs root,
ip and tc, and removes the namespaces afterwards.

    python -m bench.hosts [--per-host 1 8 16]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import machine
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.config import Config
from sparkhvd.errors import HorovodInternalError
from sparkhvd.world import layout
from tests.launch.hosts import Host, hosts

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
HOSTS = 8
PER_HOST = (1, 8, 16)
LINK_BITS = 100e6
PORT = 29402
TOKEN = b"of a benchmark on one machine"
START_SECONDS = 300.0

# Operation, bytes, calls, and the traffic of the busiest link as a multiple of these bytes.
CASES = (
    ("negotiation", 0, 30, 0.0),
    ("barrier", 0, 30, 0.0),
    ("allreduce", 4096, 30, 2 * (HOSTS - 1) / HOSTS),
    ("allreduce", MIB, 5, 2 * (HOSTS - 1) / HOSTS),
    ("allreduce", 8 * MIB, 3, 2 * (HOSTS - 1) / HOSTS),
    ("allgather", 4096, 30, (HOSTS - 1) / HOSTS),
    ("allgather", 8 * MIB, 3, (HOSTS - 1) / HOSTS),
    ("broadcast", 4096, 30, 1.0),
    ("broadcast", 8 * MIB, 3, 1.0),
)


def main() -> None:
    arguments = _arguments()
    if arguments.rank is not None:
        _rank(arguments.rank, *arguments.per_host, arguments.addresses, Path(arguments.folder))
        return
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("bench.hosts creates network namespaces. It needs root, ip and tc (Debian: iproute2).")
    print(machine.describe())
    print(f"{HOSTS} hosts with links of {LINK_BITS / 1e6:.0f} Mbit/s; milliseconds of the slowest rank")
    with hosts(HOSTS) as (_, all_hosts):
        for host in all_hosts:
            limit_link(host)
        for per_host in arguments.per_host:
            with tempfile.TemporaryDirectory() as folder:
                _print_table(per_host, _run(all_hosts, per_host, Path(folder)))
    print(f"\nafterwards: {machine.load()}")


def limit_link(host: Host) -> None:
    """Limit what a host sends and, at the bridge, what it receives."""
    bucket = ["root", "tbf", "rate", f"{LINK_BITS:.0f}bit", "burst", "64kb", "latency", "200ms"]
    bridge, _, index = host.namespace.rpartition("-")
    inside = ["ip", "netns", "exec", host.namespace]
    subprocess.run([*inside, "tc", "qdisc", "add", "dev", host.interface, *bucket], check=True)
    subprocess.run(["tc", "qdisc", "add", "dev", f"{bridge}p{index}", *bucket], check=True)


def _run(all_hosts: Sequence[Host], per_host: int, folder: Path) -> dict[str, float]:
    """Return the seconds of each case by its name."""
    addresses = ",".join(host.address for host in all_hosts)
    processes = []
    for rank in range(HOSTS * per_host):
        command = ["ip", "netns", "exec", all_hosts[rank // per_host].namespace, sys.executable, "-m", "bench.hosts"]
        command += ["--rank", str(rank), "--per-host", str(per_host), "--addresses", addresses, "--folder", str(folder)]
        processes.append(subprocess.Popen(command, cwd=ROOT))
    with _killed_at_the_end(processes):
        _await(lambda: len(list(folder.glob("imported-*"))) == len(processes), processes)
        (folder / "go").touch()
        _await((folder / "rows").exists, processes)
        named = _kill(len(processes) // 2, processes, folder)
    rows: dict[str, float] = json.loads((folder / "rows").read_text(encoding="utf-8"))
    return rows | {"a killed rank": named}


def _kill(rank: int, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> float:
    """Kill a rank, and return the seconds until the errors of all others name it."""
    processes[rank].send_signal(signal.SIGKILL)
    start_time = time.time()
    _await(lambda: len(list(folder.glob("lost-*"))) == len(processes) - 1, ())
    reports = [path.read_text(encoding="utf-8").split(" ", 1) for path in folder.glob("lost-*")]
    for _, error in reports:
        if not re.search(rf"\brank {rank}\b", error):
            raise SystemExit(f"An error does not name the killed rank {rank}: {error}")
    return max(float(seconds) for seconds, _ in reports) - start_time


@contextmanager
def _killed_at_the_end(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _await(condition: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if any(process.poll() for process in processes):
            raise SystemExit("A rank failed; see above.")
        if time.monotonic() > deadline:
            raise SystemExit("The ranks took too long.")
        time.sleep(0.05)


# The code of one rank.


def _rank(rank: int, per_host: int, addresses: str, folder: Path) -> None:
    host_addresses = addresses.split(",")
    names = [f"host {index // per_host}" for index in range(len(host_addresses) * per_host)]
    own = host_addresses[rank // per_host]
    server = RendezvousServer(TOKEN, host_addresses[0], PORT) if rank == 0 else None
    (folder / f"imported-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    start_time = time.perf_counter()
    config = Config(link_gbits=LINK_BITS / 1e9, link_latency_us=100.0)
    context = LaunchContext(layout(names)[rank], ((host_addresses[0], PORT),), TOKEN, names[rank], own, config)
    with Communicator(context) as me:
        start = time.perf_counter() - start_time
        rows = {"start": float(me.allreduce(np.array([start]), ReduceOp.MAX)[0])}
        for name, size, calls, _ in CASES:
            rows[_title(name, size)] = _seconds(me, name, size, calls)
        me.barrier()
        if rank == 0:
            (folder / "unfinished").write_text(json.dumps(rows), encoding="utf-8")
            (folder / "unfinished").rename(folder / "rows")
        try:
            while True:
                me.barrier()
        except HorovodInternalError as error:
            (folder / f"unfinished-{rank}").write_text(f"{time.time()} {error}", encoding="utf-8")
            (folder / f"unfinished-{rank}").rename(folder / f"lost-{rank}")
        time.sleep(START_SECONDS)  # until the parent ends this process
    if server is not None:
        server.close()


def _title(name: str, size: int) -> str:
    unit = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
    return f"{name} {unit}" if size else name


def _seconds(me: Communicator, name: str, size: int, calls: int) -> float:
    """Return the median time of a call on its slowest rank."""
    ranks = me.world.size
    array = np.ones(size // 4, np.float32)
    share = np.ones(max(1, size // 4 // ranks), np.float32)
    operation: Callable[[], object] = {
        "negotiation": lambda: me.allreduce(array, name="empty"),  # an operation without data to move
        "barrier": me.barrier,
        "allreduce": lambda: me.allreduce(array, ReduceOp.MAX, name="reduced", out=array),
        "allgather": lambda: me.allgather(share, name="gathered"),
        "broadcast": lambda: me.broadcast(array, 0, name="sent", out=array),
    }[name]
    operation()
    times = []
    for _ in range(calls):
        me.barrier()
        start_time = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start_time)
    return float(np.median(me.allreduce(np.array(times), ReduceOp.MAX)))


def _print_table(per_host: int, rows: dict[str, float]) -> None:
    least = {_title(name, size): share * size * 8 / LINK_BITS for name, size, _, share in CASES}
    print(f"\n{HOSTS * per_host} ranks, {per_host} per host\n")
    print(f"{'':<20}{'ms':>10}{'least':>10}{'least/ms':>10}")
    for name, seconds in rows.items():
        limit = least.get(name, 0.0)
        share = f"{limit / seconds:>10.0%}" if limit else ""
        print(f"{name:<20}{seconds * 1e3:>10.2f}" + (f"{limit * 1e3:>10.2f}{share}" if limit else ""))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--per-host", type=int, nargs="+", default=PER_HOST, help="ranks on each host")
    parser.add_argument("--addresses", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
