"""Open MPI's own mpirun and orted, with processes in place of Spark tasks."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import cloudpickle
import pytest

from sparkhvd.deadline import Deadline
from sparkhvd.errors import LaunchError, RankFailedError
from sparkhvd.rpc.frames import is_host_unreachable
from tests.launch.faults import left_of
from tests.mpi.faults import MPI_FAULTS, complaints, inject
from tests.mpi.rank_functions import (
    end_on_rank_1,
    environment,
    meet_through_both_worlds,
    stay,
)
from tests.mpi.tasks import SECONDS, Launched
from tests.waiting import wait_for


def run(*args, **options):
    return results_of(Launched(*args, **options))


def results_of(launched):
    with closing(launched.handle) as handle:
        handle.wait_started(Deadline.after(SECONDS))
        return [cloudpickle.loads(content) for content in handle.results()]


def test_mpi_and_the_core_agree_on_a_world_of_two_hosts(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stdout = io.StringIO()
    extra_path = "/a folder/of mine"
    # The tasks of the two hosts alternate, but the ranks of a host are neighbors.
    env = {"MINE": "a b='c'", "HOME": None, "PYTHONPATH": os.pathsep.join([extra_path, str(Path(__file__).parents[2])])}
    extra = ("-x", "BY_MPIRUN=c d")  # a variable that mpirun itself passes to the ranks
    launched = Launched(meet_through_both_worlds, containers=("a", "b", "a", "b"), env=env, stdout=stdout, extra=extra)
    results = results_of(launched)
    assert [one["places"] for one in results] == [
        (0, 4, 0, 2, 0, 2),
        (1, 4, 1, 2, 0, 2),
        (2, 4, 0, 2, 1, 2),
        (3, 4, 1, 2, 1, 2),
    ]
    assert [one["mpi"] for one in results] == [(rank, 4) for rank in range(4)]
    for one in results:
        assert one["in environments"]
        assert all(re.fullmatch(r"/proc/\d+/fd/\d+", value) for value in one["in environments"]), "no secret is visible"
    assert [one["sums"] for one in results] == [(10, 10.0)] * 4
    assert [one["env"] for one in results] == [("a b='c'", None, os.environ["TMPDIR"], "1", "c d")] * 4
    assert [one["secrets"] for one in results] == [[]] * 4
    assert all(extra_path in one["path"] and str(tmp_path) not in one["path"] for one in results)
    assert [one["folder"] for one in results] == [str(Path(__file__).parents[2])] * 4, "that of the tasks"
    assert sorted(stdout.getvalue().splitlines()) == [f"[{rank}]<stdout>:said by {rank}" for rank in range(4)]
    # The first task of each host starts its ranks, and the others wait.
    tasks = [process.pid for process in launched.stage.processes]
    assert [one["tasks"] for one in results] == [(tasks[0], 4)] * 2 + [(tasks[1], 4)] * 2


def test_the_users_arguments_override_placement_interfaces_and_shared_memory_of_open_mpi():
    extra = ("--map-by", "node", "-mca", "oob_tcp_if_exclude", "docker0", "--mca", "shmem", "sysv")
    env = {"OMPI_MCA_btl_tcp_if_exclude": "docker0"}
    results = run(meet_through_both_worlds, containers=("a", "b", "a"), extra=extra, env=env)
    assert [one["host"] for one in results] == ["a", "b", "a"]
    assert [one["places"] for one in results] == [(0, 3, 0, 2, 0, 2), (1, 3, 0, 1, 1, 2), (2, 3, 1, 2, 0, 1)]
    assert [one["mpi"] for one in results] == [(rank, 3) for rank in range(3)]
    assert [one["sums"] for one in results] == [(6, 6.0)] * 3
    assert [one["shmem"] for one in results] == ["sysv"] * 3


def test_a_rank_has_the_environment_of_its_task(monkeypatch, tmp_path):
    python = tmp_path / "the path of this Python: with spaces"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    odd = {"MINE": "two\nlines 'and' \"quotes\" $HOME \\", "EMPTY": ""}
    (result,) = run(environment, containers=("a",), env={**odd, "PATH": os.environ["PATH"]})
    of_ranks = re.compile(
        r"(SPARKHVD|HOROVOD|OMPI|PMIX|ORTE|CUDA)_.*|.*_NUM(_\w+)?_THREADS|(HFI|IPATH)_NO_BACKTRACE|LOCAL_RANK|PWD|OLDPWD|_"
    )
    left = {name: value for name, value in result.items() if not of_ranks.fullmatch(name)}
    own = {name: value for name, value in os.environ.items() if not of_ranks.fullmatch(name)}
    assert left == {**own, **odd, "CONTAINER_ID": "a"}
    # Open MPI would test POSIX shared memory, which a killed process would leave.
    assert result["OMPI_MCA_shmem"] == "mmap"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "raised ValueError: no luck (in fn, after init())."),
        pytest.param("exit", "ended with exit code 3 (in fn, after init()).", marks=pytest.mark.soak),
        ("kill", "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_first_rank_that_ends_early_is_named_although_mpirun_kills_the_others(how, words):
    with pytest.raises(RankFailedError) as caught:
        run(end_on_rank_1, how)
    assert caught.value.rank == 1
    assert str(caught.value).startswith(f"Rank 1 on host 127.0.0.1 {words}")
    assert how == "raise" or "last words" in caught.value.stderr_tail


@pytest.mark.parametrize("fault", MPI_FAULTS, ids=lambda fault: fault.name)
def test_every_failure_of_open_mpi_is_one_error_without_leftovers(fault, tmp_path):
    assert complaints(fault, inject(fault, tmp_path)) == []


def test_a_lost_task_is_named_even_if_mpirun_ends_before_its_loss_is_detected(monkeypatch, tmp_path):
    launched = Launched(stay, tmp_path, env={"FAULT_FOLDER": str(tmp_path)})
    ended = launched.handle._mpirun_ended
    has_ended = threading.Event()

    def detect(error: OSError) -> bool:
        has_ended.wait(SECONDS)
        time.sleep(1.0)
        return is_host_unreachable(error)

    with closing(launched.handle):
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
        monkeypatch.setattr(launched.handle._mpirun, "_on_end", lambda *end: (has_ended.set(), ended(*end)))
        monkeypatch.setattr("sparkhvd.driver.launchers.mpi.is_host_unreachable", detect)
        launched.stage.processes[1].kill()
        with pytest.raises(LaunchError, match=r"Task 1 on host 127\.0\.0\.1, the task of rank 1, was lost \("):
            launched.handle.results()
    assert has_ended.is_set()
    assert left_of(tmp_path) == []


def test_a_full_disk_for_the_files_of_mpirun_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(LaunchError, match=r"mpirun cannot be started on the driver's host: .*/no/such/folder"):
        run(meet_through_both_worlds)


@pytest.mark.parametrize("started", [(), ("mpirun",)], ids=["mpirun", "what removes its files"])
def test_a_process_limit_of_the_driver_is_a_clear_error_without_leftovers(started, monkeypatch, tmp_path):
    popen = subprocess.Popen

    def start(command, **options):
        if options.get("start_new_session") and command[0] not in started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(command, **options)

    launched = Launched(meet_through_both_worlds)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sparkhvd.driver.mpi.process.subprocess.Popen", start)
    with closing(launched.handle), pytest.raises(LaunchError, match=r"mpirun cannot be started .*temporarily unavail"):
        launched.handle.results()
    assert list(tmp_path.iterdir()) == []


def test_any_other_failure_to_start_mpirun_ends_the_job(monkeypatch):
    def connect_ring(*_, **__) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("sparkhvd.driver.launchers.mpi.connect_ring", connect_ring)
    with pytest.raises(LaunchError, match="The driver cannot start the ranks: RuntimeError: can't start new thread"):
        run(meet_through_both_worlds)


def test_a_cancelled_job_leaves_no_processes_and_waits_for_its_tasks(monkeypatch, tmp_path):
    monkeypatch.setattr("sparkhvd.driver.launchers.mpi._ROWS_SECONDS", SECONDS)
    launched = Launched(stay, tmp_path, env={"FAULT_FOLDER": str(tmp_path)})
    with closing(launched.handle):
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    assert [process.returncode for process in launched.stage.processes] == [0, 0], "a task was killed"
    assert left_of(tmp_path) == []
