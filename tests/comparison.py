"""Compare random mixtures of all collectives with NumPy, with threads as ranks.

Every rank draws the same rounds from one seed, including the contributions of all ranks, so each rank knows its
expected results. Values are integers so small that sums and products are exact in every type.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousServer
from sparkhvd.comm.handle import Handle
from sparkhvd.comm.process_sets import ProcessSet
from sparkhvd.config import Config
from sparkhvd.world import layout

FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64", *FLOATS)
OPS = (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
SCALES = (1.0, 1.0, 0.5, -2.0)
NAMES = 24  # more than the capacity of the ranks' cache
CACHE = 8


def numpy_type(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


@dataclass(frozen=True)
class Check:
    """One submitted operation and the check of its result."""

    what: str
    handle: Handle[Any]
    want: Callable[[Any], str]  # returns an empty string if the result is right


def _equal(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], tolerance: float = 0.0) -> str:
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    wide, right = got.astype(np.float64), want.astype(np.float64)
    if np.all(np.abs(wide - right) <= tolerance * np.abs(right)):
        return ""
    return f"{got!r} instead of {want!r}"


class Player:
    """One rank's part in the rounds."""

    def __init__(self, communicator: Communicator, sets: Sequence[ProcessSet], seed: int) -> None:
        self._communicator = communicator
        self._sets = [None, *sets]
        self._draw = random.Random(seed)
        self._numbers = np.random.default_rng(seed)
        self._own = random.Random(f"{seed}/{communicator.world.rank}")
        self.results = 0

    def play(self) -> list[str]:
        """Play one round and return the mistakes in its results."""
        checks: list[Check] = []
        names = self._draw.sample(range(NAMES), self._draw.randint(1, 10))
        drawn = [self._operation(f"tensor {name}") for name in names]
        mine = [submit for submit in drawn if submit is not None]
        self._own.shuffle(mine)  # ranks submit in different orders
        for submit in mine:
            checks += submit()
        self._own.shuffle(checks)
        wrong = [f"{check.what}: {message}" for check in checks if (message := check.want(check.handle.wait()))]
        self.results += len(checks)
        if self._draw.random() < 0.15:
            wrong += self._join()
        return wrong

    def _operation(self, name: str) -> Callable[[], list[Check]] | None:
        chosen = self._draw.choice(self._sets)
        ranks = list(range(self._communicator.world.size)) if chosen is None else list(chosen.ranks)
        kinds = (self._reduce, self._reduce, self._reduce, self._gather, self._spread, self._exchange, self._scatter)
        submit = self._draw.choice(kinds)(name, chosen, ranks)
        return submit if self._communicator.world.rank in ranks else None

    def _contributions(self, dtype: str, shape: tuple[int, ...], count: int) -> list[np.ndarray[Any, Any]]:
        low, high = (0, 2) if dtype == "bool" else (0, 3) if dtype.startswith("u") else (-2, 3)
        return [self._numbers.integers(low, high, shape).astype(numpy_type(dtype)) for _ in range(count)]

    def _shape(self) -> tuple[int, ...]:
        fixed = [(), (0,), (1,), (7,), (1009,), (20_011,), (64, 129), (3, 0, 2), (5, 4, 3)]
        return self._draw.choice(fixed)

    def _reduced(
        self, arrays: Sequence[np.ndarray[Any, Any]], dtype: str, op: ReduceOp, before: Sequence[float], after: float
    ) -> tuple[np.ndarray[Any, Any], float]:
        stacked = np.stack(arrays).astype(np.float64)
        if dtype == "bool":
            total = stacked.max(axis=0) if op in {ReduceOp.SUM, ReduceOp.MAX} else stacked.min(axis=0)
            return total.astype(bool), 0.0
        stacked *= np.reshape(before, (-1, *[1] * (stacked.ndim - 1)))
        makers = {"sum": stacked.sum, "average": stacked.mean, "min": stacked.min, "max": stacked.max}
        total = makers.get(str(op), stacked.prod)(axis=0)
        total = total * after if dtype in FLOATS else np.trunc(total)
        rounded = dtype in FLOATS and op is ReduceOp.AVERAGE  # the only results that need rounding
        return total.astype(numpy_type(dtype)), 2 * float(ml_dtypes.finfo(numpy_type(dtype)).eps) if rounded else 0.0

    def _reduce(self, name: str, chosen: ProcessSet | None, ranks: list[int]) -> Callable[[], list[Check]]:
        if self._draw.random() < 0.15:
            return self._adasum(name, chosen, ranks)
        dtype = self._draw.choice(DTYPES)
        op = self._draw.choice([one for one in OPS if dtype != "bool" or one is not ReduceOp.AVERAGE])
        count = self._draw.choice([1, 1, 1, 2, 5])
        shapes = [self._shape() for _ in range(count)]
        contributions = [self._contributions(dtype, shape, len(ranks)) for shape in shapes]
        before = [self._draw.choice(SCALES) if dtype in FLOATS else 1.0 for _ in ranks]
        after = self._draw.choice(SCALES) if dtype in FLOATS else 1.0
        wants = [self._reduced(arrays, dtype, op, before, after) for arrays in contributions]

        def submit() -> list[Check]:
            own_index = ranks.index(self._communicator.world.rank)
            scales = {"prescale": before[own_index], "postscale": after}
            what = f"{name} {op} {dtype} {shapes} {scales} of {ranks}"
            mine = [arrays[own_index] for arrays in contributions]
            if count == 1:
                out = mine[0].copy() if self._own.random() < 0.3 else None  # in place
                source = mine[0] if out is None else out
                handle = self._communicator.allreduce_async(
                    source, op, out=out, name=name, process_set=chosen, **scales
                )
                return [Check(what, handle, lambda got: _equal(got, *wants[0]))]
            grouped = self._communicator.grouped_allreduce_async(mine, op, name=name, process_set=chosen, **scales)
            return [Check(what, grouped, lambda got: "".join(map(lambda g, w: _equal(g, *w), got, wants)))]

        return submit

    def _adasum(self, name: str, chosen: ProcessSet | None, ranks: list[int]) -> Callable[[], list[Check]]:
        """Draw equal or orthogonal tensors: Adasum returns the mean of equal ones and the sum of orthogonal ones."""
        dtype = self._draw.choice(FLOATS)
        length = len(ranks) * self._draw.choice([1, 3, 500])
        equal = self._draw.random() < 0.5
        common = self._contributions(dtype, (length,), 1)[0]

        def submit() -> list[Check]:
            mine = common
            if not equal:
                mine = common * (np.arange(length) % len(ranks) == ranks.index(self._communicator.world.rank))
            handle = self._communicator.allreduce_async(
                mine.astype(common.dtype), ReduceOp.ADASUM, name=name, process_set=chosen
            )
            tolerance = 16 * float(ml_dtypes.finfo(common.dtype).eps)
            what = f"{name} adasum {dtype} {length} {'equal' if equal else 'orthogonal'} of {ranks}"
            return [Check(what, handle, lambda got: _equal(got, common, tolerance))]

        return submit

    def _rows(self, ranks: list[int], dtype: str) -> tuple[list[int], list[np.ndarray[Any, Any]]]:
        width = self._draw.choice([(), (1,), (3,), (2, 5)])
        rows = [self._draw.choice([0, 1, 2, 5, 700]) for _ in ranks]
        return rows, [self._contributions(dtype, (count, *width), 1)[0] for count in rows]

    def _gather(self, name: str, chosen: ProcessSet | None, ranks: list[int]) -> Callable[[], list[Check]]:
        dtype = self._draw.choice(DTYPES)
        _, arrays = self._rows(ranks, dtype)
        _, others = self._rows(ranks, dtype)
        want, second = np.concatenate(arrays), np.concatenate(others)
        grouped = self._draw.random() < 0.3

        def submit() -> list[Check]:
            own_index = ranks.index(self._communicator.world.rank)
            what = f"{name} allgather {dtype} {[array.shape for array in arrays]} of {ranks}"
            if not grouped:
                handle = self._communicator.allgather_async(arrays[own_index], name=name, process_set=chosen)
                return [Check(what, handle, lambda got: _equal(got, want))]
            pair = self._communicator.grouped_allgather_async(
                [arrays[own_index], others[own_index]], name=name, process_set=chosen
            )
            return [Check(what, pair, lambda got: _equal(got[0], want) + _equal(got[1], second))]

        return submit

    def _spread(self, name: str, chosen: ProcessSet | None, ranks: list[int]) -> Callable[[], list[Check]]:
        dtype, shape, root = self._draw.choice(DTYPES), self._shape(), self._draw.choice(ranks)
        arrays = self._contributions(dtype, shape, len(ranks))

        def submit() -> list[Check]:
            mine = arrays[ranks.index(self._communicator.world.rank)]
            handle = self._communicator.broadcast_async(mine, root, name=name, process_set=chosen)
            what = f"{name} broadcast {dtype} {shape} from {root} of {ranks}"
            return [Check(what, handle, lambda got: _equal(got, arrays[ranks.index(root)]))]

        return submit

    def _exchange(self, name: str, chosen: ProcessSet | None, ranks: list[int]) -> Callable[[], list[Check]]:
        dtype, width = self._draw.choice(DTYPES), self._draw.choice([(), (3,)])
        splits = [[self._draw.choice([0, 1, 4, 90]) for _ in ranks] for _ in ranks]
        arrays = [self._contributions(dtype, (sum(row), *width), 1)[0] for row in splits]

        def submit() -> list[Check]:
            own_index = ranks.index(self._communicator.world.rank)
            handle = self._communicator.alltoall_async(
                arrays[own_index], splits[own_index], name=name, process_set=chosen
            )
            starts = [sum(row[:own_index]) for row in splits]
            parts = [array[at : at + row[own_index]] for array, at, row in zip(arrays, starts, splits, strict=True)]
            want, rows = np.concatenate(parts), tuple(row[own_index] for row in splits)

            def judge(got: tuple[np.ndarray[Any, Any], Sequence[int]]) -> str:
                return _equal(got[0], want) or ("" if tuple(got[1]) == rows else f"rows {got[1]} instead of {rows}")

            return [Check(f"{name} alltoall {dtype} {splits} of {ranks}", handle, judge)]

        return submit

    def _scatter(self, name: str, chosen: ProcessSet | None, ranks: list[int]) -> Callable[[], list[Check]]:
        dtype = self._draw.choice(DTYPES)
        op = self._draw.choice([one for one in OPS if dtype != "bool" or one is not ReduceOp.AVERAGE])
        shape = (self._draw.choice([0, 1, 5, 6, 1000]), *self._draw.choice([(), (4,)]))
        arrays = self._contributions(dtype, shape, len(ranks))
        whole, tolerance = self._reduced(arrays, dtype, op, [1.0] * len(ranks), 1.0)

        def submit() -> list[Check]:
            own_index = ranks.index(self._communicator.world.rank)
            handle = self._communicator.reducescatter_async(arrays[own_index], op, name=name, process_set=chosen)
            least, more = divmod(shape[0], len(ranks))
            begin = own_index * least + min(own_index, more)
            want = whole[begin : begin + least + (own_index < more)]
            what = f"{name} reducescatter {op} {dtype} {shape} of {ranks}"
            return [Check(what, handle, lambda got: _equal(got, want, tolerance))]

        return submit

    def _join(self) -> list[str]:
        """Let ranks run out of steps: joined ranks contribute nothing and still count in averages."""
        size, rank = self._communicator.world.size, self._communicator.world.rank
        steps = [self._draw.randint(0, 3) for _ in range(size)]
        wrong = []
        for step in range(steps[rank]):
            there = [one for one in range(size) if steps[one] > step]
            name = f"tensor {step}"
            mean = self._communicator.allreduce(np.full(5, 6.0, np.float32), name=name)
            wrong.append(_equal(mean, np.full(5, 6.0 * len(there) / size, np.float32), 1e-6))
            low = self._communicator.allreduce(np.array([rank]), ReduceOp.MIN, name=f"{name} low")
            wrong.append(_equal(low, np.array([there[0]])))
            rows = self._communicator.allgather(np.array([rank]), name=f"{name} rows")
            wrong.append(_equal(rows, np.array(there)))
        last = self._communicator.join()
        if steps[last] != max(steps):
            wrong.append(f"rank {last} is reported as the last to join of {steps}")
        self.results += 3 * steps[rank] + 1
        return [f"join {steps}: {message}" for message in wrong if message]


def compare(hosts: tuple[str, ...], seed: int, seconds: float, **settings: Any) -> tuple[int, list[str]]:
    """Play rounds on one rank per entry of ``hosts`` for this long; return the number of results and the mistakes."""
    found, wrong = _on_threads(hosts, lambda communicator: _play(communicator, seed, seconds), **settings)
    return found, [f"seed {seed}, {message}" for message in wrong]


def compare_large(hosts: tuple[str, ...]) -> tuple[int, list[str]]:
    """Compare operations of more than 2 GiB; two ranks take 9 GiB of memory."""
    return _on_threads(hosts, _use_large_arrays, collective_timeout=600.0)


def _use_large_arrays(communicator: Communicator) -> tuple[int, list[str]]:
    rank, size = communicator.world.rank, communicator.world.size
    wrong = []

    def judge(what: str, array: np.ndarray[Any, Any], factor: float) -> None:
        for first, part, expected in _parts_and_residues(array):
            if not np.array_equal(part, (expected * factor).astype(part.dtype)):
                wrong.append(f"{what}: elements from {first} on")
                return

    def residues(count: int, dtype: type, begin: int = 0) -> np.ndarray[Any, Any]:
        array = np.empty(count, dtype)
        for _, part, expected in _parts_and_residues(array, begin):
            part[:] = expected
        return array

    array = residues((1 << 29) + 3, np.float32)
    communicator.allreduce(array, ReduceOp.SUM, out=array)
    judge("allreduce", array, size)
    array *= 1 + rank
    array = communicator.broadcast(array, 0)
    judge("broadcast", array, size)
    del array
    share = (1 << 31) // size + 1
    judge("allgather", communicator.allgather(residues(share, np.uint8, rank * share)), 1)
    return 3, wrong


def _parts_and_residues(
    array: np.ndarray[Any, Any], begin: int = 0
) -> Iterator[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Yield the start of each part of an array, the part, and the residues modulo 251 of its indices.

    The indices count from ``begin``. The parts bound the memory that is needed besides the array.
    """
    step = 1 << 24
    for first in range(0, len(array), step):
        part = array[first : first + step]
        yield first, part, np.arange(begin + first, begin + first + len(part)) % 251


def _on_threads(
    hosts: tuple[str, ...], play: Callable[[Communicator], tuple[int, list[str]]], **settings: Any
) -> tuple[int, list[str]]:
    size = len(hosts)
    results: list[tuple[int, list[str]]] = [(0, ["did not end"])] * size
    config = Config(**{"cache_capacity": CACHE, "collective_timeout": 60.0} | settings)
    token = secrets.token_bytes(16)
    with RendezvousServer(token, encrypt=config.encrypt) as server:
        worlds = layout(hosts)

        def run_rank(rank: int) -> None:
            address = (("127.0.0.1", server.port),)
            context = LaunchContext(worlds[rank], address, token, host_key=hosts[rank], config=config)
            try:
                with Communicator(context) as communicator:
                    results[rank] = play(communicator)
            except Exception as error:  # noqa: BLE001 - the result reports it
                results[rank] = (0, [f"{type(error).__name__}: {error}"])

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    wrong = [f"{hosts}, rank {rank}: {message}" for rank, (_, all_) in enumerate(results) for message in all_]
    return sum(count for count, _ in results), wrong


def _play(communicator: Communicator, seed: int, seconds: float) -> tuple[int, list[str]]:
    draw = random.Random(seed)
    size = communicator.world.size
    chosen = {tuple(sorted(draw.sample(range(size), draw.randint(1, size)))) for _ in range(3)}
    sets = [communicator.add_process_set(list(ranks)) for ranks in sorted(chosen) if len(ranks) < size]
    player = Player(communicator, sets, seed)
    wrong: list[str] = []
    began = time.monotonic()
    while communicator.broadcast(np.array([time.monotonic() - began < seconds]), 0, name="another round")[0]:
        wrong += player.play()
    return player.results, wrong
