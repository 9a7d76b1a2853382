"""Compare the allreduce of sparkhvd with its peers between processes of this machine.

Each peer runs in processes of its own, because peers in one process would slow each other down, and is started as its
users start it. sparkhvd's engine (named, negotiated, asynchronous), its direct calls and physical_limit.c run in ranks
of ``sparkhvd.run``. The Gloo of torch.distributed runs in plain processes. Open MPI runs under mpirun, through mpi4py
and with the shared-memory transport. Each peer starts several times, in a random order per round. A figure is the
median over the turns of all rounds, and the time of a turn is that of the slowest rank. The program checks results
before it measures times.

    python -m bench.collectives [--ranks 2 4] [--seconds 3] [--largest MIB] [--rounds 3]
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
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import sparkhvd
from bench import machine

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
HALF_SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
LIMIT_CHUNKS = (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB)
MANY_TENSORS = 1000
CALLS_PER_TURN = 5
ROOT = Path(__file__).parents[1]

Operation = Callable[[], object]
Turns = dict[str, dict[str, list[float]]]  # by row, then by operation: seconds of the slowest rank
Medians = dict[str, float]
PEERS = ("sparkhvd", "gloo", "mpi")


@dataclass(frozen=True)
class Group:
    """The ranks of one peer.

    Attributes:
        rank: the rank of this process.
        size: the number of ranks.
        barrier: returns on all ranks at about the same time.
        slowest: returns the elementwise maximum of the ranks' values.
        reduce: takes a tensor and the seconds for a choice among settings; returns the operations that sum the tensor
            in place. With 0 seconds, there is only the default operation.
        reduce_many: returns the operations that sum many tensors at once.
        half_types: whether to measure float16 and bfloat16, too.
    """

    rank: int
    size: int
    barrier: Callable[[], object]
    slowest: Callable[[np.ndarray], np.ndarray]
    reduce: Callable[[torch.Tensor, float], dict[str, Operation]]
    reduce_many: Callable[[list[torch.Tensor]], dict[str, Operation]]
    half_types: bool = False


def main() -> None:
    arguments = _arguments()
    if arguments.peer:
        _peer_rank(arguments)
        return
    print(f"{machine.describe()}; torch {torch.__version__}")
    for ranks in arguments.ranks:
        largest = arguments.largest if ranks == 2 else min(arguments.largest, 64)
        _print_tables(ranks, _medians_of_rounds(ranks, arguments.seconds, largest, arguments.rounds))
    print(f"\nafterwards: {machine.load()}")


def _medians_of_rounds(ranks: int, seconds: float, largest: int, rounds: int) -> dict[str, Medians]:
    draw = random.Random(ranks)
    pooled: Turns = {}
    with tempfile.TemporaryDirectory() as folder:
        _build_limit(Path(folder))
        for number in range(rounds):
            for peer in draw.sample(PEERS, len(PEERS)):
                subfolder = Path(folder, f"{peer}-{number}")
                subfolder.mkdir()
                for row, operations in _launch(peer, ranks, seconds / rounds, largest, subfolder).items():
                    for name, turns in operations.items():
                        pooled.setdefault(row, {}).setdefault(name, []).extend(turns)
    return {
        row: {name: statistics.median(turns) for name, turns in operations.items()}
        for row, operations in pooled.items()
    }


def _launch(peer: str, ranks: int, seconds: float, largest: int, folder: Path) -> Turns:
    """Run the ranks of a peer and return their measurements."""
    if peer == "sparkhvd":
        return sparkhvd.run(_sparkhvd_rank, (str(folder), seconds, largest), num_proc=ranks, launcher="local")[0]
    command = [sys.executable, "-m", "bench.collectives", "--peer", peer, "--folder", str(folder)]
    command += ["--seconds", str(seconds), "--largest", str(largest), "--ranks", str(ranks)]
    if peer == "mpi":
        mpirun = [_mpirun(), "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)]
        subprocess.run([*mpirun, "--mca", "btl", "self,vader", "--mca", "pml", "ob1", *command], check=True, cwd=ROOT)
    else:
        _run_together([[*command, "--rank", str(rank)] for rank in range(ranks)])
    return json.loads((folder / "rows").read_text(encoding="utf-8"))


def _run_together(commands: list[list[str]]) -> None:
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    try:
        for process in processes:
            if process.wait():
                raise SystemExit(f"A rank ended with exit code {process.returncode}.")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _mpirun() -> str:
    path = shutil.which("mpirun")
    if path is None:
        raise SystemExit("mpirun, one of the peers, is not installed (Debian: openmpi-bin).")
    return path


def _build_limit(folder: Path) -> None:
    source = Path(__file__).with_name("physical_limit.c")
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(folder / "limit.so"), str(source)], check=True)


# The code of one rank.


def _sparkhvd_rank(folder: str, seconds: float, largest: int) -> Turns:
    import sparkhvd.torch as hvd  # noqa: PLC0415  (the other peers run without it)
    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    hvd.init()
    communicator, zero = session.current(), np.zeros(1, np.float32)
    limit = _open_limit(Path(folder), hvd.rank(), hvd.size(), hvd.barrier)

    def reduce(tensor: torch.Tensor, seconds: float) -> dict[str, Operation]:
        name = f"bench.{tensor.dtype}.{len(tensor)}"
        operations: dict[str, Operation] = {"engine": lambda: hvd.allreduce_(tensor, name=name, op=hvd.Sum)}
        if seconds:
            array = tensor.numpy()
            chunks = LIMIT_CHUNKS if tensor.nbytes > 64 * KIB else LIMIT_CHUNKS[:1]
            limits = {str(n): partial(limit.limit_allreduce, array.ctypes.data, len(array), n) for n in chunks}
            limit_turns = _turns(group, limits, seconds / 4, [tensor])
            operations["direct"] = lambda: communicator.allreduce_now(array, ReduceOp.SUM, out=array)
            operations["limit"] = limits[min(limit_turns, key=lambda chunk: statistics.median(limit_turns[chunk]))]
        return operations

    def reduce_many(tensors: list[torch.Tensor]) -> dict[str, Operation]:
        def engine() -> None:
            handles = [hvd.allreduce_async_(t, name=f"bench.many.{n}", op=hvd.Sum) for n, t in enumerate(tensors)]
            for handle in handles:
                handle.wait()

        return {"engine": engine}

    group = Group(
        hvd.rank(),
        hvd.size(),
        lambda: communicator.allreduce_now(zero, ReduceOp.SUM, out=zero),
        lambda values: communicator.allreduce(values, ReduceOp.MAX),
        reduce,
        reduce_many,
        half_types=True,
    )
    rows = _measured(group, seconds, largest * MIB)
    hvd.shutdown()
    return rows


def _peer_rank(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.folder)
    group = _mpi() if arguments.peer == "mpi" else _gloo(folder, arguments.rank, arguments.ranks[0])
    if group.size != arguments.ranks[0]:
        raise SystemExit(f"{arguments.peer} has {group.size} ranks, not {arguments.ranks[0]}; check its installation.")
    rows = _measured(group, arguments.seconds, arguments.largest * MIB)
    if group.rank == 0:
        (folder / "rows").write_text(json.dumps(rows), encoding="utf-8")
    group.barrier()
    if arguments.peer == "gloo":
        dist.destroy_process_group()


def _gloo(folder: Path, rank: int, size: int) -> Group:
    dist.init_process_group("gloo", f"file://{folder}/gloo", rank=rank, world_size=size)

    def slowest(values: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(values.copy())
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.numpy()

    def coalesced(tensors: list[torch.Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Gloo has no alternative to this deprecated function yet
            dist.all_reduce_coalesced(tensors)

    zero = torch.zeros(1)
    return Group(
        rank,
        size,
        lambda: dist.all_reduce(zero),
        slowest,
        lambda tensor, _: {"gloo": lambda: dist.all_reduce(tensor)},
        lambda tensors: {"gloo": lambda: coalesced(tensors)},
    )


def _mpi() -> Group:
    from mpi4py import MPI  # noqa: PLC0415  (only these ranks are under mpirun)

    world = MPI.COMM_WORLD

    def slowest(values: np.ndarray) -> np.ndarray:
        largest = values.copy()
        world.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
        return largest

    def reduce(tensor: torch.Tensor, _: float) -> dict[str, Operation]:
        array = tensor.numpy()
        return {"mpi": lambda: world.Allreduce(MPI.IN_PLACE, array)}

    return Group(world.rank, world.size, world.Barrier, slowest, reduce, lambda _: {})


def _open_limit(folder: Path, rank: int, size: int, barrier: Callable[[], object]) -> ctypes.CDLL:
    limit = ctypes.CDLL(str(folder.parent / "limit.so"))
    limit.limit_bytes.restype = ctypes.c_size_t
    limit.limit_allreduce.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    limit.limit_allreduce.restype = None
    with (folder / "memory").open("a+b") as file:
        os.ftruncate(file.fileno(), limit.limit_bytes(size))
        barrier()
        if limit.limit_open(file.fileno(), rank, size) != 0:
            raise SystemExit("physical_limit.c could not map its memory.")
    return limit


def _measured(group: Group, seconds: float, largest: int) -> Turns:
    torch.set_num_threads(1)
    rows: Turns = {}
    for size in (size for size in SIZES if size <= largest):
        tensor = torch.zeros(size // 4)
        rows[f"float32 {size}"] = _checked(group, group.reduce(tensor, seconds), seconds, [tensor])
    many = [torch.zeros(1024) for _ in range(MANY_TENSORS)]
    rows["many"] = _checked(group, group.reduce_many(many), seconds, many)
    if group.half_types:
        for size in (size for size in HALF_SIZES if size <= largest):
            rows[f"half {size}"] = _half_types(group, size, seconds)
    return rows


def _half_types(group: Group, size: int, seconds: float) -> dict[str, list[float]]:
    """Measure three types with the same number of elements; ``size`` is the number of bytes as float32."""
    types = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    tensors = {name: torch.zeros(size // 4, dtype=dtype) for name, dtype in types.items()}
    operations = {name: group.reduce(tensor, 0.0)["engine"] for name, tensor in tensors.items()}
    return _turns(group, operations, seconds, list(tensors.values()))


def _checked(
    group: Group, operations: dict[str, Operation], seconds: float, tensors: list[torch.Tensor]
) -> dict[str, list[float]]:
    for name, operation in operations.items():
        _check(group, name, operation, tensors)
    return _turns(group, operations, seconds, tensors) if operations else {}


def _check(group: Group, name: str, operation: Operation, tensors: list[torch.Tensor]) -> None:
    """Check the sum of integers, which is exact and differs between neighboring elements."""
    ranks = group.size
    for number, tensor in enumerate(tensors):
        tensor.copy_((torch.arange(len(tensor)) + number) % 1009 * (group.rank + 1))
    operation()
    for number, tensor in enumerate(tensors):
        expected = ((torch.arange(len(tensor)) + number) % 1009 * (ranks * (ranks + 1) // 2)).float()
        if not torch.equal(tensor, expected):
            raise SystemExit(f"{name} has a wrong result on rank {group.rank}.")


def _turns(
    group: Group, operations: dict[str, Operation], seconds: float, tensors: list[torch.Tensor]
) -> dict[str, list[float]]:
    """Return the mean seconds per call in every turn of each operation."""
    for tensor in tensors:
        tensor.zero_()  # sums of zeros stay finite
    seconds_per_round = sum(_turn(group, operation) for operation in operations.values()) * CALLS_PER_TURN
    repetitions = int(group.slowest(np.array([min(1000.0, max(7.0, seconds / seconds_per_round))]))[0])
    draw = random.Random(repetitions)  # the same order on all ranks
    turns: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(repetitions):
        for name in draw.sample(list(operations), len(operations)):
            turns[name].append(_turn(group, operations[name]))
    slowest = group.slowest(np.array(list(turns.values())))
    return {name: row.tolist() for name, row in zip(operations, slowest, strict=True)}


def _turn(group: Group, operation: Operation) -> float:
    """Return the mean seconds of several calls; all ranks enter each call at about the same time."""
    total = 0.0
    for _ in range(CALLS_PER_TURN):
        group.barrier()
        start = time.perf_counter()
        operation()
        total += time.perf_counter() - start
    return total / CALLS_PER_TURN


# The printed tables.


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
        f"\n{MANY_TENSORS} float32 tensors of 4 KiB: asynchronous engine {many['engine'] * 1e3:.1f} ms; "
        f"coalesced Gloo {many['gloo'] * 1e3:.1f} ms: {many['gloo'] / many['engine']:.2f}x"
    )
    print("\nengine, the same number of elements by type, us (speed relative to float32)\n")
    for name, row in rows.items():
        if name.startswith("half"):
            cells = "".join(
                f"{dtype:>10} {row[dtype] * 1e6:>9.1f} ({row['float32'] / row[dtype]:.2f})" for dtype in row
            )
            print(f"{int(name.split()[1]) // 4:>10}{cells}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes, with one table each"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate seconds of measurement per row")
    parser.add_argument("--largest", type=int, default=256, help="MiB of the largest array")
    parser.add_argument("--rounds", type=int, default=3, help="number of starts of each peer")
    for name, value_type in (("--peer", str), ("--folder", str), ("--rank", int)):  # passed to the ranks of a peer
        parser.add_argument(name, type=value_type, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
