"""Fixtures of the whole suite: one Spark session, and a check that no test leaves anything behind.

The leak check compares the process before and after every test. It ignores what a fixture with a wider scope started
before the test, and gives ending threads, processes and files a bounded time.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from sparkhvd.task.worker.template import TEMPLATE_NAME

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.hdfs_server import Hdfs
    from tests.s3_server import S3

pytest_plugins = ["pytester"]

# Every run judges a change by the same examples; `make soak` searches for others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("searching", max_examples=3000, deadline=None)
settings.load_profile("repeatable")

# Every descendant of this process has this mark in its environment, even after it has lost its parent.
_MARK = "SPARKHVD_TEST_RUN"  # also known to the .pth file of the Makefile
_CURRENT_TEST = "PYTEST_CURRENT_TEST"  # a variable of pytest's, which it sets and removes itself
# The time that a thread, process or file may still take to end.
_GRACE_SECONDS = float(os.environ.get("SPARKHVD_TEST_LEAK_GRACE", "30"))
# Spark's JVM, its pool of Python workers, and Ray's idle workers serve later tests; multiprocessing's tracker
# lives as long as this process.
_LASTING_PROCESS = re.compile(
    r"SparkSubmit.*pyspark-shell|pyspark[./_]daemon|multiprocessing\.resource_tracker|ray::IDLE|/ray/.*/default_worker\.py"
)
_LASTING_THREAD_MODULES = ("py4j", "pyspark")
# fsspec's event loop and thread pool live as long as the process.
_LASTING_THREAD_NAMES = ("fsspecIO", "asyncio_")
_OWN_NATIVE_THREADS = ("shvd", "sparkhvd")  # the kernel lists the core's threads by these names
# Variables that pytest, pyspark and the imports of Lightning, TensorFlow, JAX and Ray set for the life of a process.
_LASTING_VARIABLES = (
    "PYTEST_",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_ENV_LOADED",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "TF_CPP_MIN_LOG_LEVEL",
    "TPU_SKIP_MDS_QUERY",
    "HDF5_PLUGIN_PATH",
    "KMP_",
    "TF2_BEHAVIOR",
    "TPU_ML_PLATFORM",
    "RAY_CLIENT_MODE",
)
# Running processes without the mark; the snapshots need not read about them again.
_foreign_processes: set[str] = set()
_KERNEL_THREAD = 0x00200000  # among the flags of a process; the kernel's threads have no environment
# The HDFS client keeps connections with data nodes for reuse, as long as the process lives.
_ports_of_data_nodes: set[int] = set()
# The kernel no longer lists the ports of a connection that its peer has reset, although the descriptor is still open.
_once_kept_for_reuse: set[str] = set()
_OF_THE_HDFS_CLIENT = frozenset({"anon_inode:[eventfd]", "anon_inode:[eventpoll]"})
_TEMPORARY_FOLDER = pytest.StashKey[Path]()
_ERROR_LINE = re.compile(r"(Caused by: |Fatal Python error)|[\w.]*(Error|Exception|Exit|Interrupt|Failed)\b")
# A Java installation whose JVMs need half the processor time to start; the `make` targets of the tests create it.
_TEST_JAVA = Path(sys.prefix) / "test-java"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests with the mark soak, and no others")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soak = bool(config.getoption("--soak"))
    kept = [item for item in items if (item.get_closest_marker("soak") is not None) == soak]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    if _runs_own_tests(session.config):
        gc.freeze()  # so that the leak check's garbage collections skip all that the tests have imported


def pytest_configure(config: pytest.Config) -> None:
    # A parent that runs the tests in the background may ignore Ctrl-C, and child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if _runs_own_tests(config):
        from tests import lean_imports  # noqa: PLC0415  (small runs have no such package)

        lean_imports.install()
        import torch  # noqa: F401, PLC0415

        with contextlib.suppress(ImportError):
            import triton  # noqa: F401, PLC0415  (crashes if torch._dynamo imports it after TensorFlow)

    if (_TEST_JAVA / "bin" / "java").exists():
        os.environ["JAVA_HOME"] = str(_TEST_JAVA)
    folder = Path(tempfile.mkdtemp(prefix="sparkhvd-tests-"))
    config.stash[_TEMPORARY_FOLDER] = folder
    temporary = folder / "tmp"
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    os.environ |= {
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torchinductor"),  # by default, a folder among the temporary files
        _MARK: uuid.uuid4().hex,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        # gcsfs would ask for a bucket's kind over gRPC, which the test server does not speak.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # For JVMs that live for seconds, the second compiler and parallel collection cost more than they save.
        "SPARK_SUBMIT_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }


@contextmanager
def _hidden_test_name() -> Iterator[None]:
    """Hide the test's name from processes that it starts: a warm process forks ranks only in an equal one."""
    name = os.environ.get(_CURRENT_TEST)
    try:
        if name is not None:
            os.environ[_CURRENT_TEST] = "a test"
        yield
    finally:
        if name is not None:
            os.environ[_CURRENT_TEST] = name


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[Any]:
    with _hidden_test_name():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[Any]:
    with _hidden_test_name():
        return (yield)


def _runs_own_tests(config: pytest.Config) -> bool:
    """Return whether this is not one of the small pytest runs that tests start."""
    return config.rootpath == Path(__file__).parents[1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print each cause once, with the first test that it failed, in a line that `make check` repeats at its end."""
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    tests_by_causes = {_causes(report.longreprtext): report.nodeid for report in reversed(failed)}
    for causes, test in tests_by_causes.items():
        terminalreporter.write_line(f"CAUSE {test}: {causes}")


def _causes(text: str) -> str:
    """Return the last error lines of a failure's text; for a Java exception, the lines with its causes."""
    lines = [line.removeprefix("E ").strip() for line in text.splitlines()]
    errors = list(dict.fromkeys(line[:300] for line in lines if _ERROR_LINE.match(line)))
    return " / ".join(errors[-4:]) or text[-300:].replace("\n", " ")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_TEMPORARY_FOLDER], ignore_errors=True)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Provide a quiet local Spark with four slots and a separate folder for its files."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - tests without Spark do without it

    folder = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[4]")
        .appName("sparkhvd tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        # Limits most jobs to two Python workers; each worker that trains or predicts imports the frameworks.
        .config("spark.default.parallelism", "2")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.python.worker.faulthandler.enabled", "true")
        .config("spark.python.daemon.module", "tests.pyspark_daemon")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.log.level", "ERROR")
        # Compiling a query takes longer than running it on a few rows. The tests' own clusters do compile.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def warm_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the ranks of a module from one warm process; importing the frameworks would take most of the time.

    A module whose tests need each rank to be a child of its task sets ``RANKS_ARE_CHILDREN``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKHVD_WARM_SECONDS", "0" if hasattr(request.module, "RANKS_ARE_CHILDREN") else "600")
        yield


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """Provide a real HDFS with one data node."""
    from tests.hdfs_server import running_hdfs  # noqa: PLC0415  (small runs that tests start have no such package)

    with running_hdfs(tmp_path_factory.mktemp("hdfs")) as running:
        _ports_of_data_nodes.update(running.data_ports)
        yield running


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """Provide an S3 server with the bucket ``sparkhvd-tests``."""
    import fsspec.asyn  # noqa: PLC0415

    from tests.s3_server import running_s3  # noqa: PLC0415

    fsspec.asyn.get_loop()  # the first use starts it for the life of the process
    with running_s3() as running:
        yield running


@pytest.fixture(scope="session")
def gcs(s3: S3) -> Iterator[dict[str, Any]]:
    """Provide the storage options of a GCS server with the bucket ``sparkhvd-tests``."""
    from tests.gcs_server import running_gcs  # noqa: PLC0415

    pytest.importorskip("gcp_storage_emulator", reason="tools/make-venv renews an older environment")
    with running_gcs() as running:
        yield running


@pytest.fixture(scope="session")
def store_servers(hdfs: Hdfs, s3: S3, request: pytest.FixtureRequest) -> None:
    """Start all store servers before the leak check of a test takes its first snapshot."""
    if find_spec("gcp_storage_emulator"):
        request.getfixturevalue("gcs")


@pytest.fixture
def connect_port() -> Iterator[None]:
    """Reserve the one port that all Spark Connect servers use: parts of the suite, and suites of other clones, run at
    the same time.
    """
    with Path(f"/tmp/sparkhvd-tests-connect-port-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _snapshot()
    yield
    # Every HDFS client has a runtime, which ends on a separate thread some time after its client.
    uses_hdfs = "hdfs" in request.node.nodeid or "hdfs" in request.fixturenames
    leaks = _leaks_after_grace(before, _OF_THE_HDFS_CLIENT if uses_hdfs else frozenset())
    _restore_environment(before.environment)
    if leaks:
        pytest.fail("The test left behind:\n" + "\n".join(f"  {leak}" for leak in leaks), pytrace=False)


@dataclass(frozen=True)
class _Snapshot:
    """The resources that a test could leave behind, by kind; the values are the descriptions to print."""

    threads: dict[int, str]
    native_threads: dict[int, str]
    processes: dict[tuple[int, str], str]
    descriptors: Counter[str]
    shared_memory: frozenset[str]
    temporary_files: frozenset[str]
    environment: dict[str, str] = field(repr=False)


def _snapshot() -> _Snapshot:
    return _Snapshot(
        threads={id(thread): thread.name for thread in threading.enumerate() if not _lasts(thread)},
        native_threads=_native_threads(),
        processes=_processes(),
        descriptors=_descriptors(),
        shared_memory=_entries("/dev/shm"),
        temporary_files=_entries(os.environ["TMPDIR"]),
        environment={k: v for k, v in os.environ.items() if not k.startswith(_LASTING_VARIABLES)},
    )


def _leaks_after_grace(before: _Snapshot, allowed: frozenset[str]) -> list[str]:
    leaks = _leaks(before, _snapshot(), allowed)
    if not leaks:
        return []
    gc.collect()  # a resource that only a reference cycle holds is not a leak
    deadline = time.monotonic() + _GRACE_SECONDS
    while (leaks := _leaks(before, _snapshot(), allowed)) and time.monotonic() < deadline and _may_still_end(leaks):
        time.sleep(0.02)
    return leaks


def _may_still_end(leaks: list[str]) -> bool:
    return not all(leak.startswith("environment") for leak in leaks)


def _leaks(before: _Snapshot, after: _Snapshot, allowed: frozenset[str]) -> list[str]:
    new: Callable[[dict, dict], list[str]] = lambda old, now: [now[key] for key in now.keys() - old.keys()]  # noqa: E731
    changed = [
        name
        for name in before.environment.keys() | after.environment.keys()
        if before.environment.get(name) != after.environment.get(name)
    ]
    leaks = {
        "thread": new(before.threads, after.threads),
        "thread of the core": new(before.native_threads, after.native_threads),
        "process": new(before.processes, after.processes),
        "file descriptor": [
            target for target in _more_descriptors(before.descriptors, after.descriptors) if target not in allowed
        ],
        "shared memory": _without_foreign_segments(after.shared_memory - before.shared_memory),
        "temporary file": after.temporary_files - before.temporary_files,
        "environment variable": changed,
    }
    return [f"{kind} {_described(what)}" for kind, leaked in leaks.items() for what in sorted(leaked)]


def _described(target: str) -> str:
    """Return the name of a leaked resource, for a TCP socket with both ends and its state as the kernel lists them."""
    connections = {f"socket:[{cells[9]}]": cells[1:4] for cells in _tcp_sockets()} if target[:7] == "socket:" else {}
    return " ".join([target, *connections.get(target, [])])


def _more_descriptors(before: Counter[str], after: Counter[str]) -> list[str]:
    """Return the additional descriptors; a connection that replaced another one is no leak."""
    appeared, ended = list((after - before).elements()), (before - after).elements()
    connections = [target for target in appeared if target.startswith("socket:")]
    replaced = sum(target.startswith("socket:") for target in ended)
    return [target for target in appeared if target not in connections] + connections[replaced:]


def _lasts(thread: threading.Thread) -> bool:
    """Return whether the thread belongs to py4j, pyspark or fsspec, whose threads live as long as the process."""
    target = getattr(thread, "_target", None)
    owner = getattr(target, "__self__", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "", type(owner).__module__)
    return thread.name.startswith(_LASTING_THREAD_NAMES) or any(m.startswith(_LASTING_THREAD_MODULES) for m in modules)


def _native_threads() -> dict[int, str]:
    names = {}
    for task in Path("/proc/self/task").iterdir():
        name = _read(f"{task}/comm").strip()
        if name.startswith(_OWN_NATIVE_THREADS):
            names[int(task.name)] = name
    return names


def _processes() -> dict[tuple[int, str], str]:
    """Return the descendants, including orphans, by pid and start time, except those that serve the whole session."""
    processes = {}
    running = _other_processes()
    _foreign_processes.intersection_update(running)
    for pid in running:
        if pid in _foreign_processes:
            continue
        stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if stat and int(stat[6]) & _KERNEL_THREAD:
            _foreign_processes.add(pid)
            continue
        is_child = stat[1:2] == [str(os.getpid())]
        environment = "" if is_child else _environment(pid)
        if stat and not is_child and not _has_our_mark(environment):
            if environment:  # it is empty while a program starts, which may have the mark a moment later
                _foreign_processes.add(pid)
        elif stat:
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            template = _read(f"/proc/{pid}/comm").strip() == TEMPLATE_NAME  # lasts as long as Spark's Python worker
            if not (template or _LASTING_PROCESS.search(command)):
                processes[int(pid), stat[19]] = f"{pid} ({command or 'ended, but its parent has not waited for it'})"
    return processes


def _other_processes() -> list[str]:
    return [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.name != str(os.getpid())]


def _environment(pid: str) -> str:
    return _read(f"/proc/{pid}/environ")


def _has_our_mark(environment: str) -> bool:
    return f"{_MARK}={os.environ[_MARK]}" in environment


def _without_foreign_segments(names: frozenset[str]) -> frozenset[str]:
    """Return the segments that no foreign process maps: other tests may run on this machine."""
    for pid in _other_processes() if names else ():
        if not _has_our_mark(_environment(pid)):
            mapped = _read(f"/proc/{pid}/maps")
            names -= {name for name in names if f"/dev/shm/{name}" in mapped}
    return names


def _descriptors() -> Counter[str]:
    lasting = {"/dev/urandom"} | _kept_for_reuse()
    with_sockets = not _is_connected_to_ray()
    targets = Counter[str]()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
        if target not in lasting and (with_sockets or not target.startswith("socket:")):
            targets[target] += 1
    return targets


def _is_connected_to_ray() -> bool:
    """Return whether this process is connected to Ray, which keeps connections to former actors for a while."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _kept_for_reuse() -> set[str]:
    """Return the connections with Spark's JVM and the data nodes, which are kept for reuse."""
    if ports := {f":{port:04X}" for port in _spark_ports() | _ports_of_data_nodes}:
        _once_kept_for_reuse.update(
            f"socket:[{cells[9]}]" for cells in _tcp_sockets() if not ports.isdisjoint({cells[1][-5:], cells[2][-5:]})
        )
    return _once_kept_for_reuse


def _tcp_sockets() -> list[list[str]]:
    """Return the cells of the kernel's table of TCP sockets: both ends at 1 and 2, the state at 3, the inode at 9."""
    return [line.split() for table in ("tcp", "tcp6") for line in _read(f"/proc/self/net/{table}").splitlines()[1:]]


def _spark_ports() -> set[int]:
    module = sys.modules.get("pyspark.core.context") or sys.modules.get("pyspark.context")  # since 4.0, and before
    context = getattr(module, "SparkContext", None)
    gateway = getattr(context, "_gateway", None)
    accumulators = getattr(getattr(context, "_active_spark_context", None), "_accumulatorServer", None)
    ports = {gateway.gateway_parameters.port} if gateway else set()
    if accumulators is not None and accumulators.socket.family in {socket.AF_INET, socket.AF_INET6}:
        ports.add(accumulators.server_address[1])
    return ports


def _entries(folder: str) -> frozenset[str]:
    """Return the names in a folder, without the ``tmp_path`` folders that pytest itself removes."""
    return frozenset(entry.name for entry in Path(folder).iterdir() if not entry.name.startswith("pytest-of-"))


def _restore_environment(environment: dict[str, str]) -> None:
    """Undo a leaked change, so that it fails one test and not all later ones."""
    for name in [n for n in os.environ if n not in environment and not n.startswith(_LASTING_VARIABLES)]:
        del os.environ[name]
    os.environ.update(environment)


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  in every test, hundreds of times
            return file.read().decode(errors="replace")
    except OSError:  # the process or thread has ended meanwhile, or belongs to another user
        return ""
