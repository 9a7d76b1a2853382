"""Test endurance: a hundred kills, a thousand cycles of init and shutdown, unauthenticated clients, and fuzzing.

Further parts are every row of the launchers' fault matrix, elastic jobs and fits with random losses and joins, a model
above 2 GB, random collectives, all cases of the collectives under ThreadSanitizer, property tests with new examples,
tests with the mark ``soak``, the wheels in empty environments, and the tests with other versions of Python, Spark and
all packages.

The program writes a report to ``bench/results/soak.txt``. ``make soak`` runs all parts.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TextIO
from unittest import mock

from pyspark.sql import SparkSession

from tests.comparison import compare, compare_large
from tests.endurance import connect_repeatedly, connect_two_ranks_repeatedly, kill_random_rank, unauthenticated_clients
from tests.launch import elastic_chaos, elastic_faults, sshd
from tests.launch.elastic_faults import ELASTIC_FAULTS, LIMIT_SECONDS, NUM_PROC
from tests.launch.faults import CUT_OFF_FAULTS, FAULTS, PORT_FAULTS, complaints, inject, ports_taken
from tests.launch.hosts import why_not
from tests.launch.losses import DRIVER_FAULTS, EXECUTOR_FAULTS, lost_driver, lost_executors
from tests.mpi import faults as mpi
from tests.ranks import RankGroup
from tests.scripts import results_of, run_script

_ROOT = Path(__file__).parents[1]
_DECODERS = 14  # the number of tests in the suite Fuzz
_MEGABYTE = 1 << 20
_TABLES = (FAULTS, mpi.MPI_FAULTS, PORT_FAULTS, EXECUTOR_FAULTS, DRIVER_FAULTS, CUT_OFF_FAULTS)
_PARTS = (
    "kills",
    "cycles",
    "faults",
    "elastic",
    "large",
    "random",
    "fuzz",
    "races",
    "properties",
    "repeats",
    "packages",
    "versions",
)
_FAILURE = re.compile("NOT NAMED|FAILED")
_VERDICT = re.compile(r"\d (passed|failed|errors?)\b.* in \d|: skipped, ")  # of pytest or tools/test-matrix
_LIMITS = {fault.name: fault.seconds for table in _TABLES for fault in table}
_LIMITS |= {fault.name: LIMIT_SECONDS for fault in ELASTIC_FAULTS}


def kills(count: int) -> Iterator[str]:
    """Kill a random rank at a random moment, repeatedly."""
    found = [kill_random_rank(2 + number % 3, shared_memory=number % 2 == 0) for number in range(count)]
    odd = [kill for kill in found if not kill.is_as_expected()]
    seconds = [kill.seconds for kill in found]
    verdict = "every other rank named it" if not odd else f"NOT NAMED in {len(odd)}: {odd[:3]}"
    yield (
        f"kill -9 of a random rank at a random moment, {count} times (2 to 4 ranks, memory and sockets in turn):\n"
        f"  {verdict}; the others had ended after {statistics.median(seconds):.2f} s (median), "
        f"{max(seconds):.2f} s (longest);\n  no process and no shared memory was left"
    )


def connect_and_leave(count: int) -> Iterator[str]:
    """Connect and leave repeatedly, then for a tenth of the cycles while unauthenticated clients connect."""
    lines = [f"init, allreduce, shutdown on 2 ranks, {count} times: after a tenth -> at the end"]
    for rank, (early, late) in enumerate(connect_two_ranks_repeatedly(count)):
        growth = (late[2] - early[2]) / _MEGABYTE
        lines.append(
            f"  rank {rank}: descriptors {early[0]} -> {late[0]}, threads {early[1]} -> {late[1]}, "
            f"memory {early[2] / _MEGABYTE:.1f} MiB {growth:+.1f}"
        )
    with RankGroup(2, connect=False) as group, unauthenticated_clients(group.pids(), group.port) as counts:
        group.run(connect_repeatedly, count // 10, seconds=600.0)
    lines.append(f"the same {count // 10} times while unauthenticated clients connect: {counts}")
    yield "\n".join(lines)


def comparison(minutes: float) -> Iterator[str]:
    """Compare random sequences of collectives with NumPy, with new ranks and hosts each time; then large arrays."""
    draw = random.Random()
    results, layouts, wrong = 0, 0, []
    until = time.monotonic() + minutes * 60
    while time.monotonic() < until:
        hosts = tuple(draw.choices("abc", k=draw.randint(1, 6)))
        settings = {"encrypt": draw.random() < 0.2, "shared_memory": draw.random() < 0.8}
        found, odd = compare(hosts, draw.randrange(1 << 30), 10.0, **settings)
        results, layouts, wrong = results + found, layouts + 1, wrong + odd
    for hosts in (("a", "a"), ("a", "b")):
        found, odd = compare_large(hosts)
        results, wrong = results + found, wrong + odd
    verdict = "all right" if not wrong else f"FAILED: {len(wrong)} wrong: {wrong[:3]}"
    yield f"{results} results of random collectives over {layouts} layouts, and of more than 2 GiB: {verdict}"


def fuzzing(minutes: float) -> Iterator[str]:
    """Fuzz every decoder of data from the wire, under AddressSanitizer."""
    program = _ROOT / "build" / "asan" / "scheduler_test"
    seconds = minutes * 60 / _DECODERS
    ended = subprocess.run(
        [program, "--gtest_filter=Fuzz.*"],
        env=os.environ | {"SPARKHVD_FUZZ_SECONDS": f"{seconds:.0f}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=minutes * 60 + 600,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith(("[       OK ]", "[  FAILED  ]"))]
    verdict = "passed" if ended.returncode == 0 else f"FAILED:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    yield f"fuzzing of the decoders for {minutes:g} minutes under AddressSanitizer: {verdict}\n" + "\n".join(
        f"  {line[13:]}" for line in lines
    )


def races() -> Iterator[str]:
    """Run all cases of the collectives and of the autotuner under ThreadSanitizer; `make check` runs some of them."""
    lines, odd = [], []
    for layer, tests in (("collectives", "*"), ("scheduler", "Layouts/Autotuning.*")):
        program = _ROOT / "build" / "tsan" / f"{layer}_test"
        ended = subprocess.run(
            ["setarch", "-R", program, f"--gtest_filter={tests}"],
            env=os.environ | {"SPARKHVD_TEST_THOROUGHLY": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=3600,
        )
        lines += [f"  {layer}: {line}" for line in ended.stdout.splitlines() if line.startswith("[  PASSED  ]")]
        odd += [f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"] if ended.returncode else []
    verdict = f"FAILED:\n{odd}" if odd else "passed"
    yield f"all cases under ThreadSanitizer: {verdict}\n" + "\n".join(lines)


def large_model() -> Iterator[str]:
    """Wrap, save, load and use a model above 2 GB, the limit of many formats. This takes 8 GB of memory."""
    import torch  # noqa: PLC0415  (heavy)

    from sparkhvd import Store, TorchModel  # noqa: PLC0415

    rows, width = 560_000, 1000
    numbers = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, width).contiguous()
    model = torch.nn.Sequential(torch.nn.Embedding(rows, width, _weight=numbers), torch.nn.AdaptiveAvgPool2d(1))
    model.append(torch.nn.Flatten())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        builder = SparkSession.builder.master("local[1]").config("spark.local.dir", folder)
        spark = builder.config("spark.ui.enabled", "false").getOrCreate()
        try:
            df = spark.range(4).selectExpr("CAST(id * 100000 AS int) AS x")
            wrapped = TorchModel.from_model(model, df, feature_cols=["x"], store=Store.create(f"{folder}/store"))
            wrapped.save(f"{folder}/saved")
            found = TorchModel.load(f"{folder}/saved").transform(df).collect()
        finally:
            spark.stop()
    wrong = [row for row in found if row.prediction != row.x]
    verdict = f"FAILED: {wrong}" if wrong or len(found) != 4 else "all predictions are correct"
    size = numbers.nbytes / 1e9
    yield f"a model of {size:.2f} GB, saved, loaded and used: {verdict}; {time.monotonic() - started:.0f} s"


def properties() -> Iterator[str]:
    """Search for rows, plans, messages and shapes that violate a property, with new examples every time."""
    files = sorted(str(path) for path in (_ROOT / "tests").rglob("test_*.py") if "from hypothesis" in path.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "--hypothesis-profile=searching", "--timeout=3600", *files]
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=7200)
    verdict = result.stdout.strip().rpartition("\n")[2]
    yield f"property tests with 3,000 examples each: {verdict}" + (
        "" if result.returncode == 0 else f"\n  FAILED:\n{result.stdout}"
    )


def repeats() -> Iterator[str]:
    """Run the tests that repeat others with further values, frameworks and servers; `make check` skips them."""
    command = ["make", "--no-print-directory", "test-python", "PYTEST_OPTIONS=--soak"]
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=7200)
    lines = [f"  {line}" for line in result.stdout.splitlines() if _VERDICT.search(line)]
    if result.returncode:
        lines += ["  FAILED:", result.stdout, result.stderr]
    yield "\n".join(["tests with the mark soak:", *lines])


def packages() -> Iterator[str]:
    """Build the wheels, and run a small program in an otherwise empty environment for each set of extras."""
    lines = ["wheels in empty environments:"]
    for command in ("wheels", "test-wheels"):
        result = subprocess.run([_ROOT / "tools" / command], capture_output=True, text=True, check=False, timeout=7200)
        if result.returncode:
            yield "\n".join([*lines, f"  FAILED: tools/{command}", result.stdout, result.stderr])
            return
    yield "\n".join([*lines, *(f"  {line}" for line in result.stdout.splitlines())])


def versions() -> Iterator[str]:
    """Run the tests that depend on Spark with other versions of Python, Spark and all packages."""
    command = [_ROOT / "tools" / "test-matrix"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=6 * 3600)
    verdicts = [line for line in result.stdout.splitlines() if _VERDICT.search(line)]
    lines = ["tests with other versions:", *(f"  {line}" for line in verdicts)]
    if result.returncode:
        lines += ["  FAILED:", result.stdout, result.stderr]
    yield "\n".join(lines)


def faults(chosen: re.Pattern[str]) -> Iterator[str]:
    """Produce the rows of the fault matrix; if some are chosen, without those that share one set-up."""
    yield (
        "the fault matrix: seconds from the fault to the driver's error, or to the end of a job that continues, and\n"
        "the limit; no process was left behind:"
    )
    with tempfile.TemporaryDirectory() as folder:
        spark = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false").getOrCreate()
        try:
            for number, fault in enumerate(fault for fault in FAULTS if chosen.search(fault.name)):
                subfolder = Path(folder, str(number))
                subfolder.mkdir()
                ended = inject(fault, subfolder, spark)
                wrong = complaints(fault, ended)
                yield _line(fault.name, ended.seconds, type(ended.error).__name__, wrong)
            yield from _elastic_faults(chosen, Path(folder, "elastic"), spark)
        finally:
            spark.stop()
        for number, fault in enumerate(fault for fault in mpi.MPI_FAULTS if chosen.search(fault.name)):
            subfolder = Path(folder, f"mpi-{number}")
            subfolder.mkdir()
            ended = mpi.inject(fault, subfolder)
            wrong = mpi.complaints(fault, ended)
            yield _line(fault.name, ended.seconds, type(ended.error).__name__, wrong)
        if chosen.pattern:
            return
        yield from _ports_taken(Path(folder, "ports"))
        for name, found in lost_executors(Path(folder, "executors")).items():
            yield _line(name, *found)
        for one in DRIVER_FAULTS:
            yield _line(one.name, *lost_driver(one, Path(folder, one.name)))
        yield from _cut_off(Path(folder, "hosts"))


def _elastic_faults(chosen: re.Pattern[str], folder: Path, spark: SparkSession) -> Iterator[str]:
    """Run the rows where a rank of an elastic job fails."""
    (folder / "keys").mkdir(parents=True)
    options: dict[str, dict[str, object]] = {"local": {"launcher": "local"}, "spark": {"spark": spark}}
    with ExitStack() as stack:
        if reason := why_not() or sshd.why_not():
            yield f"  elastic ssh: not run, {reason}"
        else:
            hosts = stack.enter_context(sshd.hosts_behind_ssh(folder / "keys", NUM_PROC))
            stack.enter_context(mock.patch.dict(os.environ, PATH=hosts.path))
            options["ssh"] = {"hosts": hosts.listed, "ssh_identity_file": hosts.key}
        rows = [one for one in ELASTIC_FAULTS if one.launcher in options and chosen.search(one.name)]
        for number, fault in enumerate(rows):
            subfolder = folder / str(number)
            subfolder.mkdir()
            seconds, error, wrong = elastic_faults.inject(fault, subfolder, **options[fault.launcher])
            yield _line(fault.name, seconds, error or "NoneType", wrong)


def _line(name: str, seconds: float, error: str, wrong: list[str]) -> str:
    verdict = f"FAILED: {wrong}" if wrong else error.replace("NoneType", "the job continues") or "all have ended"
    return f"  {name:<50} {seconds:6.2f} of {_LIMITS[name]:g}  {verdict}"


def _ports_taken(folder: Path) -> list[str]:
    """Run the faults where a process takes all ports of its host."""
    if why_not():
        return [f"  port taken: not run, {why_not()}"]
    return [_line(name, *found) for name, found in ports_taken(folder, "thoroughly").items()]


def _cut_off(folder: Path) -> list[str]:
    """Run the faults that cut off one of three hosts, and a fit on these hosts with each Store."""
    if why_not():
        return [f"  host cut off: not run, {why_not()}"]
    command = [sys.executable, "-m", "tests.launch.namespaces_script", folder, "thoroughly"]
    result = run_script(command, folder, 1200)
    try:
        found = results_of(result)
    except AssertionError:
        return [f"  host cut off: FAILED: {result.stderr[-3000:]}"]
    lines = [_line(name, row["seconds"], row["error"], row["wrong"]) for name, row in found["cut off"].items()]
    largest = {store: max(errors) for store, errors in found["errors"].items()}
    verdict = "all right" if max(largest.values()) < 0.5 else "FAILED"
    return [*lines, f"  fits on three hosts, by Store, with their largest error: {largest}: {verdict}"]


def elastic(minutes: float) -> Iterator[str]:
    """Disturb an elastic job on four hosts for these minutes, and two elastic fits for a quarter of them each."""
    yield f"elastic jobs disturbed at random moments, for {1.5 * minutes:g} minutes in all:"
    draw = random.Random()
    with tempfile.TemporaryDirectory() as folder:

        def subfolder(name: str) -> Path:
            path = Path(folder, name)
            path.mkdir()
            return path

        if reason := why_not() or sshd.why_not():
            yield f"  on hosts over ssh: not run, {reason}"
        else:
            with sshd.hosts_behind_ssh(subfolder("keys"), 4) as hosts, mock.patch.dict(os.environ, PATH=hosts.path):
                seed = draw.randrange(1000)
                report = elastic_chaos.job_on_hosts(subfolder("job"), hosts, minutes * 60, seed)
                yield f"  on four hosts over ssh, seed {seed}: {report}"
        spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        try:
            for batch in ("global", "rank"):
                seed = draw.randrange(1000)
                report = elastic_chaos.fit(spark, subfolder(batch), minutes * 15, seed, batch)
                yield f"  TorchEstimator, elastic_batch={batch!r}, seed {seed}: {report}"
        finally:
            spark.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--fuzz-minutes", type=float, default=10.0)
    parser.add_argument("--comparison-minutes", type=float, default=5.0)
    parser.add_argument("--elastic-minutes", type=float, default=20.0)
    parser.add_argument("--report", type=Path, default=_ROOT / "bench" / "results" / "soak.txt")
    parser.add_argument(
        "--only", nargs="+", choices=_PARTS, metavar="PART", help=f"run only these parts: {', '.join(_PARTS)}"
    )
    parser.add_argument(
        "--rows", type=re.compile, default=re.compile(""), metavar="REGEX", help="only these rows of the fault matrix"
    )
    options = parser.parse_args()
    started = time.monotonic()
    parts: dict[str, Callable[[], Iterable[str]]] = {
        "kills": partial(kills, options.kills),
        "cycles": partial(connect_and_leave, options.cycles),
        "faults": partial(faults, options.rows),
        "elastic": partial(elastic, options.elastic_minutes),
        "large": large_model,
        "random": partial(comparison, options.comparison_minutes),
        "fuzz": partial(fuzzing, options.fuzz_minutes),
        "races": races,
        "properties": properties,
        "repeats": repeats,
        "packages": packages,
        "versions": versions,
    }
    with options.report.open("w") as report:
        _write(report, [f"Endurance, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores"])
        failed = [name for name in options.only or _PARTS if _FAILURE.search(_write(report, parts[name]()))]
        _write(report, [f"{time.monotonic() - started:.0f} s in all"])
    return int(bool(failed))


def _write(report: TextIO, lines: Iterable[str]) -> str:
    """Add a part to the report and to stdout, each line at once, because a later one may end this process."""
    written = []
    for line in chain(lines, [""]):
        written.append(line)
        for stream in (report, sys.stdout):
            print(line, file=stream, flush=True)
    return "\n".join(written)


if __name__ == "__main__":
    sys.exit(main())
