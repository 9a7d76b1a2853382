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
    assert psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=60)[1] == []


@pytest.fixture
def recording_module(tmp_path, monkeypatch) -> str:
    """Write a module that records which process imported it, and return its name."""
    (tmp_path / "imported_once.py").write_text("import os\nIMPORTED_IN = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "imported_once"


@pytest.fixture
def module_with_threads(tmp_path, monkeypatch) -> str:
    """Write a module like ``recording_module`` that also starts a thread when it is imported."""
    (tmp_path / "imported_once.py").write_text(
        "import os, threading\nIMPORTED_IN = os.getpid()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "imported_once"


class RecordingLog:
    """A log that records the output of a worker."""

    rank = 0

    def __init__(self) -> None:
        self.written: list[tuple[str, bytes]] = []

    def started(self) -> None: ...

    def write(self, stream: str, content: bytes) -> None:
        self.written.append((stream, content))

    def close(self) -> None: ...


def spawn(*preload: str, seconds: float = WARM_SECONDS, log: RecordingLog | None = None, **env: str) -> WorkerProcess:
    worker = WorkerProcess(spawn_worker(env, {}, preload, warm_seconds=seconds), log or RecordingLog())
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
    """Return the ids of the process that imported the module and of this process."""
    import imported_once  # noqa: PLC0415

    return imported_once.IMPORTED_IN, os.getpid()


def check_that_no_worker_is_forked(module: str, seconds: float = WARM_SECONDS) -> None:
    for _ in range(2):
        importer, pid = result(spawn(module, seconds=seconds), where_imported)
        assert importer == pid


def test_the_next_worker_is_forked_with_the_imports_of_the_first(recording_module):
    importer, pid = result(spawn(recording_module), where_imported)
    assert importer == pid
    for _ in range(2):
        next_importer, pid = result(spawn(recording_module), where_imported)
        assert next_importer == importer
        assert pid != importer


def test_a_template_is_forked_while_no_other_thread_imports(recording_module, tmp_path):
    (tmp_path / "slowly_imported.py").write_text("import time\ntime.sleep(1)\ndef nothing(): ...\n")
    nothing = importlib.import_module("slowly_imported").nothing

    class Commits:
        """An object whose unpickling imports the module."""

        def __reduce__(self):
            return nothing, ()

    (importer, _), (next_importer, _) = [
        result(spawn(recording_module), where_imported, commits=Commits()) for _ in range(2)
    ]
    assert importer == next_importer


def test_without_warm_seconds_no_worker_is_forked(recording_module):
    check_that_no_worker_is_forked(recording_module, seconds=0.0)


@pytest.mark.parametrize(
    "change", [{"OMP_NUM_THREADS": "3"}, pytest.param({"PYTHONHASHSEED": "5"}, marks=pytest.mark.soak)]
)
def test_a_worker_with_other_variables_is_not_forked(recording_module, change):
    result(spawn(recording_module), where_imported)
    importer, pid = result(spawn(recording_module, **change), where_imported)
    assert importer == pid


def test_three_kinds_of_jobs_keep_their_templates_and_a_fourth_kind_replaces_the_oldest(recording_module):
    def importer_of_job(kind: str) -> int:
        return result(spawn(recording_module, KIND=kind), where_imported)[0]

    importers = {kind: importer_of_job(kind) for kind in "abc"}
    assert len(set(importers.values())) == 3
    assert {kind: importer_of_job(kind) for kind in "abc"} == importers
    importer_of_job("d")
    assert [importer_of_job(kind) == importers[kind] for kind in "bca"] == [True, True, False]


def test_workers_that_start_together_import_once(recording_module):
    workers = [spawn(recording_module) for _ in range(3)]
    results = [result(worker, where_imported) for worker in workers]
    assert len({pid for _, pid in results}) == 3
    assert {importer for importer, _ in results} == {results[0][1]}


def test_workers_are_not_forked_if_the_first_worker_leaves_no_template(module_with_threads, monkeypatch):
    def job() -> None:
        workers = [spawn(module_with_threads) for _ in range(2)]
        for importer, pid in [result(worker, where_imported) for worker in workers]:
            assert importer == pid

    job()
    tries, bind = [], template_module._bind
    monkeypatch.setattr(template_module, "_bind", lambda address: tries.append(address) or bind(address))
    job()
    assert len(tries) == 2, "only the workers of the first job wait"


def test_a_worker_is_not_forked_after_an_installation(recording_module, tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    monkeypatch.setattr(template_module.sysconfig, "get_path", lambda _: str(packages))
    importer, _ = result(spawn(recording_module), where_imported)
    assert result(spawn(recording_module), where_imported)[0] == importer
    (packages / "new-1.0.dist-info").mkdir()
    assert result(spawn(recording_module), where_imported)[0] != importer


def test_a_worker_is_not_forked_after_an_installation_into_another_folder_of_the_import_path(
    recording_module, tmp_path
):
    importer, _ = result(spawn(recording_module), where_imported)
    (tmp_path / "new-1.0.dist-info").mkdir()
    installed, _ = result(spawn(recording_module), where_imported)
    assert installed != importer
    assert result(spawn(recording_module), where_imported)[0] == installed
    (tmp_path / "newer-1.0.dist-info").mkdir()
    assert result(spawn(recording_module), where_imported)[0] != installed


def test_a_worker_is_forked_even_if_python_has_no_folder_for_packages(recording_module, tmp_path, monkeypatch):
    monkeypatch.setattr(template_module.sysconfig, "get_path", lambda _: str(tmp_path / "missing"))
    importer, _ = result(spawn(recording_module), where_imported)
    assert result(spawn(recording_module), where_imported)[0] == importer


def test_a_worker_is_not_forked_after_a_change_of_an_imported_module(recording_module, tmp_path):
    importer, _ = result(spawn(recording_module), where_imported)
    module = tmp_path / "imported_once.py"
    module.write_text(module.read_text() + "CHANGED = True\n")
    changed, pid = result(spawn(recording_module), where_imported)
    assert changed == pid
    next_importer, _ = result(spawn(recording_module), where_imported)
    assert next_importer != importer
    assert result(spawn(recording_module), where_imported)[0] == next_importer, (
        "the next template has the changed module"
    )


def test_a_worker_is_not_forked_after_a_change_of_a_zip_file_with_an_imported_module(
    recording_module, tmp_path, monkeypatch
):
    def write(content: str) -> None:
        with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:
            archive.writestr("imported_once.py", content)

    content = (tmp_path / "imported_once.py").read_text()
    write(content)
    monkeypatch.syspath_prepend(str(tmp_path / "modules.zip"))
    importer, _ = result(spawn(recording_module), where_imported)
    assert result(spawn(recording_module), where_imported)[0] == importer
    write(content + "CHANGED = True\n")
    changed, pid = result(spawn(recording_module), where_imported)
    assert changed == pid


def test_a_worker_is_not_forked_after_a_change_of_a_zip_file_without_an_imported_module(
    recording_module, tmp_path, monkeypatch
):
    def write(content: str) -> None:
        with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:
            archive.writestr("imported_later.py", content)

    def value() -> object:
        import imported_later  # noqa: PLC0415

        return imported_later.VALUE

    write("VALUE = 'first'")
    monkeypatch.syspath_prepend(str(tmp_path / "modules.zip"))
    importer, _ = result(spawn(recording_module), where_imported)
    assert result(spawn(recording_module), where_imported)[0] == importer
    assert result(spawn(recording_module), value) == "first"
    write("VALUE = 'changed'")
    assert result(spawn(recording_module), value) == "changed"


def test_a_forked_worker_does_not_read_the_directories_of_zip_files_again(recording_module, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:
        archive.writestr("imported_later.py", "VALUE = 1")

    def finder() -> object:
        import sys  # noqa: PLC0415

        return sys.path_importer_cache.get(zip_path)

    zip_path = str(tmp_path / "modules.zip")
    monkeypatch.syspath_prepend(zip_path)
    result(spawn(recording_module), finder)
    assert result(spawn(recording_module), finder) is None


def change_umask(_: Path) -> Callable[[], object]:
    before = os.umask(0o077)
    return lambda: os.umask(before)


def lower_the_limit_of_open_files(_: Path) -> Callable[[], object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ignore_a_signal(_: Path) -> Callable[[], object]:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # not SIGHUP, which nohup already ignores
    return lambda: signal.signal(signal.SIGUSR2, before)


def replace_the_current_folder(folder: Path) -> Callable[[], object]:
    folder.rename(folder.with_name("former"))
    folder.mkdir()
    os.chdir(folder)
    return lambda: None


INHERITED = [change_umask, lower_the_limit_of_open_files, ignore_a_signal, replace_the_current_folder]


@pytest.mark.parametrize("change", INHERITED)
def test_a_change_of_inherited_state_needs_another_template(tmp_path, monkeypatch, change):
    def address():
        return template_module.Origin.of(("python",), {}).address

    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = address()
    assert address() == before
    restore = change(folder)
    try:
        assert address() != before
    finally:
        restore()


@pytest.mark.parametrize(
    "change", [INHERITED[0], *(pytest.param(change, marks=pytest.mark.soak) for change in INHERITED[1:])]
)
def test_a_worker_is_not_forked_after_a_change_of_inherited_state(recording_module, tmp_path, monkeypatch, change):
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    result(spawn(recording_module), where_imported)
    restore = change(folder)
    try:
        changed, pid = result(spawn(recording_module), where_imported)
        assert changed == pid
    finally:
        restore()


def test_a_worker_is_forked_in_a_folder_that_was_removed(recording_module, tmp_path, monkeypatch):
    folder = tmp_path / "current"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    importer, _ = result(spawn(recording_module), where_imported)
    assert result(spawn(recording_module), where_imported)[0] == importer


def process_state() -> dict[str, object]:
    Path(os.environ["SPARKHVD_SCRATCH"], "file").write_text("1")
    return {
        "scratch": os.environ["SPARKHVD_SCRATCH"],
        "group": os.getpgid(0) == os.getpid() == os.getsid(0),
        "signals": [signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGTERM)],
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "inherited": subprocess.check_output(["/bin/ls", "/proc/self/fd"], close_fds=False).split(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "arguments": sys.argv[0],
        "variables": {name: value for name, value in os.environ.items() if name != "SPARKHVD_SCRATCH"},
        "folder": os.getcwd(),  # noqa: PTH109
    }


def test_a_forked_worker_has_the_state_of_a_new_one():
    new, forked = result(spawn("numpy"), process_state), result(spawn("numpy"), process_state)
    scratch = new.pop("scratch"), forked.pop("scratch")
    assert scratch[0] != scratch[1]
    assert not any(Path(folder).exists() for folder in scratch)
    assert forked == new
    assert forked["group"] is True
    assert forked["inherited"] == [b"0", b"1", b"2", b"3"]  # the last one is the folder that ls reads


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
    result(spawn("numpy"), is_missing, "added_later")
    (tmp_path / "added_later.py").write_text("")
    assert result(spawn("numpy"), is_missing, "added_later") is False


def is_missing(name: str) -> bool:
    import importlib.util  # noqa: PLC0415

    return importlib.util.find_spec(name) is None


def write_to_both() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)


def test_the_output_of_a_forked_worker_reaches_its_log():
    logs = [RecordingLog(), RecordingLog()]
    for log in logs:
        result(spawn(log=log), write_to_both)
    assert [sorted(log.written) for log in logs] == [[("stderr", b"to stderr"), ("stdout", b"to stdout")]] * 2


def test_the_error_of_a_forked_worker_is_reported():
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


def start_child(worker: WorkerProcess, path: Path) -> psutil.Process:
    start(worker, start_child_and_stay, str(path))
    pause = threading.Event()
    while not path.exists():
        pause.wait(0.02)
    return psutil.Process(int(path.read_text()))


def test_killing_a_forked_worker_ends_its_children(tmp_path):
    result(spawn(), os.getpid)
    worker = spawn()
    child = start_child(worker, tmp_path / "pid")
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.events.get(timeout=60.0) == Exited(-signal.SIGKILL)
    worker.close()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_closing_a_forked_worker_waits_for_the_end_of_its_process():
    result(spawn(), os.getpid)
    for _ in range(5):
        worker = spawn()
        worker.close()
        assert not psutil.pid_exists(worker.pid)


def test_closing_a_forked_worker_ends_its_process_group(tmp_path):
    result(spawn(), os.getpid)
    worker = spawn()
    child = start_child(worker, tmp_path / "pid")
    worker.close()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def parent_of(worker: WorkerProcess) -> psutil.Process:
    """Return the parent of a forked worker."""
    parent = psutil.Process(worker.pid).parent()
    assert parent.pid != os.getpid(), "the worker was not forked"
    return parent


def test_the_loss_of_a_forked_workers_parent_counts_as_a_kill(tmp_path):
    result(spawn(), os.getpid)
    worker = spawn()
    child = start_child(worker, tmp_path / "pid")
    parent_of(worker).kill()
    assert worker.events.get(timeout=60.0) == Exited(-signal.SIGKILL)
    worker.close()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def current_template() -> psutil.Process:
    """Fork a worker, and return the template from which its parent was forked."""
    worker = spawn()
    process = parent_of(worker).parent()
    assert process.name() == TEMPLATE_NAME
    worker.close()
    return process


def test_a_killed_template_is_replaced():
    result(spawn(), os.getpid)
    killed = current_template()
    killed.kill()
    psutil.wait_procs([killed], timeout=60)
    result(spawn(), os.getpid)  # the new template's first worker
    assert current_template().pid != killed.pid


def test_a_worker_that_is_forked_too_late_ends_and_leaves_nothing_behind(tmp_path, monkeypatch):
    result(spawn(), os.getpid)
    slow_template = current_template()
    slow_template.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(template_module, "_FORK_SECONDS", 0.1)
        worker = spawn()
    assert psutil.Process(worker.pid).ppid() == os.getpid(), "the worker was forked"
    start(worker, start_child_and_stay, str(tmp_path / "pid"))
    slow_template.resume()
    result(spawn(), os.getpid)  # the template serves the earlier request first
    assert psutil.wait_procs(slow_template.children(recursive=True), timeout=60)[1] == []
    assert Path(psutil.Process(worker.pid).environ()["SPARKHVD_SCRATCH"]).is_dir()
    worker.close()


def test_a_worker_that_waits_for_a_template_has_no_scratch_folder_yet(recording_module, tmp_path, monkeypatch):
    imports_may_end = tmp_path / "imports may end"
    with (tmp_path / f"{recording_module}.py").open("a") as file:
        file.write(f"import time\nwhile not os.path.exists({str(imports_may_end)!r}):\n    time.sleep(0.01)\n")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(scratch_module, "local_folders", lambda: (str(tmp_path / "scratch"),))
    folder_counts, bind = [], template_module._bind

    def count_folders_and_bind(address: str) -> object:
        folder_counts.append(len(list((tmp_path / "scratch").iterdir())))
        if len(folder_counts) > 1:  # the second worker waits
            imports_may_end.touch()
        return bind(address)

    monkeypatch.setattr(template_module, "_bind", count_folders_and_bind)
    workers = [spawn(recording_module) for _ in range(2)]
    assert set(folder_counts[1:]) == {1}, "only the first worker has a scratch folder"
    for worker in workers:
        result(worker, where_imported)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_only_the_first_worker_waits_for_a_process_that_occupies_the_address_of_a_template(
    recording_module, monkeypatch
):
    tries, bind, original_of = [], template_module._bind, template_module.Origin.of
    occupied_addresses = []

    def occupy_the_address_first(*arguments: Any) -> template_module.Origin:
        origin = original_of(*arguments)
        if not occupied_addresses:
            occupied_addresses.append(bind(origin.address))
        return origin

    monkeypatch.setattr(process_module.Origin, "of", occupy_the_address_first)
    monkeypatch.setattr(template_module, "_bind", lambda address: tries.append(address) or bind(address))
    monkeypatch.setattr(template_module, "_SPLIT_SECONDS", 0.1)
    result(spawn(recording_module), where_imported)
    assert len(tries) > 1
    tries.clear()
    result(spawn(recording_module), where_imported)
    assert len(tries) == 1
    occupied_addresses[0].close()


def test_a_template_ends_when_it_is_idle_and_its_workers_do_not(tmp_path):
    result(spawn(seconds=1.0), os.getpid)
    worker = spawn(seconds=1.0)
    idle = psutil.Process(worker.pid).parent().parent()
    child = start_child(worker, tmp_path / "pid")
    assert psutil.wait_procs([idle], timeout=60)[1] == []
    assert child.is_running()
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.events.get(timeout=60.0) == Exited(-signal.SIGTERM)
    worker.close()


def test_a_template_ends_with_the_process_that_started_it(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_template as t; import os; "
        "t.result(t.spawn(), os.getpid); print(t.current_template().pid, flush=True); sys.stdin.read()"
    )
    folder = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", program, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        template_process = psutil.Process(int(owner.stdout.readline()))
        assert template_process.is_running()
        owner.kill()
    assert psutil.wait_procs([template_process], timeout=60)[1] == []


def test_a_template_of_a_spark_task_outlives_the_task_and_ends_with_the_executor(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as executor:
        original_of = template_module.Origin.of
        monkeypatch.setattr(
            process_module.Origin, "of", lambda *arguments: replace(original_of(*arguments), owner=executor.pid)
        )
        result(spawn(), os.getpid)
        template_process = current_template()
        process_module.TEMPLATES.close()
        assert current_template() == template_process, "another task of the executor finds the template"
        executor.kill()
        assert psutil.wait_procs([template_process], timeout=60)[1] == []


def test_a_python_without_pidfd_open_can_watch_a_process(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as watched:
        descriptor = template_module.descriptor_of(watched.pid)
        assert not select.select([descriptor], [], [], 0)[0]
        watched.kill()
        assert select.select([descriptor], [], [], 20.0)[0]
        os.close(descriptor)
    with pytest.raises(ProcessLookupError, match=f"process {watched.pid} cannot be watched"):
        template_module.descriptor_of(watched.pid)


def test_a_template_of_another_user_receives_no_requests(monkeypatch):
    result(spawn(), os.getpid)
    template_process = current_template()
    monkeypatch.setattr(template_module, "credentials", lambda _: (template_process.pid, os.geteuid() + 1))
    monkeypatch.setattr(template_module, "_SPLIT_SECONDS", 0.1)
    worker = spawn()
    assert psutil.Process(worker.pid).ppid() == os.getpid(), "the worker was forked"
    worker.close()


def test_a_process_whose_imports_start_a_thread_does_not_become_a_template(module_with_threads):
    check_that_no_worker_is_forked(module_with_threads)


def test_a_process_that_starts_with_a_thread_does_not_become_a_template(recording_module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    check_that_no_worker_is_forked(recording_module)


def test_a_process_whose_imports_open_the_gpu_driver_does_not_become_a_template(recording_module, tmp_path):
    (tmp_path / "imported_once.py").write_text(
        "import os\nfrom sparkhvd.task.worker import template\nIMPORTED_IN = os.getpid()\n"
        "DRIVER = open('/dev/full')\ntemplate._GPU_DRIVERS = {'/dev/full'}\n"
    )
    check_that_no_worker_is_forked(recording_module)


def test_a_thread_that_ends_while_threads_are_listed_is_omitted(tmp_path, monkeypatch):
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    (tmp_path / "1" / "comm").write_text("python\n")
    monkeypatch.setattr(template_module, "_THREADS", tmp_path)
    assert template_module.native_threads() == {1}


def test_a_process_name_that_ends_within_a_character_is_no_error():
    name = Path("/proc/self/comm")  # of a script with a long name, which the kernel cuts
    before = name.read_bytes()
    name.write_bytes("обучение".encode()[:15])
    try:
        assert threading.get_native_id() in template_module.native_threads()
        assert any(line.startswith("Uid:") for line in template_module.Origin.of(("python",), {}).inherited)
    finally:
        name.write_bytes(before)


def test_descriptors_above_the_limit_of_select_are_polled():
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
