"""Run a job and an executor through Ray Client; the argument is the port for the client server."""

from __future__ import annotations

import os
import sys

import ray
from ray.cluster_utils import Cluster

import sparkhvd
from sparkhvd.errors import RankFailedError
from sparkhvd.ray import RayExecutor


def rank() -> str:
    return os.environ["SPARKHVD_RANK"]


def fail_on_rank_1() -> None:
    if rank() == "1":
        raise ValueError("no luck")


def connect(port: int, tries: int = 3) -> None:
    """Connect with retries: on a busy machine, Ray may fail to start a server for the client."""
    for number in range(1, tries + 1):
        try:
            ray.init(f"ray://127.0.0.1:{port}")
        except ConnectionError:
            if number == tries:
                raise
        else:
            return


def main(port: int) -> None:
    head = {
        "num_cpus": 2,
        "include_dashboard": False,
        "ray_client_server_port": port,
        "_system_config": {"worker_niceness": 0},  # at Ray's default, other programs starve its workers
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        connect(port)
        assert sparkhvd.run(rank, num_proc=2, launcher="ray") == ["0", "1"]
        with RayExecutor(num_workers=2) as executor:
            executor.start()
            assert ray.get(executor.run_remote(rank)) == ["0", "1"]
            try:
                executor.run(fail_on_rank_1)
            except RankFailedError as error:
                print(str(error).splitlines()[0])
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
