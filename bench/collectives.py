"""Allreduce between processes of this machine: every peer in one run, in turns, on the same memory.

Ours through the engine (named, negotiated, asynchronous) and by direct calls, torch.distributed's Gloo, Open MPI
through mpi4py (shared-memory transport), and physical_limit.c. The ranks are started by mpirun and measure all peers in
the same processes; a figure is the median of repetitions, each the time of the slowest rank. In a repetition each peer
has one turn of a few calls, in an order drawn anew: how warm a peer finds the caches depends on whose turn was before.
Results are checked before anything is timed.

    python -m bench.collectives [--ranks 2 4] [--seconds 3] [--largest MIB]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import sparkhvd.torch as hvd
from bench import machine
from sparkhvd.comm import session
from sparkhvd.comm.buffers import ReduceOp

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
HALF_SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
LIMIT_CHUNKS = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB)
MANY = 1000
CALLS = 5  # of a turn
ROOT = Path(__file__).parents[1]

Operation = Callable[[], object]
Medians = dict[str, float]


@dataclass(frozen=True)
class Peers:
    """What this rank measures with; mpi and limit are absent where they are not installed."""

    mpi: object
    limit: ctypes.CDLL


def main() -> None:
    arguments = _arguments()
    if arguments.folder:
        _rank(Path(arguments.folder), arguments.seconds, arguments.largest * MIB)
        return
    print(f"{machine.describe()}; torch {torch.__version__}")
    for ranks in arguments.ranks:
        _print_tables(ranks, _launch(ranks, arguments.seconds, arguments.largest))
    print(f"\nafterwards: {machine.load()}")


def _launch(ranks: int, seconds: float, largest: int) -> dict[str, Medians]:
    """Run the ranks under mpirun and read what rank 0 has measured."""
    with tempfile.TemporaryDirectory() as folder:
        _build_limit(Path(folder))
        command = [
            *(_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)),
            *("--mca", "btl", "self,vader", "--mca", "pml", "ob1"),
            *(sys.executable, "-m", "bench.collectives", "--folder", folder),
            *("--seconds", str(seconds), "--largest", str(largest if ranks == 2 else min(largest, 64))),
        ]
        subprocess.run(command, check=True, cwd=ROOT)
        return json.loads((Path(folder) / "rows").read_text(encoding="utf-8"))


def _mpirun() -> str:
    found = shutil.which("mpirun")
    if found is None:
        raise SystemExit("mpirun is not installed (Debian: openmpi-bin); it starts the ranks and is one of the peers.")
    return found


def _build_limit(folder: Path) -> None:
    source = Path(__file__).with_name("physical_limit.c")
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(folder / "limit.so"), str(source)], check=True)
    (folder / "memory").touch()


# One rank.


def _rank(folder: Path, seconds: float, largest: int) -> None:
    from mpi4py import MPI  # noqa: PLC0415  only the ranks are under mpirun

    torch.set_num_threads(1)
    hvd.init()
    dist.init_process_group("gloo", f"file://{folder}/gloo", rank=hvd.rank(), world_size=hvd.size())
    peers = Peers(MPI, _open_limit(folder))
    rows: dict[str, Medians] = {}
    for size in SIZES:
        if size <= largest:
            rows[f"float32 {size}"] = _one_array(peers, size, seconds)
    rows["many"] = _many(seconds)
    for size in HALF_SIZES:
        if size <= largest:
            rows[f"half {size}"] = _half_types(size, seconds)
    if hvd.rank() == 0:
        (folder / "rows").write_text(json.dumps(rows), encoding="utf-8")
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


def _open_limit(folder: Path) -> ctypes.CDLL:
    limit = ctypes.CDLL(str(folder / "limit.so"))
    limit.limit_bytes.restype = ctypes.c_size_t
    limit.limit_allreduce.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    limit.limit_allreduce.restype = None
    with (folder / "memory").open("r+b") as file:
        os.ftruncate(file.fileno(), limit.limit_bytes(hvd.size()))
        hvd.barrier()
        if limit.limit_open(file.fileno(), hvd.rank(), hvd.size()) != 0:
            raise SystemExit("physical_limit.c could not map its memory")
    return limit


def _one_array(peers: Peers, size: int, seconds: float) -> Medians:
    array = np.zeros(size // 4, np.float32)
    tensor = torch.from_numpy(array)
    me = session.current()

    def limit(chunk: int) -> Operation:
        return lambda: peers.limit.limit_allreduce(array.ctypes.data, len(array), chunk)

    limits = {str(chunk): limit(chunk) for chunk in (LIMIT_CHUNKS if size > 64 * KIB else LIMIT_CHUNKS[:1])}
    alone = _medians(limits, seconds / 4, [tensor])
    operations: dict[str, Operation] = {
        "engine": lambda: hvd.allreduce_(tensor, name=f"bench.{size}", op=hvd.Sum),
        "direct": lambda: me.allreduce_now(array, ReduceOp.SUM, out=array),
        "gloo": lambda: dist.all_reduce(tensor),
        "mpi": lambda: peers.mpi.COMM_WORLD.Allreduce(peers.mpi.IN_PLACE, array),
        "limit": limits[min(alone, key=lambda chunk: alone[chunk])],
    }
    for name, operation in operations.items():
        _check(name, operation, [tensor])
    return _medians(operations, seconds, [tensor])


def _many(seconds: float) -> Medians:
    tensors = [torch.zeros(1024) for _ in range(MANY)]
    names = [f"bench.many.{index}" for index in range(MANY)]

    def engine() -> None:
        handles = [hvd.allreduce_async_(t, name=n, op=hvd.Sum) for t, n in zip(tensors, names, strict=True)]
        for handle in handles:
            handle.wait()

    def coalesced() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # there is nothing else for it on Gloo yet
            dist.all_reduce_coalesced(tensors)

    operations = {"engine": engine, "gloo": coalesced}
    for name, operation in operations.items():
        _check(name, operation, tensors)
    return _medians(operations, seconds, tensors)


def _half_types(size: int, seconds: float) -> Medians:
    """The same number of elements in three types; ``size`` is that of float32."""
    types = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    tensors = {name: torch.zeros(size // 4, dtype=dtype) for name, dtype in types.items()}

    def reduce(name: str) -> Operation:
        return lambda: hvd.allreduce_(tensors[name], name=f"bench.{name}.{size}", op=hvd.Sum)

    return _medians({name: reduce(name) for name in types}, seconds, list(tensors.values()))


def _check(name: str, operation: Operation, tensors: list[torch.Tensor]) -> None:
    """Whole numbers, whose sum is exact, different in every element."""
    ranks = hvd.size()
    for number, tensor in enumerate(tensors):
        tensor.copy_((torch.arange(len(tensor)) + number) % 1009 * (hvd.rank() + 1))
    operation()
    for number, tensor in enumerate(tensors):
        want = ((torch.arange(len(tensor)) + number) % 1009 * (ranks * (ranks + 1) // 2)).float()
        if not torch.equal(tensor, want):
            raise SystemExit(f"wrong result of {name} on rank {hvd.rank()}")


def _medians(operations: dict[str, Operation], seconds: float, tensors: list[torch.Tensor]) -> Medians:
    """Of the seconds of a call, over the turns of each operation."""
    for tensor in tensors:
        tensor.zero_()  # sums of zeros stay finite
    once = sum(_turn(operation) for operation in operations.values()) * CALLS
    repetitions = int(hvd.broadcast(torch.tensor(int(min(1000, max(7, seconds / once)))), 0).item())
    draw = random.Random(repetitions)  # the same order on all ranks
    turns: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(repetitions):
        for name in draw.sample(list(operations), len(operations)):
            turns[name].append(_turn(operations[name]))
    slowest = session.current().allreduce(np.array(list(turns.values())), ReduceOp.MAX)
    return {name: statistics.median(row) for name, row in zip(operations, slowest, strict=True)}


def _turn(operation: Operation) -> float:
    """Seconds of one of several calls, each of which all ranks enter at about the same time."""
    total = 0.0
    for _ in range(CALLS):
        session.current().allreduce_now(_NOTHING, ReduceOp.SUM, out=_NOTHING)
        start = time.perf_counter()
        operation()
        total += time.perf_counter() - start
    return total / CALLS


_NOTHING = np.zeros(1, np.float32)


# The tables.


def _print_tables(ranks: int, rows: dict[str, Medians]) -> None:
    peers = ("engine", "direct", "gloo", "mpi", "limit")
    print(f"\nfloat32 allreduce, sum, in place, {ranks} processes: us up to 64 KiB, GB/s above\n")
    ratios = "engine/limit  engine/MPI engine/Gloo  direct/MPI"
    print(f"{'bytes each':>12}" + "".join(f"{peer:>9}" for peer in peers) + f"   {ratios}   (speed)")
    for name, row in rows.items():
        if not name.startswith("float32"):
            continue
        size = int(name.split()[1])
        shown = [row[peer] * 1e6 if size <= 64 * KIB else size / row[peer] / 1e9 for peer in peers]
        ratio = [
            row[b] / row[a] for a, b in (("engine", "limit"), ("engine", "mpi"), ("engine", "gloo"), ("direct", "mpi"))
        ]
        print(
            f"{size:>12}"
            + "".join(f"{value:>9.{1 if size <= 64 * KIB else 2}f}" for value in shown)
            + "   "
            + "".join(f"{value:>12.2f}" for value in ratio)
        )
    many = rows["many"]
    print(
        f"\n{MANY} float32 tensors of 4 KiB: engine, async and waited for, {many['engine'] * 1e3:.1f} ms; "
        f"Gloo coalesced {many['gloo'] * 1e3:.1f} ms: {many['gloo'] / many['engine']:.2f}x"
    )
    print("\nengine, the same number of elements by type, us (speed beside float32)\n")
    for name, row in rows.items():
        if name.startswith("half"):
            cells = "".join(f"{kind:>10} {row[kind] * 1e6:>9.1f} ({row['float32'] / row[kind]:.2f})" for kind in row)
            print(f"{int(name.split()[1]) // 4:>10}{cells}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="how many processes; tables for each")
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long to measure for a row")
    parser.add_argument("--largest", type=int, default=256, help="MiB of the largest array")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a rank
    return parser.parse_args()


if __name__ == "__main__":
    main()
