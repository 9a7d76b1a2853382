"""Hosts behind a real ssh server: a temporary one on loopback, with its own key and configuration."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import sparkhvd
from sparkhvd.errors import LaunchError, RankFailedError, StartTimeoutError
from tests.launch import elastic_training, sshd
from tests.ports import free_port
from tests.waiting import happens, wait_for

pytestmark = pytest.mark.skipif(bool(sshd.why_not()), reason=sshd.why_not())


@pytest.fixture(scope="module")
def ssh_server(tmp_path_factory):
    """Run an ssh server; a program ``ssh`` resolves the host names node-a and node-b to it."""
    folder = tmp_path_factory.mktemp("ssh")
    key = sshd.make_keys(folder)
    program = sshd.make_client(folder, {"node-a": "127.0.0.1", "node-b": "127.0.0.1"})
    port = free_port()
    with sshd.running_sshd(folder, "127.0.0.1", port):
        yield program, port, key


def place() -> tuple[str, str, str | None, bool]:
    names = ("SPARKHVD_RANK", "SPARKHVD_CROSS_RANK", "MINE")
    return (*(os.environ.get(name) for name in names), "SSH_CONNECTION" in os.environ)


def fail_on_rank_1() -> None:
    if os.environ["SPARKHVD_RANK"] == "1":
        raise ValueError("no luck")
    time.sleep(600)


def test_ranks_run_on_hosts_behind_ssh(ssh_server, monkeypatch):
    folder, port, key = ssh_server
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("MINE", "it's mine; really")
    options = {"hosts": "node-a:2,node-b:1", "ssh_port": port, "ssh_identity_file": str(key)}
    assert sparkhvd.run(place, nics=["lo"], **options) == [
        ("0", "0", "it's mine; really", True),
        ("1", "0", "it's mine; really", True),
        ("2", "1", "it's mine; really", True),
    ]
    encrypted = {"SPARKHVD_ENCRYPT": "1"}
    with pytest.raises(RankFailedError, match="Rank 1 on host node-a raised ValueError: no luck"):
        sparkhvd.run(fail_on_rank_1, env=encrypted, **options)
    with pytest.raises(LaunchError, match=r"None of the network interfaces \['bogus0'\] has an address on host node-"):
        sparkhvd.run(place, nics=["bogus0"], **options)


def test_elastic_ranks_run_on_hosts_whose_names_only_ssh_knows(ssh_server, monkeypatch, tmp_path):
    folder, port, key = ssh_server
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    results = sparkhvd.run_elastic(
        elastic_training.train,
        (5, str(tmp_path)),
        num_proc=3,
        hosts="node-a:2,node-b:1",
        ssh_port=port,
        ssh_identity_file=str(key),
        start_timeout=60,
        verbose=0,
    )
    assert [result[:4] for result in results] == [(5, 15.0, rank, 3) for rank in range(3)]


@pytest.mark.parametrize(
    ("flag", "more"),
    [
        ("-H", ["--mpi"]),
        ("-hostfile", []),
        pytest.param("-H", [], marks=pytest.mark.soak),
        pytest.param("-hostfile", ["--mpi"], marks=pytest.mark.soak),
    ],
)
def test_sparkhvdrun_reaches_hosts_with_the_given_port_and_key(flag, more, ssh_server, tmp_path):
    folder, port, key = ssh_server
    hosts = tmp_path / "hosts"
    hosts.write_text("node-a slots=2\nnode-b slots=1\n")
    program = (
        "import os; from sparkhvd.comm import session; session.init(); world = session.current().world; "
        # One write per line, even with PYTHONUNBUFFERED: mpirun interleaves the ranks' writes.
        "os.write(1, f'{world.rank} {world.size} {\"SSH_CONNECTION\" in os.environ}\\n'.encode())"
    )
    given = "node-a:2,node-b:1" if flag == "-H" else hosts
    command = ["-m", "sparkhvd.cli.run", *more, flag, given, "-p", str(port), "-i", key, sys.executable, "-c", program]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    job = "1," if more else ""  # mpirun adds the number of its job
    lines = [f"[{job}{rank}]<stdout>:{rank} 3 True" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == lines, done.stderr


def test_a_host_that_ssh_cannot_reach_is_named_with_the_error_of_ssh(ssh_server, monkeypatch, tmp_path):
    folder, port, _ = ssh_server
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    wrong = tmp_path / "wrong_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", wrong], check=True)
    with pytest.raises(LaunchError, match=r"Host node-a was lost: .*exit code 255.*Permission denied"):
        sparkhvd.run(place, hosts="node-a:1", ssh_port=port, ssh_identity_file=str(wrong))


def test_a_host_with_an_unknown_name_is_named_with_the_error_of_ssh():
    with pytest.raises(LaunchError, match=r"Host no\.host\.invalid was lost: .*code 255.*Could not resolve hostname"):
        sparkhvd.run(place, hosts="localhost:1,no.host.invalid:1")


def test_a_host_that_does_not_answer_is_named_at_the_start_timeout(ssh_server, monkeypatch):
    folder, _, key = ssh_server
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = {"ssh_port": silent.getsockname()[1], "ssh_identity_file": str(key), "start_timeout": 2}
        with pytest.raises(
            StartTimeoutError, match=r"within start_timeout=2 s: node-a, node-b did not report\. Check that `ssh HOST"
        ):
            # An argument that is larger than the buffer of the pipe to ssh.
            sparkhvd.run(lambda _: place(), (bytes(4 << 20),), hosts="node-a:1,node-b:1", **options)


def stay(folder: str) -> None:
    Path(folder, os.environ["SPARKHVD_RANK"]).write_text(f"{os.getppid()} {os.getpid()}")
    time.sleep(600)


def test_the_ranks_of_a_host_end_with_its_ssh_process_and_the_error_names_the_host(ssh_server, monkeypatch, tmp_path):
    folder, port, key = ssh_server
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def pids() -> list[int]:
        return [int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()]

    def kill_one() -> None:
        wait_for(lambda: len(pids()) == 6)
        ours = psutil.Process().children(recursive=True)
        next(one for one in ours if one.name() == "ssh" and "node-b" in one.cmdline()).kill()

    killer = threading.Thread(target=kill_one, name="killer")
    killer.start()
    words = r"Host node-b was lost while rank 2 started or ran there: its process was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(LaunchError, match=words):
        sparkhvd.run(
            stay, (str(tmp_path),), hosts="node-a:2,node-b:1", ssh_port=port, ssh_identity_file=str(key), nics=["lo"]
        )
    killer.join()
    left = [process for process in psutil.process_iter() if process.pid in set(pids())]
    assert psutil.wait_procs(left, timeout=20)[1] == []


def test_a_host_without_the_launchers_python_is_reported(ssh_server, monkeypatch):
    folder, port, key = ssh_server
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match=r"Host node-b was lost: .*exit code 127.*no/such/python"):
        sparkhvd.run(place, hosts="node-b:1", ssh_port=port, ssh_identity_file=str(key), executable="/no/such/python")


def stop_the_other_host(folder: str) -> None:
    rank, pids = os.environ["SPARKHVD_RANK"], Path(folder, "pids")
    if rank == "1":
        pids.with_suffix(".new").write_text(f"{os.getppid()} {os.getpid()}")
        pids.with_suffix(".new").rename(pids)
        time.sleep(600)
    while not pids.exists():
        time.sleep(0.01)
    os.kill(int(pids.read_text().split()[0]), signal.SIGSTOP)
    raise ValueError("no luck")


def print_much(progress: str) -> None:
    for _ in range(1024):
        print(("x" * 1023 + "\n") * 16, flush=True)
        with Path(progress).open("a") as file:
            file.write(".")


class Stalled(io.StringIO):
    """Takes no output until the rank has stopped printing, and notes how often the rank has printed by then."""

    def __init__(self, progress: Path) -> None:
        super().__init__()
        self._progress = progress
        self.printed = 0

    def write(self, text: str) -> int:
        if text and not self.tell():
            wait_for(self._advanced)
            while self._advanced():
                self.printed = self._progress.stat().st_size
                happens(self._advanced, 2.0)
        return super().write(text)

    def _advanced(self) -> bool:
        return self._progress.stat().st_size > self.printed


def test_a_driver_that_does_not_take_output_holds_up_the_ranks(tmp_path):
    progress = tmp_path / "progress"
    progress.touch()
    stdout = Stalled(progress)
    sparkhvd.run(print_much, (str(progress),), launcher="ssh", hosts="localhost:1", stdout=stdout)
    assert 0 < stdout.printed < 1024
    assert stdout.getvalue().count("x" * 1023) == 16 * 1024


def test_a_failure_is_reported_even_if_another_host_does_not_answer(tmp_path):
    hosts = f"localhost:1,{socket.gethostname()}:1"
    with pytest.raises(RankFailedError, match=r"Rank 0 on host \S+ raised ValueError: no luck"):
        sparkhvd.run(stop_the_other_host, (str(tmp_path),), launcher="ssh", hosts=hosts)
    pids = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    left = [process for process in psutil.process_iter() if process.pid in pids]
    assert psutil.wait_procs(left, timeout=20)[1] == []  # a rank ends when it notices that its task has ended
