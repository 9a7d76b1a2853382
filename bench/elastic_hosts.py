"""Measure elastic jobs on hosts: a cut link, a rank that joins, and a job of up to 64 ranks that changes its size.

The hosts are network namespaces behind ssh servers. ``torchrun`` does the same work with its agents in the same
namespaces. As it may wait for Gloo's timeout of 30 minutes, the program waits for it only ``--patience`` seconds; 0
leaves it out. The rank joins, and the large job runs, over links of limited speed. The program needs root, ip, tc and
an ssh server.

    python -m bench.elastic_hosts [--rounds 3] [--patience 120] [--only cut join resize]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil

import sparkhvd
from bench import machine
from bench.elastic import join_once, note_step, steps_in
from bench.hosts import LINK_BITS, limit_link
from tests.launch import elastic_resizes, hosts, sshd
from tests.launch.elastic_rows import complaints
from tests.waiting import wait_for

_FIRST_STEPS = 50
_MORE_STEPS = 30
_PORT = 29511
_STATE_MEGABYTES = 50
_MANY, _SLOTS = 8, (2, 8)  # hosts, and the slots of each before and after a job grows
_PARTS = ("cut", "join", "resize")
_MOST_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for torchrun's next step")
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS, help="measure only these parts")
    options = parser.parse_args()
    if why := hosts.why_not() or sshd.why_not():
        raise SystemExit(f"This machine cannot simulate two hosts: {why}.")
    print(machine.describe())
    parts = set(options.only)
    with tempfile.TemporaryDirectory(prefix="bench-elastic-hosts-") as name:
        folder = Path(name)
        if parts & {"cut", "join"}:
            with _hosts(folder / "two", 2) as both:
                if "cut" in parts:
                    _measure_cuts(folder, both, options.rounds, options.patience)
                if "join" in parts:
                    _measure_joins(folder, both, options.rounds)
        if "resize" in parts:
            with _hosts(folder / "many", _MANY) as many:
                _measure_resizes(folder, many, options.rounds)
    print(f"\n{machine.load()}")
    return 0


@contextmanager
def _hosts(folder: Path, count: int) -> Iterator[sshd.SshHosts]:
    folder.mkdir()
    with sshd.hosts_behind_ssh(folder, count) as reached, mock.patch.dict(os.environ, PATH=reached.path):
        yield reached


def _measure_cuts(folder: Path, both: sshd.SshHosts, rounds: int, patience: float) -> None:
    print("\na cut link of one of two hosts, with a rank each, to the next step of the other: seconds")
    times = [_round_of_sparkhvd(folder / str(number), both) for number in range(rounds)]
    print(f"  sparkhvd  {', '.join(f'{seconds:.1f}' for seconds in times)}", flush=True)
    if patience:
        alone = _round_of_torchrun(folder / "torchrun", both, patience)
        print(f"  torchrun  {f'{alone:.1f}' if alone else f'none within {patience:g}'}")


def _measure_resizes(folder: Path, many: sshd.SshHosts, rounds: int) -> None:
    for host in many.hosts:
        limit_link(host)
    few, slots = _SLOTS
    jobs = []
    for number in range(rounds):
        (folder / f"resize-{number}").mkdir()
        jobs.append(elastic_resizes.run_resized(folder / f"resize-{number}", many, few, slots))
        if wrong := complaints(jobs[-1].results):
            raise SystemExit(f"The job is wrong: {wrong}")
    print(
        f"\na job of {few * _MANY} ranks on {_MANY} hosts with links of {LINK_BITS / 1e6:g} Mbit/s:\n"
        "seconds from a change to the next step; every row counted once per epoch"
    )
    for change, ranks in jobs[0].seconds:
        times = ", ".join(f"{job.seconds[change, ranks]:.1f}" for job in jobs)
        print(f"  {f'{change}, {ranks} ranks':<32}{times}")


def _measure_joins(folder: Path, both: sshd.SshHosts, rounds: int) -> None:
    for host in both.hosts:
        limit_link(host)
    least = _STATE_MEGABYTES * 2**20 * 8 / LINK_BITS
    print(
        f"\na rank joins over a link of {LINK_BITS / 1e6:g} Mbit/s, which needs {least:.2f} s for the state of "
        f"{_STATE_MEGABYTES} MB:\n"
        "seconds between two steps of the old rank, and of a broadcast; the link's part of each"
    )
    first, second = ({host.address: 1} for host in both.hosts)
    for number in range(rounds):
        options = {"launcher": "ssh", "ssh_identity_file": both.key}
        stop, transfer = join_once(folder / f"join-{number}", _STATE_MEGABYTES, first, first | second, **options)
        print(f"  {stop:.2f}  {transfer:.2f}  {least / stop:.2f}  {least / transfer:.2f}", flush=True)


def _round_of_sparkhvd(folder: Path, both: sshd.SshHosts) -> float:
    folder.mkdir()
    with _cut_later(folder, both.hosts[1]):
        sparkhvd.run_elastic(
            _train,
            (str(folder),),
            num_proc=2,
            min_num_proc=1,
            hosts=both.listed,
            ssh_identity_file=both.key,
            cooldown_range=(600, 600),
            verbose=0,
        )
    return _seconds_until_alone(folder)


def _train(folder: str) -> None:
    """Take steps until this rank has taken some alone."""
    import sparkhvd.numpy as hvd  # noqa: PLC0415  (imported by the ranks)

    hvd.init()
    state = hvd.elastic.ObjectState(step=0, alone=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.alone < _MORE_STEPS:
            hvd.allreduce(np.ones(1000, np.float32), name="gradient")
            state.step += 1
            state.alone += hvd.size() == 1
            _note(Path(folder), hvd.size())
            state.commit()

    loop(state)


def _round_of_torchrun(folder: Path, both: sshd.SshHosts, patience: float) -> float | None:
    folder.mkdir()
    agents = [_agent(host, both.hosts[0].address, folder) for host in both.hosts]
    try:
        with _cut_later(folder, both.hosts[1]):
            wait_for((folder / "cut").exists, _MOST_SECONDS)
            end = time.monotonic() + patience
            while time.monotonic() < end and not _alone(folder):
                time.sleep(0.2)
    finally:
        for agent in agents:
            _kill(agent)
    return _seconds_until_alone(folder) if _alone(folder) else None


def _agent(host: hosts.Host, endpoint: str, folder: Path) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    command += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
    command += ["--rdzv-endpoint", f"{endpoint}:{_PORT}", "--local-addr", host.address]
    # The names of the namespaces do not resolve, so the agents cannot find out which of them is the endpoint.
    command += ["--rdzv-conf", f"is_host={int(host.address == endpoint)}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": host.interface}
    with (folder / f"agent-{host.address}").open("wb") as log:
        return subprocess.Popen(
            [*command, "-m", "bench.elastic_torchrun", "elastic_hosts", str(folder)],
            env=environment,
            stdout=log,
            stderr=log,
        )


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its ranks, which are in sessions of their own."""
    for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
        process.kill()
    agent.wait()


def train_with_torchrun(folder: str) -> None:
    """Take the same steps as one rank of torchrun."""
    import torch  # noqa: PLC0415  (heavy)
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo")
    alone = 0
    while alone < _MORE_STEPS:
        dist.all_reduce(torch.ones(1000))
        alone += dist.get_world_size() == 1
        _note(Path(folder), dist.get_world_size())


def _note(folder: Path, size: int) -> None:
    note_step(folder, size, 0)
    time.sleep(0.01)


def _alone(folder: Path) -> list[float]:
    """Return the times of the steps that one rank took alone after the cut."""
    cut = float((folder / "cut").read_text())
    return [step.seconds for step in steps_in(folder) if step.size == 1 and step.seconds > cut]


def _seconds_until_alone(folder: Path) -> float:
    return min(_alone(folder)) - float((folder / "cut").read_text())


@contextmanager
def _cut_later(folder: Path, host: hosts.Host) -> Iterator[None]:
    """Cut the link of a host once both ranks have taken some steps, and connect it again after this block."""

    def cut() -> None:
        wait_for(lambda: sum(step.size == 2 for step in steps_in(folder)) > 2 * _FIRST_STEPS, _MOST_SECONDS)
        subprocess.run(["ip", "-n", host.namespace, "link", "set", host.interface, "down"], check=True)
        (folder / "cut~").write_text(str(time.monotonic()))
        (folder / "cut~").rename(folder / "cut")

    thread = threading.Thread(target=cut, name="bench-cut")
    thread.start()
    try:
        yield
    finally:
        thread.join()
        host.connect()


if __name__ == "__main__":
    sys.exit(main())
