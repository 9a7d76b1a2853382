from __future__ import annotations

import os
import queue
import re
import signal
import sys
import threading
from pathlib import Path

import cloudpickle
import psutil
import pytest

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.config import Config
from sparkhvd.errors import (
    AuthenticationError,
    CollectiveError,
    DeadlineExceededError,
    MismatchError,
    ParamError,
    PeerLostError,
    SchemaError,
)
from sparkhvd.task.job import Job
from sparkhvd.task.worker.command import CommandEndedError
from sparkhvd.task.worker.exit import Exited
from sparkhvd.task.worker.main import run_payload
from sparkhvd.task.worker.output import DriverLog
from sparkhvd.task.worker.process import WorkerProcess, spawn_worker
from sparkhvd.task.worker.spec import FnEnded, Leave, Raised, Ready, Returned, WorkerSpec


def call(fn, *args) -> bytes:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        return cloudpickle.dumps((fn, args, {}))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def throw(error):
    raise error


def throw_from(error, cause):
    raise error from cause


def leave_with(code):
    sys.exit(code)


def test_the_result_is_pickled():
    report = run_payload(call(divmod, 7, 2))
    assert isinstance(report, Returned)
    assert cloudpickle.loads(report.content) == (3, 1)


def test_an_exception_is_reported_with_its_traceback():
    report = run_payload(call(throw, ValueError("bad value")))
    assert isinstance(report, Raised)
    assert report.cause == "raised ValueError: bad value"
    assert "in throw" in report.traceback
    assert not report.secondary


def assert_nothing() -> None:
    raise AssertionError


def test_an_error_without_a_message_is_reported_with_its_line():
    cause = run_payload(call(assert_nothing)).cause
    assert re.fullmatch(r"raised AssertionError: line \d+ of test_main\.py: raise AssertionError", cause)


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def test_an_error_whose_text_raises_is_reported_by_its_type():
    report = run_payload(call(throw, UnprintableError()))
    assert report.cause == "raised UnprintableError: (its message cannot be shown, because its str() raises KeyError)"
    assert "UnprintableError" in report.traceback


class Unpicklable:
    def __reduce__(self):
        raise UnprintableError


def test_a_result_whose_pickling_raises_such_an_error_is_reported_too():
    cause = run_payload(call(Unpicklable)).cause
    assert cause.startswith("returned a Unpicklable that cannot be pickled: (its message cannot be shown")


def throw_from_its_consequence() -> None:
    first, second = ValueError("first"), ValueError("second")
    try:
        raise second from first
    except ValueError as error:
        raise first from error


def test_an_error_that_caused_its_own_cause_is_reported():
    report = run_payload(call(throw_from_its_consequence))
    assert report.cause == "raised ValueError: first"
    assert not report.secondary


def test_exit_codes_are_described_by_their_cause():
    assert isinstance(run_payload(call(leave_with, 0)), Returned)
    assert isinstance(run_payload(call(leave_with, None)), Returned)
    assert run_payload(call(leave_with, 4)).cause == "called sys.exit(4)"
    assert run_payload(call(leave_with, "no")).cause == "called sys.exit('no')"


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (PeerLostError("gone"), True),
        (DeadlineExceededError("late"), True),
        (AuthenticationError("rank 1 does not know the secret"), True),
        (CollectiveError("rank 1: listen on 127.0.0.1:0: Address already in use"), True),
        (CollectiveError("receive from rank 1: rank 1 aborted: shapes differ"), True),
        (CollectiveError("rank 0: listen on 127.0.0.1:0: Address already in use"), False),
        (CollectiveError("rank 0: connect to rank 1: Cannot assign requested address"), False),
        (CollectiveError("no rendezvous server answered at 127.0.0.1:40005: connect: Cannot assign it"), False),
        (MismatchError("shapes"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_the_loss_of_a_peer_is_a_secondary_failure(error, secondary):
    assert run_payload(call(throw, error)).secondary is secondary


def test_a_wrapped_loss_of_a_peer_is_a_secondary_failure_too():
    assert run_payload(call(throw_from, RuntimeError("step failed"), PeerLostError("gone"))).secondary


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no luck\nat all"), "ValueError: no luck"),
        (TypeError("cannot add <Row object at 0x7f32A1>"), "TypeError: cannot add <Row object at 0x...>"),
        (MismatchError("shapes differ"), "MismatchError: shapes differ"),
        (SystemExit(3), "exit code 3"),
        (SystemExit("no rows"), "SystemExit: no rows"),
        (CommandEndedError("ended with exit code 1: python train.py", 1), "exit code 1"),
        (CommandEndedError("was killed by signal 9 (SIGKILL): python train.py", -9), ""),
        (SystemExit(143), ""),
        (KeyboardInterrupt(), ""),
        (PeerLostError("gone"), ""),
        (DeadlineExceededError("late"), ""),
    ],
)
def test_the_description_of_an_error_does_not_depend_on_the_occurrence(error, expected):
    assert run_payload(call(throw, error)).error == expected


@pytest.mark.parametrize("error", [ParamError("rows"), SchemaError("no column"), MismatchError("shapes differ")])
def test_an_error_of_the_program_or_its_input_is_final(error):
    assert run_payload(call(throw, error)).is_final
    assert not run_payload(call(throw, ValueError(str(error)))).is_final


def test_a_module_missing_on_the_worker_is_named_with_a_remedy():
    payload = cloudpickle.dumps((os.path.join, (), {})).replace(b"posixpath", b"posixpxth")
    report = run_payload(payload)
    assert "cannot import the module 'posixpxth' that fn needs" in report.cause
    assert "addPyFile" in report.cause


def test_a_result_that_cannot_be_pickled_is_named():
    assert "returned a lock that cannot be pickled" in run_payload(call(make_lock)).cause


def make_lock():
    import threading  # noqa: PLC0415

    return threading.Lock()


@pytest.fixture
def worker():
    process = WorkerProcess(spawn_worker({"MINE": "1"}, {"OMP_NUM_THREADS": "7"}, ("json",)), DriverLog(Job(b"", 1)))
    process.output.start()
    yield process
    process.close()


def spec(fn, *args) -> WorkerSpec:
    return WorkerSpec(LaunchContext(), call(fn, *args), (("SPARKHVD_RANK", "0"), ("SPARKHVD_LOG_LEVEL", "20")), None)


def event(worker: WorkerProcess):
    return worker.events.get(timeout=60.0)


def environment() -> dict[str, str]:
    return dict(os.environ)


def test_a_worker_runs_fn_in_the_environment_of_its_rank(worker, monkeypatch):
    worker.send(spec(environment))
    assert event(worker) == Ready()
    assert event(worker) == FnEnded(Config().result_timeout)
    result = cloudpickle.loads(event(worker).content)
    assert (result["MINE"], result["SPARKHVD_RANK"]) == ("1", "0")
    assert result["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "7")
    worker.send(Leave(10.0))
    assert event(worker) == Exited(0)


def fork_and_leave(how):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        print(f"child, {how}", end="")
        os.close(read)
        if how == "raises":
            raise ValueError("of the child")
        if how == "exits":
            sys.exit(7)
        return "of the child"
    os.close(write)
    os.read(read, 1)  # returns once the child has ended
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 1), ("exits", 7)])
def test_a_forked_child_that_leaves_fn_ends_and_sends_no_report_of_its_rank(worker, how, code):
    worker.send(spec(fork_and_leave, how))
    assert event(worker) == Ready()
    assert event(worker) == FnEnded(Config().result_timeout)
    report = event(worker)
    assert isinstance(report, Returned)
    assert cloudpickle.loads(report.content) == code
    worker.send(Leave(10.0))
    assert event(worker) == Exited(0)


def test_a_worker_finds_the_yarn_tokens_of_its_task(monkeypatch):
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", "/container/container_tokens")
    process = WorkerProcess(spawn_worker({}, {}, ()), DriverLog(Job(b"", 1)))
    try:
        process.output.start()
        process.send(spec(environment))
        assert event(process) == Ready()
        assert event(process) == FnEnded(Config().result_timeout)
        result = cloudpickle.loads(event(process).content)
    finally:
        process.close()
    assert result["HADOOP_TOKEN_FILE_LOCATION"] == "/container/container_tokens"


def fork_and_stay(path):
    import subprocess  # noqa: PLC0415

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    with open(path, "w") as file:  # noqa: PTH123
        file.write(str(child.pid))
    import time  # noqa: PLC0415

    time.sleep(600)


def await_pid(path, worker) -> psutil.Process:
    while not (path.exists() and path.read_text()):
        with pytest.raises(queue.Empty):
            worker.events.get(timeout=0.05)
    return psutil.Process(int(path.read_text()))


def test_children_of_a_killed_worker_end_with_it(worker, tmp_path):
    worker.send(spec(fork_and_stay, str(tmp_path / "pid")))
    assert event(worker) == Ready()
    child = await_pid(tmp_path / "pid", worker)
    os.kill(worker.pid, signal.SIGKILL)
    assert event(worker) == Exited(-9)
    worker.close()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def write_scratch_and_stay(path):
    folder = Path(os.environ["SPARKHVD_SCRATCH"])
    (folder / "epoch").mkdir()
    (folder / "epoch" / "weights").write_text("1")
    Path(path).write_text(f"{os.getpid()} {folder}")
    threading.Event().wait()


def test_the_folder_of_a_killed_worker_is_removed(worker, tmp_path):
    worker.send(spec(write_scratch_and_stay, str(tmp_path / "said")))
    assert event(worker) == Ready()
    pause = queue.SimpleQueue()
    while not ((tmp_path / "said").exists() and (tmp_path / "said").read_text()):
        with pytest.raises(queue.Empty):
            pause.get(timeout=0.05)
    pid, folder = (tmp_path / "said").read_text().split()
    assert Path(folder, "epoch", "weights").exists()
    os.kill(int(pid), signal.SIGKILL)
    assert event(worker) == Exited(-9)
    worker.close()
    assert not Path(folder).exists()


def test_a_worker_and_its_children_end_when_their_task_is_killed(tmp_path):
    program = (
        "import os, sys, threading; sys.path.insert(0, sys.argv[1]); import test_main as t; "
        "from pathlib import Path; w = t.WorkerProcess(t.spawn_worker({}, {}, ()), t.DriverLog(t.Job(b'', 1))); "
        "w.send(t.spec(t.fork_and_stay, sys.argv[2])); Path(sys.argv[3]).write_text(str(w.pid)); "
        "child = os.fork(); child and Path(sys.argv[4]).write_text(str(child)); "
        "threading.Event().wait()"
    )
    pid_files = [tmp_path / name for name in ("child", "worker", "fork of the task")]
    task = psutil.Popen([sys.executable, "-c", program, os.path.dirname(__file__), *map(str, pid_files)])  # noqa: PTH120
    pause = queue.SimpleQueue()
    while not all(path.exists() and path.read_text() for path in pid_files):
        assert task.is_running()
        with pytest.raises(queue.Empty):
            pause.get(timeout=0.05)
    *family, fork = [psutil.Process(int(path.read_text())) for path in pid_files]
    task.kill()
    task.wait()
    try:
        assert psutil.wait_procs(family, timeout=60)[1] == []
    finally:
        fork.kill()  # it holds the task's end of the socket
