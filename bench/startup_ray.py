"""Measure how long all ranks on Ray take to connect and to end, next to the TorchTrainer of Ray Train.

    python -m bench.startup_ray --rounds 3

One cluster with a node per rank serves all turns. Each turn is a process of its own, which connects to the cluster and
then measures its first job: the ranks import torch, connect and average one tensor.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import sparkhvd
from bench import machine
from bench.estimators import join_torch

_OWN, _PEER = "sparkhvd", "TorchTrainer"
_SECONDS = 600.0


def main() -> None:
    options = parse_options()
    if options.turn is not None:
        _take_turn(options.turn, options.address, options.ranks)
        return
    print(machine.describe())
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": {"worker_niceness": 0}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(options.ranks):
            cluster.add_node(num_cpus=1)
        seconds: dict[str, list[float]] = {_OWN: [], _PEER: []}
        for _ in range(options.rounds):
            for name, times in seconds.items():
                times.append(_measured(name, cluster.address, options.ranks))
    finally:
        cluster.shutdown()
    _show(seconds, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", choices=(_OWN, _PEER), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measured(name: str, address: str, ranks: int) -> float:
    command = [sys.executable, "-m", "bench.startup_ray", "--turn", name, "--address", address, "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return float(done.stdout.rpartition("SECONDS ")[2])


def _take_turn(name: str, address: str, ranks: int) -> None:
    ray.init(address=address, log_to_driver=False)
    started = time.perf_counter()
    if name == _OWN:
        results = sparkhvd.run(join_torch, num_proc=ranks, launcher="ray", verbose=0)
        if results != [ranks] * ranks:
            raise RuntimeError(f"The ranks returned {results}.")
    else:
        _train(ranks)
    print("SECONDS", time.perf_counter() - started)
    ray.shutdown()


def _train(ranks: int) -> None:
    from ray.train import RunConfig, ScalingConfig  # noqa: PLC0415 - only for the peer
    from ray.train.torch import TorchConfig, TorchTrainer  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="bench-ray-train-") as folder:
        TorchTrainer(
            _join_workers,
            scaling_config=ScalingConfig(num_workers=ranks),
            run_config=RunConfig(storage_path=str(Path(folder))),
            torch_config=TorchConfig(backend="gloo"),
        ).fit()


def _join_workers() -> None:
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    distributed.all_reduce(torch.ones(1))  # Ray Train has connected the workers


def _show(seconds: dict[str, list[float]], options: argparse.Namespace) -> None:
    print(f"\n{options.ranks} ranks on Ray, torch: seconds, median (least to most) of {options.rounds}")
    for name, times in seconds.items():
        print(f"  {name:<52} {statistics.median(times):8.3f} ({min(times):.3f} to {max(times):.3f})")
    ratio = statistics.median(seconds[_OWN]) / statistics.median(seconds[_PEER])
    print(f"  of TorchTrainer's time: {ratio:.2f} (target: at most 0.5)")


if __name__ == "__main__":
    main()
