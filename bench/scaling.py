"""Measure a scaling study on eight hosts: real training of small networks on synthetic images.

The hosts are network namespaces of this machine behind ssh servers, with links without a limit and of 100 Mbit/s. All
ranks share the machine's cores. Therefore, the program compares the speed of a job with that of as many ranks that
exchange nothing, instead of with that of one rank. It needs root, ip, tc and an ssh server.

    python -m bench.scaling [--models resnet50 vgg16] [--num-proc 2 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import sparkhvd
from bench import machine
from bench.hosts import HOSTS, LINK_BITS, limit_link
from examples.synthetic_benchmark import EXCHANGES, Options, images_per_second
from tests.launch import hosts, sshd

# Small networks of the published shapes: most weights of the second one are in its dense layers.
MODELS = {
    "resnet50": Options(model="resnet50", width=16, image_size=32, batch_size=4),
    "vgg16": Options(model="vgg16", width=8, image_size=32, batch_size=4),
}
_PACE = {"warmup_batches": 1, "batches": 4, "iterations": 3}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--num-proc", type=int, nargs="+", default=[2, HOSTS], help="numbers of ranks, one per host")
    options = parser.parse_args()
    if why := hosts.why_not() or sshd.why_not():
        raise SystemExit(f"This machine cannot simulate hosts: {why}.")
    print(machine.describe())
    with (
        tempfile.TemporaryDirectory(prefix="bench-scaling-") as folder,
        sshd.hosts_behind_ssh(Path(folder), HOSTS) as reached,
        mock.patch.dict(os.environ, PATH=reached.path),
    ):
        _print_table("links without a limit", options.models, options.num_proc, reached)
        for host in reached.hosts:
            limit_link(host)
        _print_table(f"links of {LINK_BITS / 1e6:g} Mbit/s", options.models, options.num_proc, reached)
    print(f"\nafterwards: {machine.load()}")
    return 0


def _print_table(links: str, models: Sequence[str], ranks: Sequence[int], reached: sshd.SshHosts) -> None:
    print(f"\n{links}: milliseconds of a step without exchange, and speed as a share of the speed without exchange\n")
    exchanges = [name for name in EXCHANGES if name != "none"]
    print(f"{'model':<10}{'ranks':>6}{'ms':>9}" + "".join(f"{name:>11}" for name in exchanges))
    for model in models:
        for number in ranks:
            speeds = _speeds(model, number, reached)
            shares = "".join(f"{speeds[name] / speeds['none']:>11.0%}" for name in exchanges)
            print(f"{model:<10}{number:>6}{MODELS[model].batch_size / speeds['none'] * 1e3:>9.0f}{shares}", flush=True)


def _speeds(model: str, ranks: int, reached: sshd.SshHosts) -> dict[str, float]:
    """Return the images per second of a rank by exchange: the median over iterations of the mean over ranks."""
    results = sparkhvd.run(
        _speeds_of_rank,
        (replace(MODELS[model], **_PACE),),
        num_proc=ranks,
        launcher="ssh",
        hosts=",".join(host.address for host in reached.hosts[:ranks]),
        ssh_identity_file=reached.key,
        verbose=0,
    )
    return {
        name: statistics.median(statistics.fmean(iteration) for iteration in zip(*speeds, strict=True))
        for name, *speeds in zip(EXCHANGES, *results, strict=True)
    }


def _speeds_of_rank(options: Options) -> list[list[float]]:
    return [images_per_second(replace(options, **changes)) for changes in EXCHANGES.values()]


if __name__ == "__main__":
    sys.exit(main())
