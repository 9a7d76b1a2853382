"""Measure the data path from files to ranks and compare it with other readers of the same files.

Readers yield torch batches of 1,024 rows, except for the bare scan, which yields large batches. All readers take turns
on the same files, and each figure is the median of all turns except the first. The program stops with an error if the
bare scan or sparkhvd returns the wrong number of rows.

petastorm runs in a separate environment (created by ``tools/petastorm-venv build/petastorm``) that links to this
environment's torch.

    python -m bench.data [--turns 5] [--scale 1.0] [--petastorm PYTHON] [--parts readers memory spark]
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pyarrow as pa
import torch
from pyarrow import parquet

from sparkhvd import Store
from sparkhvd.config import given_rows
from sparkhvd.data import torch_loader
from sparkhvd.data.prepare.direct_rows import TaskRows, checked, partition_for_ranks
from sparkhvd.data.prepare.prepared_data import prepare_data
from sparkhvd.data.read.readers import PREFETCH_BYTES, ReadOptions
from sparkhvd.data.schema.selection import select
from sparkhvd.driver.run import run
from sparkhvd.world import World

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH = 1024
FILES = 8
EPOCHS = 20
PETASTORM = Path("build/petastorm/bin/python")
_PETASTORM = """
import sys, time, torch
from petastorm import make_batch_reader
from petastorm.pytorch import BatchedDataLoader
url, batch, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# Endless epochs and a fixed number of steps, because with one epoch the reader's thread pool can lose all rows.
with make_batch_reader(url, num_epochs=None, shuffle_row_groups=False, reader_pool_type="thread") as reader:
    batches = iter(BatchedDataLoader(reader, batch_size=batch))
    next(batches)
    started = time.perf_counter()
    rows = sum(len(next(iter(next(batches).values()))) for _ in range(steps))
    print("speed", rows / (time.perf_counter() - started))
"""


@dataclass(frozen=True)
class Table:
    """A table in Parquet files.

    Attributes:
        name: the number and type of the columns, as printed.
        folder: the folder of the files.
        rows: the number of rows.
    """

    name: str
    folder: Path
    rows: int


def main() -> None:
    options = _options()
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory(prefix="sparkhvd-bench-") as folder:
        tables = [
            _columns(Path(folder) / "columns", int(500_000 * options.scale)),
            _arrays(Path(folder) / "arrays", int(100_000 * options.scale)),
        ]
        if "readers" in options.parts:
            for table in tables:
                measure_readers(table, options)
        if "memory" in options.parts:
            measure_memory(tables[0])
        if "spark" in options.parts:
            measure_spark(Path(folder), int(1_000_000 * options.scale), options.turns)


def measure_readers(table: Table, options: argparse.Namespace) -> None:
    """Measure how many rows per second each reader reads from a table."""
    contenders: dict[str, Callable[[], float]] = {
        "bare scan": lambda: _timed(table, _bare_scan),
        "ours": lambda: _timed(table, lambda table: _ours(table, shuffle=False)),
        "ours, shuffled": lambda: _timed(table, lambda table: _ours(table, shuffle=True)),
    }
    if options.petastorm is not None:
        contenders["petastorm"] = lambda: _petastorm(table, options.petastorm)
    medians = _in_turns(contenders, options.turns)
    print(f"\n{table.name}, {table.rows:,} rows: rows per second")
    for contender, speed in medians.items():
        print(f"  {contender:<16}{speed:>14,.0f}")
    print(f"  ours : bare scan          {medians['ours'] / medians['bare scan']:.2f}   (target: at least 0.8)")
    print(f"  shuffled : unshuffled     {medians['ours, shuffled'] / medians['ours']:.2f}   (target: at least 0.7)")
    if "petastorm" in medians:
        target = 1.2 if "columns" in table.name else 1.5
        print(f"  ours : petastorm          {medians['ours'] / medians['petastorm']:.2f}   (target: at least {target})")
    else:
        print("  ours : petastorm          skipped: pass --petastorm with a Python that has petastorm")


def measure_memory(table: Table) -> None:
    """Measure a rank's anonymous memory over many epochs, which excludes the kernel's page cache.

    Also print the resident memory, measured before the garbage collection. It includes mapped pages of files.
    """
    loader = torch_loader(str(table.folder), BATCH, seed=1)
    next(iter(loader))  # the first batch imports modules and starts thread pools
    before, peak, after, resident = _memory_bytes(), 0, [], []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for step, _ in enumerate(loader):
            if step % 20 == 0:
                peak = max(peak, _memory_bytes())
        resident.append(_memory_bytes("VmRSS"))
        gc.collect()
        pa.default_memory_pool().release_unused()
        after.append(_memory_bytes())
    growth = max(after[2:]) / after[1] - 1
    print(f"\nmemory over {EPOCHS} epochs of {table.name}, shuffled")
    print(f"  after each epoch, MiB     {' '.join(f'{size / 2**20:.0f}' for size in after)}")
    print(f"  resident in all, MiB      {' '.join(f'{size / 2**20:.0f}' for size in resident)}")
    print(f"  growth after the second   {growth:.1%}   (target: at most 5 %)")
    print(f"  peak above the start      {(peak - before) / 2**20:.0f} MiB, stated {PREFETCH_BYTES / 2**20:.0f} MiB")


def measure_spark(folder: Path, rows: int, turns: int) -> None:
    """Compare ``prepare_data`` and the direct path with Spark's own write of the same DataFrame."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.memory", "2g").config("spark.local.dir", str(folder / "spark"))
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR").getOrCreate()
    try:
        df = _rows_for_spark(spark, folder, rows)
        medians = _in_turns(
            {
                "df.write.parquet": lambda: _write(df, folder / "written"),
                "prepare_data": lambda: _prepare(df, folder / "store"),
                "direct path": lambda: _direct(spark, df),
            },
            turns,
        )
    finally:
        spark.stop()
    print(f"\n{rows:,} rows x 30 columns through Spark: seconds")
    for contender, seconds in medians.items():
        print(f"  {contender:<20}{seconds:>8.2f}")
    written = medians["df.write.parquet"]
    print(f"  prepare_data : write      {medians['prepare_data'] / written:.2f}   (target: at most 1.15)")
    print(f"  direct : write            {medians['direct path'] / written:.2f}   (target: at most 2)")


def _in_turns(contenders: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Run the contenders in turn and return the median of each; the first turn is a warm-up and does not count."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, contender in contenders.items():
            value = contender()
            if turn:
                values[name].append(value)
    return {name: statistics.median(numbers) for name, numbers in values.items()}


def _timed(table: Table, read: Callable[[Table], int]) -> float:
    started = time.perf_counter()
    rows = read(table)
    seconds = time.perf_counter() - started
    if rows != table.rows:
        raise RuntimeError(f"The reader returned {rows} rows instead of {table.rows}.")
    return rows / seconds


def _bare_scan(table: Table) -> int:
    """Read large batches with Arrow's own threads and one tensor per column; return the number of rows."""
    rows = 0
    for path in sorted(table.folder.glob("*.parquet")):
        for batch in parquet.ParquetFile(path, memory_map=True).iter_batches(65536):
            tensors = [_tensor(column) for column in batch.columns]
            rows += len(tensors[0])
    return rows


def _tensor(column: pa.Array) -> torch.Tensor:
    if pa.types.is_list(column.type):
        return torch.from_numpy(np.array(column.flatten()).reshape(len(column), -1))
    return torch.from_numpy(np.array(column))


def _ours(table: Table, *, shuffle: bool) -> int:
    rows = 0
    for batch in torch_loader(str(table.folder), BATCH, shuffle=shuffle):
        rows += len(next(iter(batch.values())))
    return rows


def _petastorm(table: Table, python: str) -> float:
    command = [python, "-c", _PETASTORM, f"file://{table.folder}", str(BATCH), str(table.rows // BATCH - 1)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"petastorm failed:\n{result.stderr[-2000:]}")
    return float(next(line for line in result.stdout.splitlines() if line.startswith("speed")).split()[1])


def _memory_bytes(kind: str = "RssAnon") -> int:
    status = Path(f"/proc/{psutil.Process().pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(kind)).split()[1]) * 1024


def _columns(folder: Path, rows: int) -> Table:
    random = np.random.default_rng(1)

    def content(count: int) -> pa.Table:
        return pa.table({f"c{index}": random.random(count, np.float32) for index in range(30)})

    return _write_table("30 float columns", folder, rows, content)


def _arrays(folder: Path, rows: int) -> Table:
    random = np.random.default_rng(2)

    def content(count: int) -> pa.Table:
        values = pa.array(random.random(count * 784, np.float32))
        offsets = pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(784))
        return pa.table({"pixels": pa.ListArray.from_arrays(offsets, values)})

    return _write_table("array<float>[784]", folder, rows, content)


def _write_table(name: str, folder: Path, rows: int, content: Callable[[int], pa.Table]) -> Table:
    """Write files with the settings of ``prepare_data``: row groups of about 8 MB, snappy, no dictionaries."""
    folder.mkdir()
    for number in range(FILES):
        table = content(rows // FILES)
        group = max(1, int(8e6 * table.num_rows / table.nbytes))
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=group, use_dictionary=False)
    return Table(name, folder, rows // FILES * FILES)


def _rows_for_spark(spark: SparkSession, folder: Path, rows: int) -> DataFrame:
    from pyspark.sql import functions  # noqa: PLC0415

    columns = [functions.rand(index).cast("float").alias(f"c{index}") for index in range(30)]
    spark.range(rows, numPartitions=4).select(*columns).write.parquet(str(folder / "source"))
    return spark.read.parquet(str(folder / "source"))


def _write(df: DataFrame, folder: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    df.write.parquet(str(folder))
    return time.perf_counter() - started


def _prepare(df: DataFrame, folder: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    store = Store.create(str(folder))
    started = time.perf_counter()
    with prepare_data(2, store, df, df.columns[:1], df.columns[1:]) as data:
        seconds = time.perf_counter() - started
        if data.reused:
            raise RuntimeError("prepare_data reused earlier rows instead of writing them.")
    return seconds


def _direct(spark: SparkSession, df: DataFrame) -> float:
    """Return the seconds until every rank has its first batch, including the start of the job."""
    selection = select(df.schema, feature_cols=df.columns[1:], label_cols=df.columns[:1])
    started = time.time()
    rows = partition_for_ranks(df, selection, num_proc=2, seed=1)
    arrived = run(
        _first_batch, (selection,), num_proc=2, spark=spark, rows=rows, preload=[partition_for_ranks.__module__]
    )
    return max(arrived) - started


def _first_batch(selection: object) -> float:
    """Read this rank's first batch and return the time after it."""
    task_rows = TaskRows(given_rows(), selection, 0)  # type: ignore[arg-type]
    facts = task_rows.facts()
    schema = checked(facts, selection, 1)  # type: ignore[arg-type]
    source = task_rows.source(
        "train", schema, facts, World(), BATCH, seed=1, shuffle=True, steps_per_epoch=None, reading=ReadOptions()
    )
    with closing(source.epoch(0)) as batches:  # type: ignore[type-var]
        next(batches)
    return time.time()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of rows")
    built = str(PETASTORM) if PETASTORM.exists() else None
    parser.add_argument("--petastorm", default=built, help="path of a Python with petastorm")
    parser.add_argument("--parts", nargs="+", default=["readers", "memory", "spark"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
