from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from pathlib import Path

import psutil
import pytest

import sparkhvd
from sparkhvd.driver.launcher import LaunchRequest
from sparkhvd.driver.launchers.local import LocalLauncher
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.user_code.payload import pickle_call
from sparkhvd.errors import ConfigError, LaunchError, RankFailedError, StartTimeoutError
from sparkhvd.task.job import Job
from tests.scripts import ROOT


def sum_of_ranks(offset: int) -> tuple[int, float, str | None]:
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    rank = session.current().world.rank
    print("said by", rank)
    total = session.current().allreduce(np.array([rank + 1.0]), ReduceOp.SUM, name="sum")[0]
    return rank, float(total) + offset, os.environ.get("MINE")


def test_ranks_run_on_this_machine_with_log_files_on_request(tmp_path):
    stdout = io.StringIO()
    results = sparkhvd.run(
        sum_of_ranks,
        (10,),
        num_proc=3,
        launcher="local",
        env={"MINE": "yes"},
        stdout=stdout,
        output_filename=str(tmp_path),
    )
    assert results == [(rank, 16.0, "yes") for rank in range(3)]
    assert sorted(stdout.getvalue().splitlines()) == [f"[{rank}]<stdout>:said by {rank}" for rank in range(3)]
    assert (tmp_path / "rank.2" / "stdout").read_text() == "said by 2\n"


def test_without_verbosity_output_goes_only_to_the_given_stream_or_folder(tmp_path, capfd):
    stdout = io.StringIO()
    for given in ({}, {"stdout": stdout}, {"output_filename": str(tmp_path)}):
        sparkhvd.run(sum_of_ranks, (10,), num_proc=1, launcher="local", verbose=0, **given)
    assert capfd.readouterr() == ("", "")
    assert stdout.getvalue() == "[0]<stdout>:said by 0\n"
    assert (tmp_path / "rank.0" / "stdout").read_text() == "said by 0\n"


def environment() -> tuple[dict[str, str], str, list[str]]:
    """Return a rank's environment, its Python, and the import path of a Python that it starts."""
    done = subprocess.run([sys.executable, "-c", "import sys; print(sys.path)"], capture_output=True, check=True)
    return dict(os.environ), sys.executable, ast.literal_eval(done.stdout.decode())


def test_a_rank_and_its_programs_have_the_environment_of_its_task(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, "/added here"])
    (result,) = sparkhvd.run(environment, num_proc=1, launcher="local")
    own = environment()
    assert result[1:] == own[1:]
    of_ranks = re.compile(r"(SPARKHVD|HOROVOD|CUDA)_.*|.*_NUM(_\w+)?_THREADS|LOCAL_RANK")
    left, here = ({k: v for k, v in one[0].items() if not of_ranks.fullmatch(k)} for one in (result, own))
    assert left == here


def test_another_python_finds_the_users_modules_but_not_the_packages_of_this_one(monkeypatch, tmp_path):
    venv.create(tmp_path / "other", symlinks=True)
    other = tmp_path / "other" / "bin" / "python"
    (packages,) = (tmp_path / "other" / "lib").glob("python3*/site-packages")
    # The packages of the other Python.
    Path(packages, "installed.pth").write_text("\n".join([str(ROOT), sysconfig.get_paths()["purelib"]]))
    (tmp_path / "mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "mine")
    (result,) = sparkhvd.run(environment_and_path, num_proc=1, launcher="local", executable=str(other))
    executable, environment_of_rank, path = result
    assert executable == str(other)
    assert str(tmp_path / "mine") in path
    assert path.index(str(packages)) < path.index(sysconfig.get_paths()["purelib"])
    assert environment_of_rank == os.environ.get("PYTHONPATH")


def environment_and_path() -> tuple[str, str | None, list[str]]:
    return sys.executable, os.environ.get("PYTHONPATH"), sys.path


def folder_of_module() -> tuple[str, str | None]:
    import found_twice  # type: ignore[import-not-found]  # noqa: PLC0415

    return found_twice.FOLDER, os.environ.get("PYTHONPATH")


@pytest.mark.parametrize("own_path", ["/a folder/of mine", None])
def test_a_rank_imports_the_modules_of_the_driver_and_not_those_of_the_current_folder(monkeypatch, tmp_path, own_path):
    for name in ("current", "on path"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "found_twice.py").write_text(f"FOLDER = {name!r}\n")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.syspath_prepend(tmp_path / "on path")
    results = sparkhvd.run(folder_of_module, num_proc=1, launcher="local", env={"PYTHONPATH": own_path})
    assert results == [("on path", own_path)]


def fail_on_rank_1(folder: str) -> None:
    Path(folder, os.environ["SPARKHVD_RANK"]).write_text(str(os.getpid()))
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    if os.environ["SPARKHVD_RANK"] == "1":
        raise ValueError("no luck")
    time.sleep(600)


def test_a_failing_rank_ends_the_others(tmp_path):
    with pytest.raises(RankFailedError, match=r"Rank 1 on host \S+ raised ValueError: no luck") as caught:
        sparkhvd.run(fail_on_rank_1, (str(tmp_path),), num_proc=2, launcher="local")
    assert "in fail_on_rank_1" in caught.value.remote_traceback
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.iterdir())


def stay(folder: str) -> None:
    Path(folder, os.environ["SPARKHVD_RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def test_closing_a_job_ends_its_ranks(tmp_path):
    job = Job(payload=pickle_call(stay, (str(tmp_path),), {}), num_proc=2)
    stream = LogStream(io.StringIO(), io.StringIO(), timestamps=False)
    handle = LocalLauncher(LaunchRequest(num_proc=2)).launch(job, stream)
    deadline, pause = time.monotonic() + 60, threading.Event()
    while not [path for path in tmp_path.iterdir() if path.read_text()][1:]:
        assert time.monotonic() < deadline
        pause.wait(0.05)
    handle.close()
    assert not any(psutil.pid_exists(int(path.read_text())) for path in tmp_path.iterdir())


def test_ranks_that_do_not_become_ready_end_in_a_start_timeout(tmp_path):
    hanging = tmp_path / "python"  # it never reads the arguments, which fill its socket
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    options = {"num_proc": 1, "launcher": "local", "start_timeout": 1e-6, "executable": str(hanging)}
    with pytest.raises(StartTimeoutError, match=r"Rank \d on host \S+ was not ready to run fn in time"):
        sparkhvd.run(stay, ("a" * 1_000_000,), **options)


def return_on_rank_1_without_init() -> None:
    from sparkhvd.comm import session  # noqa: PLC0415

    if os.environ["SPARKHVD_RANK"] == "0":
        session.init()


def test_a_rank_that_returns_without_init_is_the_failing_rank():
    with pytest.raises(
        RankFailedError,
        match=r"^Rank 1 on host \S+ did not reach init\(\): it ended while rank 0 waited for it\.",
    ) as raised:
        sparkhvd.run(return_on_rank_1_without_init, num_proc=2, launcher="local")
    assert raised.value.rank == 1


def come_late_on_rank_1() -> None:
    from sparkhvd.comm import session  # noqa: PLC0415

    if os.environ["SPARKHVD_RANK"] == "1":
        threading.Event().wait(600)
    session.init()


def test_init_waits_for_the_start_timeout_of_the_call_and_names_the_missing_rank():
    stdout = io.StringIO()
    with pytest.raises(RankFailedError, match=r"did not reach init\(\): rank 0 waited start_timeout=5 s for rank 1"):
        sparkhvd.run(
            come_late_on_rank_1,
            num_proc=2,
            launcher="local",
            start_timeout=5,
            env={"SPARKHVD_STALL_CHECK_SECONDS": "1"},
            stdout=stdout,
        )
    warning = r"Rank 0 has waited \d s for rank 1 to reach init\(\)\. It gives up after start_timeout=5 s\."
    assert re.search(warning, stdout.getvalue())


def test_more_ranks_than_this_process_may_have_open_files_are_refused_at_once():
    with pytest.raises(ConfigError, match=r"^num_proc=1,099,511,627,776 with launcher='local' needs .*ulimit -Hn"):
        sparkhvd.run(sum_of_ranks, (0,), num_proc=2**40, launcher="local")


def count_connections_to_the_rendezvous() -> int:
    from sparkhvd.comm import session  # noqa: PLC0415

    session.init()
    session.current().barrier()  # now all ranks have connected, and their tasks supervise them
    (_, port), *_ = session.launch_context().rendezvous
    connections = [one for one in psutil.net_connections("tcp") if one.raddr and one.raddr.port == port]
    session.current().barrier()
    return len(connections)


def test_a_rank_and_its_task_have_one_connection_each_to_the_rendezvous():
    results = sparkhvd.run(count_connections_to_the_rendezvous, num_proc=3, launcher="local")
    assert results == [3 * 2] * 3


def test_the_local_launcher_does_not_import_pyspark():
    code = (
        "import sys, sparkhvd\n"
        "def fn(): return 7\n"
        "print(sparkhvd.run(fn, num_proc=1, launcher='local'), 'pyspark' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[7] False\n"


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_a_rank_may_take_any_time_to_deliver_its_result(seconds, monkeypatch):
    monkeypatch.setenv("SPARKHVD_RESULT_TIMEOUT", seconds)
    assert sparkhvd.run(divmod, (7, 2), num_proc=1, launcher="local", verbose=0) == [(3, 1)]


def test_variables_that_are_too_large_together_are_named_as_the_reason():
    env = {f"LARGE_{number}": "x" * 120_000 for number in range(60)}
    with pytest.raises(LaunchError, match=r"environment variables of this process and of env are too large together"):
        sparkhvd.run(divmod, (7, 2), num_proc=1, launcher="local", verbose=0, env=env)


def test_the_largest_variable_reaches_the_ranks():
    assert sparkhvd.run(value_length, num_proc=1, launcher="local", verbose=0, env={"A": "x" * 131_069}) == [131_069]


_OTHER_PARENT = """
import os, signal, sys
import sparkhvd
from sparkhvd.errors import RankFailedError

def collect_children(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[1] == "ignores them" else collect_children)
print(sparkhvd.run(os.system, ("exit 3",), num_proc=2, launcher="local"))
try:
    sparkhvd.run(os.abort, num_proc=2, launcher="local")
except RankFailedError:
    print("failed")
"""


@pytest.mark.parametrize("how", ["ignores them", "collects them"])
def test_a_program_that_does_not_leave_its_ended_children_to_sparkhvd_gets_results_and_errors(how):
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_PARENT, how], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert done.stdout == "[768, 768]\nfailed\n", done.stderr  # os.system returns the exit code times 256
    assert "ChildProcessError" not in done.stderr
    assert "did not end" not in done.stderr


def value_length() -> int:
    return len(os.environ["A"])


def spoil_stdout(how: str) -> str:
    print("said")
    if how == "none":
        sys.stdout = sys.stderr = None
    elif how == "closed":
        sys.stdout.close()
    else:
        sys.stdout = object()
    return how


@pytest.mark.parametrize("how", ["none", "closed", "no stream"])
def test_a_rank_without_a_usable_stdout_delivers_its_result(how):
    stdout = io.StringIO()
    assert sparkhvd.run(spoil_stdout, (how,), num_proc=1, launcher="local", stdout=stdout) == [how]
    assert stdout.getvalue() == "[0]<stdout>:said\n"
