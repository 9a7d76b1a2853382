from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest

from sparkhvd.cli.run import main
from tests.waiting import wait_for

TRAIN = Path(__file__).with_name("train.py")
ROOT = TRAIN.parents[2]


def sparkhvdrun(*arguments, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sparkhvd.cli.run", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        **options,
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def values_by_rank(done: subprocess.CompletedProcess[str], prefix: str = r"\[(\d+)\]<stdout>:") -> dict[int, dict]:
    # Searches the whole text, because mpirun may forward two ranks' outputs without a newline between them.
    matches = re.findall(prefix + r"(\{[^}]*\})", done.stdout)
    assert matches, done.stdout + done.stderr
    return {int(rank): json.loads(text) for rank, text in matches}


def test_a_program_runs_once_per_rank_with_the_settings_of_flags_and_file(tmp_path):
    settings = tmp_path / "settings.yaml"
    settings.write_text("params:\n  cache_capacity: 7\n  cycle_time_ms: 3\nlogging:\n  level: warning\n")
    done = sparkhvdrun(
        *("-np", 2, "--config-file", settings, "--cache-capacity", 9, "--tcp", "--output-filename", tmp_path / "kept"),
        *("--autotune", "--autotune-log-file", tmp_path / "tuning.csv", "--autotune-bayes-opt-max-samples", 5),
        *("--timeline-filename", tmp_path / "timeline.json", "--start-timeout", 77),
        *("--autotune-warmup-samples", 2, "--autotune-steps-per-sample", 4, "--autotune-gaussian-process-noise", 0.5),
        *(sys.executable, TRAIN, "an argument", "--with=dashes"),
    )
    assert done.returncode == 0, done.stderr
    values = values_by_rank(done)
    assert [values[rank]["world"] for rank in range(2)] == [[0, 2, 0, 0], [1, 2, 1, 0]]
    assert [one["total"] for one in values.values()] == [3.0, 3.0]
    assert values[0]["arguments"] == ["an argument", "--with=dashes"]
    assert values[0]["secrets"] == []
    assert values[1]["cache"] == 9, "flags take precedence over the file"
    assert values[1]["start_timeout"] == 77.0
    assert values[1]["autotune"] == [True, str(tmp_path / "tuning.csv"), 2, 4, 5]
    assert (tmp_path / "tuning.csv").read_text().startswith("stage,fusion_threshold,")
    assert '"sum"' in (tmp_path / "timeline.json").read_text()
    assert "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE (autotuning compares medians" in done.stderr
    assert "--tcp has no effect: InfiniBand verbs are not used." in done.stderr
    assert "have no effect here: HOROVOD_CYCLE_TIME (a collective starts as soon as" in done.stderr
    assert json.loads((tmp_path / "kept" / "rank.1" / "stdout").read_text()) == values[1]


@pytest.mark.parametrize("ignored", [set(), {signal.SIGCHLD}])
def test_a_failing_program_is_reported_with_its_exit_code_and_last_output(ignored):
    done = sparkhvdrun(
        *("-np", "2", sys.executable, TRAIN, "fail"),
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
    )
    assert done.returncode == 1
    assert re.search(r"Rank 1 on host \S+ ended with exit code 5: ", done.stderr), done.stderr
    assert "rows.csv is missing" in done.stderr


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("no-such-program", "could not start 'no-such-program': No such file or directory."),
        (TRAIN, f"could not start '{TRAIN}': Permission denied. Start a Python file as: python {TRAIN} 1."),
    ],
)
def test_a_program_that_cannot_be_started_is_reported(program, words):
    done = sparkhvdrun("-np", "1", program, "1")
    assert done.returncode == 1
    assert words in done.stderr


# Ignores SIGINT, like a shell that starts a job in the background. ``env`` resets SIGHUP if nohup runs these tests.
INTERRUPTS_IGNORED = ("env", "--default-signal=HUP", "/bin/sh", "-c", """trap '' INT; exec "$@" """, "sh")
BY_MPI = ("--mpi", "--mpi-args=--oversubscribe")


@pytest.mark.parametrize(
    ("number", "options"),
    [
        *((signal.SIGINT, ()), (signal.SIGKILL, ()), pytest.param(signal.SIGHUP, (), marks=pytest.mark.soak)),
        *((signal.SIGTERM, BY_MPI), (signal.SIGKILL, BY_MPI)),
        pytest.param(signal.SIGHUP, BY_MPI, marks=pytest.mark.soak),
    ],
    ids=["interrupt", "kill", "hang up", "terminate, by mpi", "kill, by mpi", "hang up, by mpi"],
)
def test_the_ranks_end_with_the_launcher(number, options, tmp_path):
    command = [*INTERRUPTS_IGNORED, sys.executable, "-m", "sparkhvd.cli.run", "-np", "2", *options]
    output = tmp_path / "output"
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            [*command, sys.executable, str(TRAIN), "stay", str(tmp_path)],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    pids = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_for(lambda: all(path.exists() and path.read_text() for path in pids) or launcher.poll() is not None)
        launcher.send_signal(number)
        code = launcher.wait(60)
        wait_for(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids))
    finally:
        launcher.kill()
        launcher.wait()
    assert code == (-9 if number == signal.SIGKILL else 128 + number), output.read_text()


@pytest.mark.parametrize("options", [(), BY_MPI], ids=["", "by mpi"])
def test_with_nohup_the_ranks_outlive_their_terminal(options, tmp_path):
    (tmp_path / "stays.py").write_text(
        "import os, pathlib, signal\nos.kill(int(pathlib.Path('launcher').read_text()), signal.SIGHUP)\n"
    )
    command = ["/bin/sh", "-c", """trap '' HUP; echo $$ > launcher; exec "$@" """, "sh"]
    command += [sys.executable, "-m", "sparkhvd.cli.run", "-np", "1", *options, sys.executable, "stays.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr


def test_mpirun_starts_the_ranks_on_request(tmp_path):
    done = sparkhvdrun(
        *("--mpi", "-np", 2, "--mpi-args=--oversubscribe", "--cache-capacity", 9, "--start-timeout", 77, "--verbose"),
        *("--output-filename", tmp_path / "kept", "--network-interface", "lo", "--network-interface", "lo", "-p", 22),
        *(sys.executable, TRAIN, "x"),
    )
    assert done.returncode == 0, done.stderr
    values = values_by_rank(done, r"\[1,(\d+)\]<stdout>:")
    assert [values[rank]["world"] for rank in range(2)] == [[0, 2, 0, 0], [1, 2, 1, 0]]
    assert [one["total"] for one in values.values()] == [3.0, 3.0]
    assert [values[0]["cache"], values[0]["start_timeout"]] == [9, 77.0]
    assert values[1]["interfaces"] == "lo,lo", "the gradients use only these interfaces, too"
    assert (tmp_path / "kept" / "rank.1" / "stdout").read_text().startswith("[1,1]<stdout>:{")
    notice, line = done.stderr.splitlines()
    assert notice == "sparkhvdrun: --ssh-port has no effect: all ranks run on this machine. Name other hosts with -H."
    assert " -mca btl_tcp_if_include lo,lo " in line, "both flags count"


def test_mpirun_passes_the_environment_to_the_ranks_on_all_hosts(tmp_path):
    agent = tmp_path / "agent"  # replaces ssh: the first argument is the host
    agent.write_text(f'#!/bin/sh\nshift\nexec env -i PATH="$PATH" TMPDIR={tmp_path} MAIL=theirs /bin/sh -c "$*"\n')
    agent.chmod(0o755)
    mine = {"MINE": "a b;c", "SPARKHVD_ENCRYPT": "1", "MAIL": "ours", "OMPI_MCA_plm_rsh_agent": str(agent)}
    script = "echo $MINE,$SPARKHVD_ENCRYPT,$SPARKHVD_CACHE_CAPACITY$HOROVOD_CACHE_CAPACITY,$MAIL"
    done = sparkhvdrun(
        *("--mpi", "-H", "elsewhere:1", "--cache-capacity", 9, "/bin/sh", "-c", script), env={**environment(), **mine}
    )
    assert done.stdout == "[1,0]<stdout>:a b;c,1,9,theirs\n", done.stderr


def test_names_of_this_machine_need_no_ssh_and_count_as_separate_hosts():
    done = sparkhvdrun("-H", f"localhost:2,{socket.gethostname()}:2", "-np", "3", sys.executable, TRAIN)
    assert done.returncode == 0, done.stderr
    assert [values_by_rank(done)[rank]["world"] for rank in range(3)] == [[0, 3, 0, 0], [1, 3, 1, 0], [2, 3, 0, 1]]


def test_in_a_batch_job_the_hosts_of_the_job_are_used_unless_flags_name_others():
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": f"localhost,{socket.gethostname()}"}
    one_machine = environment() | job | {"SLURM_TASKS_PER_NODE": "1(x2)"}
    done = sparkhvdrun("-np", "3", sys.executable, TRAIN, env=one_machine)  # all hosts are this machine
    assert [values_by_rank(done)[rank]["world"] for rank in range(3)] == [[0, 3, 0, 0], [1, 3, 1, 0], [2, 3, 2, 0]], (
        done.stderr
    )
    done = sparkhvdrun("-p", "22", sys.executable, TRAIN, env=one_machine)
    assert [values_by_rank(done)[rank]["world"] for rank in range(2)] == [[0, 2, 0, 0], [1, 2, 1, 0]], done.stderr
    assert "Slurm job 17 has 2 tasks on this machine" in done.stderr
    assert "--ssh-port has no effect: all ranks run on this machine" in done.stderr
    cluster = environment() | job | {"SLURM_JOB_NODELIST": "no-such[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}
    done = sparkhvdrun("-np", "4", "-p", "22", sys.executable, TRAIN, env=cluster)
    assert done.returncode == 1
    assert "no effect" not in done.stderr
    assert "Slurm job 17 has the hosts no-such1:2,no-such2:1" in done.stderr
    assert "num_proc=4 is more than the 3 slots of the hosts (no-such1:2,no-such2:1)" in done.stderr
    done = sparkhvdrun("-H", "localhost:2", sys.executable, TRAIN, env=cluster)
    assert [values_by_rank(done)[rank]["world"] for rank in range(2)] == [[0, 2, 0, 0], [1, 2, 1, 0]], done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jsrun", "-np", "2", "x"], "--jsrun: LSF's jsrun is not supported"),
        (["-np", "2"], "missing the program to run"),
        (["-np", "2", "--mpi-args", "-x A", "true"], "--mpi-args is for mpirun. Pass --mpi, too"),
        (
            ["-np", "3", "-H", "a:1,b:1", "true"],
            "num_proc=3 is more than the 2 slots of the hosts (a:1,b:1)",
        ),
        (["--config-file", "/no/such/file", "true"], "--config-file /no/such/file cannot be read"),
        (["-hostfile", "/no/such/file", "true"], "--hostfile /no/such/file cannot be read"),
        (["-hostfile", sys.executable, "true"], f"--hostfile {sys.executable} is not a text file in UTF-8: "),
        (["--fusion-threshold-mb", "much", "true"], "--fusion-threshold-mb='much'"),
        (["-np", "-1", "true"], "num_proc must be an integer of at least 1, got -1."),
        (["-np", "0", "true"], "num_proc must be an integer of at least 1, got 0."),
        (["-np", "0", "--mpi", "true"], "num_proc must be an integer of at least 1, got 0."),
        (["--start-timeout", "-5", "true"], "start_timeout must be a positive number of seconds, got -5.0."),
        (["--mpi", "--start-timeout", "0", "true"], "start_timeout must be a positive number of seconds, got 0.0."),
        (
            ["--mpi", "--mpi-args", '"x', "true"],
            """--mpi-args='"x' is not valid shell syntax: No closing quotation""",
        ),
        (["--mpi", "--cache-capacity", "x", "true"], "HOROVOD_CACHE_CAPACITY must be a number, got 'x'"),
        (
            ["--output-filename", "/dev/null", "true"],
            "output_filename='/dev/null' is not a folder in which files can be created",
        ),
        (["--mpi", "--output-filename", "/dev/null", "true"], "output_filename='/dev/null' is not a folder in"),
        (["-np", "x", "true"], "argument -np/--num-proc: invalid int value: 'x'. See sparkhvdrun --help."),
    ],
)
def test_invalid_command_lines_are_refused_in_one_line(arguments, words, capsys):
    code, printed = refused(arguments, capsys)
    assert code != 0
    assert words in printed
    assert printed.count("\n") == 1, printed


def refused(arguments: list[object], capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Return the exit code and the error output of a command that starts no rank; it runs in this process."""
    with mock.patch.dict(os.environ):  # a command for mpirun sets variables
        try:
            code: object = main([str(word) for word in arguments])
        except SystemExit as ended:
            code = ended.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "params:\n  fusion_treshold_mb: 4\n",
            "params has unknown keys fusion_treshold_mb; expected some of fusion_threshold_mb, cycle_",
        ),
        ("params: 3\n", "params must be a section with fusion_threshold_mb or"),
        ("autotune:\n  enabled: perhaps\n", "--autotune='perhaps': must be true or false"),
        ("tuning:\n  enabled: true\n", "has an unknown section tuning; expected some of autotune, controller, "),
        ("controller: jsrun\n", "controller must be 'gloo' or 'mpi', got 'jsrun'"),
        ("library_options:\n  mpi_args: --oversubscribe\n", "--mpi-args is for mpirun. Pass --mpi, too"),
        ('controller: mpi\nlibrary_options:\n  mpi_args: "\'x"\n', '--mpi-args="\'x" is not valid shell syntax'),
    ],
)
def test_a_settings_file_with_unknown_keys_is_refused(content, words, tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text(content)
    code, printed = refused(["--config-file", tmp_path / "settings.yaml", "true"], capsys)
    assert code == 1
    assert words in printed
    assert printed.count("\n") == 1, printed


def test_flags_for_other_machines_are_reported_as_without_effect_on_this_machine():
    done = sparkhvdrun("-np", 1, "-p", 22, "-i", "key", "--network-interface", "bogus0", "true")
    assert done.returncode == 0, done.stderr
    for flag in ("--ssh-port", "--ssh-identity-file", "--network-interfaces"):
        assert f"{flag} has no effect: all ranks run on this machine. Name other hosts with -H.\n" in done.stderr


def test_check_build_shows_the_available_features():
    done = sparkhvdrun("--check-build")
    assert done.returncode == 0
    assert "Available Frameworks:\n    [X] TensorFlow\n" in done.stdout
    assert "    [X] MPI\n    [ ] Gloo\n    [X] sparkhvd\n" in done.stdout
