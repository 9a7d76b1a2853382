"""Compare the allreduce over TCP with Gloo's between two network namespaces, which stand for two hosts.

A virtual Ethernet link (veth) connects the namespaces. The program measures at the full speed of the link, and with a
limit of 1 Gbit/s at both ends. With the limit, the relevant figures are the utilization of the link and the bytes sent.
The program needs root, ip and tc, and removes the namespaces afterwards.

    python -m bench.network [--seconds 4]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench import machine
from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.world import layout

MIB = 1 << 20
SIZES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LIMITED_SIZES = (MIB, 16 * MIB)
LINK_BITS = 1e9
TOKEN = b"of a benchmark on one machine"
PORT, GLOO_PORT = 29400, 29401
ROOT = Path(__file__).parents[1]


def main() -> None:
    arguments = _arguments()
    if arguments.rank is not None:
        _rank(arguments.rank, Path(arguments.folder), arguments.seconds, limited=arguments.limited)
        return
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("bench.network creates network namespaces. It needs root, ip and tc (Debian: iproute2).")
    print(f"{machine.describe()}; torch {torch.__version__}")
    for limited in (False, True):
        with linked_namespaces(limited=limited) as namespaces:
            _print_table(_run(namespaces, arguments.seconds, limited=limited), limited=limited)
    print(f"\nafterwards: {machine.load()}")


@contextmanager
def linked_namespaces(*, limited: bool) -> Iterator[list[str]]:
    """Create namespaces with the addresses 10.231.0.1 and 10.231.0.2, whose interfaces ``line`` are linked."""
    names = [f"shvd-bench-{os.getpid()}-{index}" for index in range(2)]
    try:
        for name in names:
            _run_command("ip", "netns", "add", name)
        first, second = names
        _run_command(
            "ip", "link", "add", "line", "netns", first, "type", "veth", "peer", "name", "line", "netns", second
        )
        for index, name in enumerate(names):
            _run_command("ip", "-n", name, "addr", "add", f"10.231.0.{index + 1}/24", "dev", "line")
            _run_command("ip", "-n", name, "link", "set", "line", "up")
            _run_command("ip", "-n", name, "link", "set", "lo", "up")
            if limited:
                bucket = ("rate", "1gbit", "burst", "256kb", "latency", "50ms")
                _run_command("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "line", "root", "tbf", *bucket)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _run_command(*command: str) -> None:
    subprocess.run(command, check=True)


def _run(namespaces: list[str], seconds: float, *, limited: bool) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, name in enumerate(namespaces):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "bench.network", "--rank", str(rank)]
            command += ["--folder", folder, "--seconds", str(seconds)] + (["--limited"] if limited else [])
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "line"}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit("A rank failed; see above.")
        return json.loads((Path(folder) / "rows").read_text(encoding="utf-8"))


# The code of one rank.


def _rank(rank: int, folder: Path, seconds: float, *, limited: bool) -> None:
    torch.set_num_threads(1)
    server = RendezvousServer(TOKEN, "10.231.0.1", PORT) if rank == 0 else None
    if server is not None:
        (folder / "ready").touch()
    while not (folder / "ready").exists():
        time.sleep(0.02)
    world = layout(["one", "other"])[rank]
    context = LaunchContext(world, (("10.231.0.1", PORT),), TOKEN, f"host {rank}", f"10.231.0.{rank + 1}")
    with Communicator(context) as communicator:
        dist.init_process_group("gloo", f"tcp://10.231.0.1:{GLOO_PORT}", rank=rank, world_size=2)
        rows = [_measure_size(communicator, size, seconds) for size in (LIMITED_SIZES if limited else SIZES)]
        if rank == 0:
            (folder / "rows").write_text(json.dumps(rows), encoding="utf-8")
        communicator.barrier()
        dist.destroy_process_group()
    if server is not None:
        server.close()


def _measure_size(communicator: Communicator, size: int, seconds: float) -> dict[str, float]:
    array = np.zeros(size // 4, np.float32)
    tensor = torch.from_numpy(array)
    operations: dict[str, Callable[[], object]] = {
        "ours": lambda: communicator.allreduce(array, ReduceOp.SUM, name=f"bench.{size}", out=array),
        "gloo": lambda: dist.all_reduce(tensor),
    }
    for name, operation in operations.items():
        array[:] = np.arange(len(array)) % 1009 * (communicator.world.rank + 1)
        operation()
        if not (array == np.arange(len(array)) % 1009 * 3).all():
            raise SystemExit(f"{name}: the allreduce returned a wrong result.")
    array[:] = 0
    once = sum(_timed(communicator, operation)[0] for operation in operations.values())
    repetitions = int(communicator.broadcast(np.array(float(max(5, min(300, seconds / once)))), 0))
    measured = np.array(
        [[_timed(communicator, operation) for operation in operations.values()] for _ in range(repetitions)]
    )
    slowest = communicator.allreduce(measured, ReduceOp.MAX)
    row = {"size": float(size), "repetitions": float(repetitions)}
    for column, name in enumerate(operations):
        row[name] = statistics.median(slowest[:, column, 0])
        row[f"{name} wire"] = statistics.median(slowest[:, column, 1])
    return row


def _timed(communicator: Communicator, operation: Callable[[], object]) -> tuple[float, float]:
    """Return the duration of a call in seconds, and the bytes that this host sends for it."""
    communicator.barrier()
    before, start = _bytes_sent(), time.perf_counter()
    operation()
    seconds = time.perf_counter() - start
    communicator.barrier()
    return seconds, float(_bytes_sent() - before)


def _bytes_sent() -> int:
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "line":
            return int(counts.split()[8])
    raise SystemExit("This namespace has no interface called line.")


def _print_table(rows: list[dict[str, float]], *, limited: bool) -> None:
    print(f"\nfloat32 allreduce over TCP, 2 hosts, {'1 Gbit/s' if limited else 'unlimited'}: ms\n")
    print(
        f"{'bytes':>10} {'ours':>9} {'Gloo':>9} {'speed-up':>9} {'sent/min':>11} {'Gloo':>6} {'link use':>10} {'n':>4}"
    )
    for row in rows:
        # Each of N ranks must send at least 2 (N - 1) / N times the size of the array: its size, with two ranks.
        utilization = row["size"] * 8 / LINK_BITS / row["ours"]
        cells = [f"{row['size']:>10.0f} {row['ours'] * 1e3:>9.2f} {row['gloo'] * 1e3:>9.2f}"]
        cells.append(f"{row['gloo'] / row['ours']:>9.2f} {row['ours wire'] / row['size']:>11.3f}")
        cells.append(f"{row['gloo wire'] / row['size']:>6.3f} {utilization if limited else float('nan'):>10.0%}")
        print(*cells, f"{row['repetitions']:>4.0f}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="approximate seconds of measurement per row")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--limited", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
