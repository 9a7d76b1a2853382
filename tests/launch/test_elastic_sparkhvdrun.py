"""Elastic programs that ``sparkhvdrun`` starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.scripts import ROOT
from tests.waiting import wait_for

TRAIN = Path(__file__).with_name("train_elastic.py")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "sparkhvd.cli.run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def test_a_program_survives_the_loss_of_a_rank_and_gets_a_new_one(tmp_path):
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    discovery = ("--host-discovery-script", script, "--slots-per-host", 2)
    limits = ("-np", 2, "--min-np", 1, "--elastic-timeout", 30, "--reset-limit", 5)
    command = (sys.executable, TRAIN, tmp_path, 30)
    with start(*limits, *discovery, "--blacklist-cooldown-range", 0.5, 5, *command) as running:
        wait_for((tmp_path / "running").exists)
        os.kill(max(pids(tmp_path)), signal.SIGKILL)
        stdout, stderr = running.communicate(timeout=90)
    assert running.returncode == 0, stdout + stderr
    assert sorted(stdout.splitlines()) == [
        f"[{rank}]<stdout>:sizes (2, 1, 2) environment {rank} 2" for rank in range(2)
    ]
    assert "was killed by signal 9 (SIGKILL)" in stderr
    assert len(pids(tmp_path)) == 3


def test_a_program_that_loses_all_ranks_resumes_from_its_last_published_commit(tmp_path):
    commits = ("--store", tmp_path / "store", "--commit-interval", 0)
    command = (sys.executable, TRAIN, tmp_path, 30)
    with start("-np", 1, "--min-np", 1, "--blacklist-cooldown-range", 0.5, 5, *commits, *command) as running:
        wait_for((tmp_path / "running").exists)
        os.kill(*pids(tmp_path), signal.SIGKILL)
        (tmp_path / "end").touch()
        stdout, stderr = running.communicate(timeout=90)
    assert running.returncode == 0, stdout + stderr
    assert stdout == "[0]<stdout>:sizes (1, 1) environment 0 1\n", "it has the sizes from before the loss"
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()], "deleted after the job"


def test_a_program_that_fails_every_time_ends_the_job():
    program = "from sparkhvd.comm import session; session.init(); raise SystemExit(4)"
    limits = ("-np", 2, "--min-np", 1, "--blacklist-cooldown-range", 0.1, 0.1)
    with start(*limits, sys.executable, "-c", program) as running:
        _, stderr = running.communicate(timeout=90)
    assert running.returncode == 1
    assert "ended with exit code 4: " in stderr
    assert "Ranks have failed like this 3 times without a new commit in between" in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_no_rank_outlives_the_command(tmp_path, number):
    with start("-np", 2, "--min-np", 1, sys.executable, TRAIN, tmp_path, 10**9) as running:
        wait_for((tmp_path / "running").exists)
        running.send_signal(number)
        running.communicate(timeout=60)
    assert running.returncode == (128 + number if number == signal.SIGTERM else -number)
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids(tmp_path)), 30)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-np", 3), "--max-np is for elastic jobs. Pass --min-np or --host-discovery-script, too."),
        (("--min-np", 3, "-H", "elsewhere:2"), "min_num_proc=3 is more than the 2 slots of the hosts (elsewhere:2)."),
        (("--host-discovery-script", "true", "-H", "a:2"), "--host-discovery-script and a list of hosts contradict"),
        (("--min-np", 1, "--mpi"), "mpirun cannot start an elastic job"),
        (("--min-np", 1, "-H", "elsewhere:2", "--mpi"), "mpirun cannot start an elastic job"),
        (("--min-np", 1, "--slots-per-host", 0), "--slots-per-host must be at least 1, got 0."),
        (("--host-discovery-script", "/does/not/exist"), "is not an executable file"),
        (("-np", 1, "--min-np", 2), "must not decrease in this order"),
    ],
)
def test_flags_that_cannot_work_are_rejected(capsys, arguments, message):
    from sparkhvd.cli.run import main  # noqa: PLC0415

    assert main([*map(str, arguments), "true"]) == 1
    assert message in capsys.readouterr().err
