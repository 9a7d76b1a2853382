"""Workers that a template forks: they behave like new workers, but have their modules imported."""

from __future__ import annotations

import fcntl
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.task.worker import process as process_module
from sparkhvd.task.worker import scratch as scratch_module
from sparkhvd.task.worker import template as template_module
from sparkhvd.task.worker.exit import Exited
from sparkhvd.task.worker.process import WorkerProcess, spawn_worker
from sparkhvd.task.worker.spec import FnEnded, Leave, Raised, Ready, Returned, WorkerSpec
from sparkhvd.task.worker.template import TEMPLATE_NAME, Templates

WARM_SECONDS = 60.0
VARIABLES = (("SPARKHVD_RANK", "0"), ("SPARKHVD_LOG_LEVEL", "20"))


@pytest.fixture(autouse=True)
def templates(monkeypatch) -> Iterator[Templates]:
    """Give this test its own templates, and wait for the end of all processes that it started."""
    before = set(psutil.Process().children(recursive=True))
    templates = Templates()
    monkeypatch.setattr(process_module, "TEMPLATES", templates)
    yield templates
    templates.close()
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=20.0)[1] == []


@pytest.fixture
def imported(tmp_path, monkeypatch) -> str:
    """Write a module that records which process imported it, and return its name."""
    (tmp_path / "imported_once.py").write_text("import os\nIMPORTED_IN = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "imported_once"


@pytest.fixture
def with_threads(tmp_path, monkeypatch) -> str:
    """Write a module like that of ``imported``, whose import also starts a thread."""
    (tmp_path / "imported_once.py").write_text(
        "import os, threading\nIMPORTED_IN = os.getpid()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "imported_once"


class Lines:
    """A log that keeps the output of a worker."""

    rank = 0

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []

    def started(self) -> None: ...

    def write(self, stream: str, content: bytes) -> None:
        self.written.append((stream, content))

    def close(self) -> None: ...


def spawn(*preload: str, seconds: float = WARM_SECONDS, log: Lines | None = None, **env: str) -> WorkerProcess:
    worker = WorkerProcess(spawn_worker(env, {}, preload, warm_seconds=seconds), log or Lines())
    worker.output.start()
    return worker


def start(worker: WorkerProcess, fn: Callable[..., object], *args: object, commits: Any = None) -> None:
    worker.send(WorkerSpec(LaunchContext(), cloudpickle.dumps((fn, args, {})), VARIABLES, None, commits))
    assert worker.events.get(timeout=60.0) == Ready()


def result(worker: WorkerProcess, fn: Callable[..., object], *args: object, commits: Any = None) -> object:
    """Run ``fn`` in the worker, end the worker, and return the result."""
    start(worker, fn, *args, commits=commits)
    assert isinstance(worker.events.get(timeout=60.0), FnEnded)
    report = worker.events.get(timeout=60.0)
    worker.send(Leave(10.0))
    assert isinstance(report, Returned), report
    assert worker.events.get(timeout=60.0) == Exited(0)
    worker.close()
    return cloudpickle.loads(report.content)


def where_imported() -> tuple[int, int]:
    import imported_once  # noqa: PLC0415

    return imported_once.IMPORTED_IN, os.getpid()


def test_the_next_worker_is_forked_with_the_imports_of_the_first(imported):
    first, own = result(spawn(imported), where_imported)
    assert first == own
    for _ in range(2):
        again, own = result(spawn(imported), where_imported)
        assert again == first
        assert own != first


def test_a_template_is_forked_while_no_other_thread_imports(imported, tmp_path):
    (tmp_path / "slowly_imported.py").write_text("import time\ntime.sleep(1)\ndef nothing(): ...\n")
    nothing = importlib.import_module("slowly_imported").nothing

    class Commits:
        """Imports the module in the process that unpickles it."""

        def __reduce__(self):
            return nothing, ()

    (first, _), (again, _) = [result(spawn(imported), where_imported, commits=Commits()) for _ in range(2)]
    assert first == again


def test_without_warm_seconds_every_worker_imports_by_itself(imported):
    for _ in range(2):
        first, own = result(spawn(imported, seconds=0.0), where_imported)
        assert first == own


@pytest.mark.parametrize("change", [{"OMP_NUM_THREADS": "3"}, {"PYTHONHASHSEED": "5"}])
def test_a_worker_with_other_variables_is_not_forked(imported, change):
    result(spawn(imported), where_imported)
    first, own = result(spawn(imported, **change), where_imported)
    assert first == own


def test_jobs_of_three_kinds_alternate_without_new_imports_and_a_fourth_replaces_the_oldest(imported):
    def imported_by(kind: str) -> int:
        return result(spawn(imported, KIND=kind), where_imported)[0]

    first = {kind: imported_by(kind) for kind in "abc"}
    assert len(set(first.values())) == 3
    assert {kind: imported_by(kind) for kind in "abc"} == first
    imported_by("d")
    assert [imported_by(kind) == first[kind] for kind in "bca"] == [True, True, False]


def test_workers_that_start_together_import_once(imported):
    workers = [spawn(imported) for _ in range(3)]
    found = [result(worker, where_imported) for worker in workers]
    assert len({own for _, own in found}) == 3
    assert {first for first, _ in found} == {found[0][1]}


def test_workers_import_by_themselves_if_the_first_one_leaves_no_template(with_threads, monkeypatch):
    def job() -> None:
        workers = [spawn(with_threads) for _ in range(2)]
        for first, own in [result(worker, where_imported) for worker in workers]:
            assert first == own

    job()
    tries, bind = [], template_module._bind
    monkeypatch.setattr(template_module, "_bind", lambda address: tries.append(address) or bind(address))
    job()
    assert len(tries) == 2, "only the workers of the first job wait"


def test_a_worker_is_not_forked_after_an_installation(imported, tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setattr(template_module.sysconfig, "get_path", lambda _: str(packages))
    first, _ = result(spawn(imported), where_imported)
    assert result(spawn(imported), where_imported)[0] == first
    (packages / "new-1.0.dist-info").mkdir()
    assert result(spawn(imported), where_imported)[0] != first


def test_a_worker_is_not_forked_after_an_installation_into_another_folder_of_the_import_path(imported, tmp_path):
    first, _ = result(spawn(imported), where_imported)
    (tmp_path / "new-1.0.dist-info").mkdir()
    installed, _ = result(spawn(imported), where_imported)
    assert installed != first
    assert result(spawn(imported), where_imported)[0] == installed
    (tmp_path / "newer-1.0.dist-info").mkdir()
    assert result(spawn(imported), where_imported)[0] != installed


def test_a_worker_is_forked_even_if_python_has_no_folder_for_packages(imported, tmp_path, monkeypatch):
    monkeypatch.setattr(template_module.sysconfig, "get_path", lambda _: str(tmp_path / "missing"))
    first, _ = result(spawn(imported), where_imported)
    assert result(spawn(imported), where_imported)[0] == first


def test_a_worker_is_not_forked_after_a_change_of_an_imported_module(imported, tmp_path):
    first, _ = result(spawn(imported), where_imported)
    module = tmp_path / "imported_once.py"
    module.write_text(module.read_text() + "CHANGED = True\n")
    changed, own = result(spawn(imported), where_imported)
    assert changed == own
    again, _ = result(spawn(imported), where_imported)
    assert again != first
    assert result(spawn(imported), where_imported)[0] == again, "the next template has the changed module"


def test_a_worker_is_not_forked_after_a_change_of_a_zip_file_with_an_imported_module(imported, tmp_path, monkeypatch):
    def write(content: str) -> None:
        with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:
            archive.writestr("imported_once.py", content)

    content = (tmp_path / "imported_once.py").read_text()
    write(content)
    monkeypatch.syspath_prepend(str(tmp_path / "modules.zip"))
    first, _ = result(spawn(imported), where_imported)
    assert result(spawn(imported), where_imported)[0] == first
    write(content + "CHANGED = True\n")
    changed, own = result(spawn(imported), where_imported)
    assert changed == own


def mask_of_new_files(_: Path) -> Callable[[], object]:
    before = os.umask(0o077)
    return lambda: os.umask(before)


def limit_of_open_files(_: Path) -> Callable[[], object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ignored_signal(_: Path) -> Callable[[], object]:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # under nohup, SIGHUP is already ignored
    return lambda: signal.signal(signal.SIGUSR2, before)


def current_folder_of_the_same_name(folder: Path) -> Callable[[], object]:
    folder.rename(folder.with_name("former"))
    folder.mkdir()
    os.chdir(folder)
    return lambda: None


@pytest.mark.parametrize(
    "change", [mask_of_new_files, limit_of_open_files, ignored_signal, current_folder_of_the_same_name]
)
def test_a_worker_is_not_forked_after_a_change_of_inherited_state(imported, tmp_path, monkeypatch, change):
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    result(spawn(imported), where_imported)
    restore = change(folder)
    try:
        changed, own = result(spawn(imported), where_imported)
        assert changed == own
    finally:
        restore()


def test_a_worker_is_forked_in_a_folder_that_was_removed(imported, tmp_path, monkeypatch):
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    first, _ = result(spawn(imported), where_imported)
    assert result(spawn(imported), where_imported)[0] == first


def state() -> dict[str, object]:
    Path(os.environ["SPARKHVD_SCRATCH"], "file").write_text("1")
    return {
        "scratch": os.environ["SPARKHVD_SCRATCH"],
        "group": os.getpgid(0) == os.getpid() == os.getsid(0),
        "signals": [signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGTERM)],
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "arguments": sys.argv[0],
        "variables": {name: value for name, value in os.environ.items() if name != "SPARKHVD_SCRATCH"},
        "folder": os.getcwd(),  # noqa: PTH109
    }


def test_a_forked_worker_has_the_state_of_a_new_one():
    new, forked = result(spawn("numpy"), state), result(spawn("numpy"), state)
    scratch = new.pop("scratch"), forked.pop("scratch")
    assert scratch[0] != scratch[1]
    assert not any(Path(folder).exists() for folder in scratch)
    assert forked == new
    assert forked["group"] is True


def draws() -> tuple[float, float]:
    import random  # noqa: PLC0415

    return random.random(), float(np.random.rand())


def test_forked_workers_draw_different_random_numbers():
    result(spawn("numpy", "random"), draws)
    drawn = [result(spawn("numpy", "random"), draws) for _ in range(3)]
    assert len({numbers for pair in drawn for numbers in pair}) == 6


def torch_draw() -> float:
    import torch  # noqa: PLC0415

    return float(torch.rand(1))


def test_forked_workers_draw_different_random_numbers_with_torch():
    assert len({result(spawn("torch"), torch_draw) for _ in range(3)}) == 3


def test_a_module_that_was_added_later_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    result(spawn("numpy"), missing, "added_later")
    (tmp_path / "added_later.py").write_text("")
    assert result(spawn("numpy"), missing, "added_later") is False


def missing(name: str) -> bool:
    import importlib.util  # noqa: PLC0415

    return importlib.util.find_spec(name) is None


def write_to_both() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)


def test_the_output_of_a_forked_worker_arrives():
    logs = [Lines(), Lines()]
    for log in logs:
        result(spawn(log=log), write_to_both)
    assert [sorted(log.written) for log in logs] == [[("stderr", b"to stderr"), ("stdout", b"to stdout")]] * 2


def test_the_error_of_a_forked_worker_arrives():
    result(spawn(), os.getpid)
    worker = spawn()
    start(worker, divide)
    assert isinstance(worker.events.get(timeout=60.0), FnEnded)
    report = worker.events.get(timeout=60.0)
    assert isinstance(report, Raised)
    assert "ZeroDivisionError" in report.cause
    worker.send(Leave(10.0))
    assert worker.events.get(timeout=60.0) == Exited(1)
    worker.close()


def divide() -> float:
    return 1 / 0


def start_child_and_stay(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path + ".new").write_text(str(child.pid))
    Path(path + ".new").rename(path)
    threading.Event().wait()


def child_of(worker: WorkerProcess, path: Path) -> psutil.Process:
    start(worker, start_child_and_stay, str(path))
    pause = threading.Event()
    while not path.exists():
        pause.wait(0.02)
    return psutil.Process(int(path.read_text()))


def test_killing_a_forked_worker_ends_its_children(tmp_path):
    result(spawn(), os.getpid)
    worker = spawn()
    child = child_of(worker, tmp_path / "pid")
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.events.get(timeout=60.0) == Exited(-signal.SIGKILL)
    worker.close()
    assert psutil.wait_procs([child], timeout=20.0)[1] == []


def test_the_process_of_a_forked_worker_is_gone_when_the_worker_is_closed():
    result(spawn(), os.getpid)
    for _ in range(5):
        worker = spawn()
        worker.close()
        assert not psutil.pid_exists(worker.pid)


def test_closing_a_forked_worker_ends_its_process_group(tmp_path):
    result(spawn(), os.getpid)
    worker = spawn()
    child = child_of(worker, tmp_path / "pid")
    worker.close()
    assert psutil.wait_procs([child], timeout=20.0)[1] == []


def forked_by(worker: WorkerProcess) -> psutil.Process:
    """Return the parent of a forked worker."""
    parent = psutil.Process(worker.pid).parent()
    assert parent.pid != os.getpid(), "the worker was not forked"
    return parent


def test_the_loss_of_a_forked_workers_parent_counts_as_a_kill(tmp_path):
    result(spawn(), os.getpid)
    worker = spawn()
    child = child_of(worker, tmp_path / "pid")
    forked_by(worker).kill()
    assert worker.events.get(timeout=60.0) == Exited(-signal.SIGKILL)
    worker.close()
    assert psutil.wait_procs([child], timeout=20.0)[1] == []


def template() -> psutil.Process:
    """Return the template process, from which the parent of a forked worker was forked."""
    worker = spawn()
    process = forked_by(worker).parent()
    assert process.name() == TEMPLATE_NAME
    worker.close()
    return process


def test_a_killed_template_is_replaced():
    result(spawn(), os.getpid)
    killed = template()
    killed.kill()
    psutil.wait_procs([killed], timeout=20.0)
    result(spawn(), os.getpid)  # the new template's first worker
    assert template().pid != killed.pid


def test_a_worker_that_is_forked_too_late_ends_and_leaves_nothing_behind(tmp_path, monkeypatch):
    result(spawn(), os.getpid)
    late = template()
    late.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(template_module, "_FORK_SECONDS", 0.1)
        worker = spawn()
    assert psutil.Process(worker.pid).ppid() == os.getpid(), "the worker was forked"
    start(worker, start_child_and_stay, str(tmp_path / "pid"))
    late.resume()
    result(spawn(), os.getpid)  # the template serves the earlier request first
    assert psutil.wait_procs(late.children(recursive=True), timeout=20.0)[1] == []
    assert Path(psutil.Process(worker.pid).environ()["SPARKHVD_SCRATCH"]).is_dir()
    worker.close()


def test_a_worker_that_waits_for_a_template_has_no_scratch_folder_yet(imported, tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(scratch_module, "local_folders", lambda: (str(tmp_path / "scratch"),))
    during, bind = [], template_module._bind

    def looked_at_folders(address: str) -> object:
        during.append(len(list((tmp_path / "scratch").iterdir())))
        return bind(address)

    monkeypatch.setattr(template_module, "_bind", looked_at_folders)
    workers = [spawn(imported) for _ in range(2)]
    assert set(during[1:]) <= {1}, "only the first worker has a scratch folder"
    for worker in workers:
        result(worker, where_imported)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_only_the_first_worker_waits_for_a_process_that_uses_the_name_of_a_template(imported, monkeypatch):
    tries, bind, of = [], template_module._bind, template_module.Origin.of
    taken = []

    def with_its_name_taken(*arguments: Any) -> template_module.Origin:
        origin = of(*arguments)
        if not taken:
            taken.append(bind(origin.address))
        return origin

    monkeypatch.setattr(process_module.Origin, "of", with_its_name_taken)
    monkeypatch.setattr(template_module, "_bind", lambda address: tries.append(address) or bind(address))
    monkeypatch.setattr(template_module, "_SPLIT_SECONDS", 0.1)
    result(spawn(imported), where_imported)
    assert len(tries) > 1
    tries.clear()
    result(spawn(imported), where_imported)
    assert len(tries) == 1
    taken[0].close()


def test_a_template_ends_when_it_is_idle_and_its_workers_do_not(tmp_path):
    result(spawn(seconds=1.0), os.getpid)
    worker = spawn(seconds=1.0)
    idle = psutil.Process(worker.pid).parent().parent()
    child = child_of(worker, tmp_path / "pid")
    assert psutil.wait_procs([idle], timeout=20.0)[1] == []
    assert child.is_running()
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.events.get(timeout=60.0) == Exited(-signal.SIGTERM)
    worker.close()


def test_a_template_ends_with_the_process_that_started_it(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_template as t; import os; "
        "t.result(t.spawn(), os.getpid); print(t.template().pid, flush=True); sys.stdin.read()"
    )
    folder = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        left = psutil.Process(int(owner.stdout.readline()))
        assert left.is_running()
        owner.kill()
    assert psutil.wait_procs([left], timeout=20.0)[1] == []


def test_a_template_of_a_spark_task_outlives_the_task_and_ends_with_the_executor(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as executor:
        of = template_module.Origin.of
        monkeypatch.setattr(process_module.Origin, "of", lambda *arguments: replace(of(*arguments), owner=executor.pid))
        result(spawn(), os.getpid)
        left = template()
        process_module.TEMPLATES.close()
        assert template() == left, "another task of the executor finds the template"
        executor.kill()
        assert psutil.wait_procs([left], timeout=20.0)[1] == []


def test_a_process_is_watched_by_a_python_without_pidfd_open(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as watched:
        descriptor = template_module._descriptor_of(watched.pid)
        assert not select.select([descriptor], [], [], 0)[0]
        watched.kill()
        assert select.select([descriptor], [], [], 20.0)[0]
        os.close(descriptor)
    with pytest.raises(ProcessLookupError, match=f"process {watched.pid} cannot be watched"):
        template_module._descriptor_of(watched.pid)


def test_a_template_of_another_user_is_not_asked_for_workers(monkeypatch):
    result(spawn(), os.getpid)
    left = template()
    monkeypatch.setattr(template_module, "_credentials", lambda _: (left.pid, os.geteuid() + 1))
    monkeypatch.setattr(template_module, "_SPLIT_SECONDS", 0.1)
    worker = spawn()
    assert psutil.Process(worker.pid).ppid() == os.getpid(), "the worker was forked"
    worker.close()


def test_a_process_with_threads_of_a_library_does_not_become_a_template(with_threads):
    for _ in range(2):
        first, own = result(spawn(with_threads), where_imported)
        assert first == own


def test_a_process_with_a_thread_of_python_does_not_become_a_template(imported, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    for _ in range(2):
        first, own = result(spawn(imported), where_imported)
        assert first == own


def test_a_process_whose_imports_opened_the_gpu_driver_does_not_become_a_template(imported, tmp_path):
    (tmp_path / "imported_once.py").write_text(
        "import os\nfrom sparkhvd.task.worker import template\nIMPORTED_IN = os.getpid()\n"
        "DRIVER = open('/dev/full')\ntemplate._GPU_DRIVERS = {'/dev/full'}\n"
    )
    for _ in range(2):
        first, own = result(spawn(imported), where_imported)
        assert first == own


def test_a_thread_that_ends_while_threads_are_listed_is_omitted(tmp_path, monkeypatch):
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    (tmp_path / "1" / "comm").write_text("python\n")
    monkeypatch.setattr(template_module, "_THREADS", tmp_path)
    assert template_module.native_threads() == {1}


def test_a_template_is_reached_through_descriptors_of_any_number():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 1024)
    try:
        assert template_module._readable([high], 0.0) == set()
        os.write(writer, b"1")
        assert template_module._readable([high], float("inf")) == {high}
    finally:
        for descriptor in (reader, writer, high):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
