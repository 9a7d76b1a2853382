"""Elastic jobs on two hosts over ssh: network namespaces with their own addresses and ssh servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import sparkhvd
from sparkhvd.errors import LaunchError, RankFailedError
from tests.launch import elastic_resizes, hosts, sshd
from tests.launch import elastic_training as training
from tests.launch.elastic_rows import complaints
from tests.launch.test_elastic import steps
from tests.launch.test_elastic_sparkhvdrun import TRAIN, pids, start
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.skipif(bool(hosts.why_not() or sshd.why_not()), reason=hosts.why_not() or sshd.why_not()),
]
FAST = {"start_timeout": 60, "elastic_timeout": 30, "cooldown_range": (0.5, 5), "verbose": 0}


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory) -> Iterator[sshd.SshHosts]:
    with sshd.hosts_behind_ssh(tmp_path_factory.mktemp("hosts"), 2) as both:
        yield both


@pytest.fixture
def reached(two_hosts, monkeypatch) -> Iterator[sshd.SshHosts]:
    """Provide the two hosts, and check after the test that no process is left on them."""
    monkeypatch.setenv("PATH", two_hosts.path)
    yield two_hosts
    for host in two_hosts.hosts:
        wait_for(lambda host=host: not sshd.programs(host))


def test_a_rank_is_replaced_within_its_hosts_process_and_a_lost_host_by_a_new_process(reached, tmp_path):
    sizes = (2, 1, 2, 1, 2)
    results = sparkhvd.run_elastic(
        training.train_on_hosts,
        (str(tmp_path), sizes, {1: "kill", 3: "kill with host"}),
        num_proc=2,
        min_num_proc=1,
        hosts=reached.listed,
        ssh_identity_file=reached.key,
        **FAST,
    )
    starts = training.places(tmp_path)
    (survivor,) = {one[4] for one in steps(tmp_path) if one[2] == 1}
    assert [place[0] for place in starts].count(survivor) == 1
    killed, replaced, after_host = [place for place in starts if place[0] != survivor]
    assert killed[1] == replaced[1] != after_host[1], "the processes of their host"
    assert killed[2] == replaced[2] == after_host[2] != {pid: at for pid, _, at in starts}[survivor]
    assert [result[2:4] for result in results] == [(sizes, survivor), (sizes, after_host[0])]
    step, total = results[0][:2]
    assert total == sum(range(1, step + 1)), "no step was lost or ran twice"


def test_a_host_that_is_cut_off_loses_its_ranks_and_keeps_no_process(reached, tmp_path, caplog):
    cut: list[hosts.Host] = []
    cut_at: list[float] = []

    def cut_one_off() -> None:
        wait_for(lambda: len(steps(tmp_path)) > 10)
        (first, *_), (second, *_) = training.places(tmp_path)
        ranks = {one[4]: one[1] for one in steps(tmp_path)}
        address = next(at for pid, _, at in training.places(tmp_path) if ranks[pid] == 1)
        assert {ranks[first], ranks[second]} == {0, 1}
        cut.append(reached.at(address))
        subprocess.run(["ip", "-n", cut[0].namespace, "link", "set", cut[0].interface, "down"], check=True)
        cut_at.append(time.monotonic())

    thread = threading.Thread(target=cut_one_off, name="cutter")
    thread.start()
    try:
        results = sparkhvd.run_elastic(
            training.train_on_hosts,
            (str(tmp_path), (2, 1)),
            num_proc=2,
            min_num_proc=1,
            hosts=reached.listed,
            ssh_identity_file=reached.key,
            **FAST | {"cooldown_range": (60, 60)},
        )
        thread.join()
        wait_for(lambda: not sshd.programs(cut[0]))  # although it cannot learn that the job has ended
    finally:
        for host in cut:
            host.connect()
    ((step, total, sizes, pid, _),) = results
    assert sizes == (2, 1)
    alone = [one for one in steps(tmp_path) if one[2] == 1]
    assert {one[4] for one in alone} == {pid}
    assert any("was lost with its host" in record.getMessage() for record in caplog.records)
    assert alone[0][3] - cut_at[0] < 15, "the host was lost much earlier than in a job that is not elastic"
    assert total == sum(range(1, step + 1))


def test_a_job_leaves_a_host_out_while_it_cannot_reach_the_other_although_both_reach_the_driver(
    reached, tmp_path, caplog
):
    one, other = reached.hosts
    cut_at: list[float] = []

    def separate_for_a_while() -> None:
        wait_for(lambda: len(steps(tmp_path)) > 10)
        one.lose(other)
        other.lose(one)
        cut_at.append(time.monotonic())
        try:
            wait_for(lambda: any(step[2] == 1 for step in steps(tmp_path)))
        finally:
            one.find(other)
            other.find(one)

    thread = threading.Thread(target=separate_for_a_while, name="cutter")
    thread.start()
    results = sparkhvd.run_elastic(
        training.train_on_hosts,
        (str(tmp_path), (2, 1, 2)),
        num_proc=2,
        min_num_proc=1,
        hosts=reached.listed,
        ssh_identity_file=reached.key,
        **FAST,
    )
    thread.join()
    for step, total, sizes, _, _ in results:
        assert (sizes, total) == ((2, 1, 2), sum(range(1, step + 1))), "no step was lost or ran twice"
    alone = [step for step in steps(tmp_path) if step[2] == 1]
    (survivor,) = {step[4] for step in alone}
    first, second, again = training.places(tmp_path)
    left_out = second if first[0] == survivor else first
    assert again[1:] == left_out[1:], "a new rank in the process of its host, which the driver has always reached"
    pair = " and ".join(sorted([one.address, other.address]))
    (line,) = [text for record in caplog.records if "not each other" in (text := record.getMessage())]
    assert line == (
        f"Hosts reach the driver but not each other: {pair}. The job continues without {left_out[2]} (1 rank) and "
        "tries again after a pause."
    )
    assert alone[0][3] - cut_at[0] < 30, "much earlier than start_timeout"


def test_a_job_follows_the_hosts_of_a_script_that_fails_at_times_and_names_silent_hosts(reached, tmp_path, caplog):
    one, other = reached.hosts
    slots, script = tmp_path / "slots", tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {slots}\n")
    script.chmod(0o755)

    def discover(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(slots)

    def change_hosts() -> None:
        wait_for(lambda: bool(steps(tmp_path)))
        discover("<html>")
        wait_for(lambda: "printed the line '<html>'" in caplog.text)
        discover(f"{one.address}\n{other.address}:1\nno.host.invalid:1\n")
        wait_for(lambda: any(step[2] == 2 for step in steps(tmp_path)))
        discover(f"{other.address}\n")

    discover(f"{one.address}:1\n")
    thread = threading.Thread(target=change_hosts, name="changer")
    thread.start()
    results = sparkhvd.run_elastic(
        training.train_on_hosts,
        (str(tmp_path), (1, 2, 1), None, one.address),
        num_proc=1,
        launcher="ssh",
        discovery=str(script),
        ssh_identity_file=reached.key,
        **FAST,
    )
    thread.join()
    ((step, total, sizes, pid, is_gone),) = results
    assert [place[2] for place in training.places(tmp_path)] == [one.address, other.address]
    assert pid == training.places(tmp_path)[1][0]
    assert (sizes, total) == ((1, 2, 1), sum(range(1, step + 1)))
    assert is_gone, "the process of the first host ended while the job ran"
    assert "on host no.host.invalid did not start: its process ended with exit code 255" in caplog.text


@pytest.mark.soak
def test_a_job_on_eight_hosts_grows_loses_a_host_and_gets_it_back_without_losing_a_row(monkeypatch, tmp_path):
    with sshd.hosts_behind_ssh(tmp_path, 8) as eight:
        monkeypatch.setenv("PATH", eight.path)
        (tmp_path / "job").mkdir()
        job = elastic_resizes.run_resized(tmp_path / "job", eight, 1, 2)
        for host in eight.hosts:
            wait_for(lambda host=host: not sshd.programs(host))
    assert complaints(job.results) == []
    assert len(job.results) == 16
    assert list(job.seconds) == [("more slots", 16), ("a host killed", 14), ("the host is back", 16)]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL])
def test_no_process_outlives_the_command_on_any_host(reached, tmp_path, number):
    where = ("-H", reached.listed, "-i", reached.key)
    with start("-np", 2, "--min-np", 1, *where, sys.executable, TRAIN, tmp_path, 10**9) as running:
        wait_for((tmp_path / "running").exists)
        assert [len(sshd.programs(host)) > 1 for host in reached.hosts] == [True, True], "a rank and its parent"
        running.send_signal(number)
        running.communicate(timeout=60)
    assert running.returncode == (128 + number if number == signal.SIGINT else -number)
    assert len(pids(tmp_path)) == 2  # the fixture waits for the end of all processes


@pytest.mark.usefixtures("reached")
def test_a_script_that_fails_at_the_start_ends_the_job_with_its_error(tmp_path):
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho the cloud is closed >&2; exit 3\n")
    script.chmod(0o755)
    with pytest.raises(LaunchError, match=r"cannot be determined: .* exit code 3: the cloud is closed"):
        sparkhvd.run_elastic(os.getpid, num_proc=1, launcher="ssh", discovery=str(script), **FAST)


@pytest.mark.usefixtures("reached")
def test_hosts_that_ssh_cannot_reach_end_the_job_with_the_error_of_ssh():
    with pytest.raises(RankFailedError, match=r"All of the first 3 workers failed before(?s:.)*Name or service not kn"):
        sparkhvd.run_elastic(os.getpid, num_proc=1, hosts="no.host.invalid:1", **FAST)
