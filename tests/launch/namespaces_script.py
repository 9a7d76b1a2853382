"""Run by test_namespaces.py in a separate process: three hosts, every Store, disconnected hosts.

python -m tests.launch.namespaces_script FOLDER [thoroughly]
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import Store
from sparkhvd.deadline import Deadline
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.driver.spark.slots import reserve_tasks
from sparkhvd.errors import LaunchError
from tests.hdfs_server import running_hdfs
from tests.launch import hosts, wire
from tests.launch.faults import CUT_OFF_FAULTS, Fault, complaints, inject
from tests.s3_server import BUCKET, running_s3
from tests.scripts import print_results

HOSTS = 3


def place() -> dict[str, object]:
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    communicator = session.current()
    world = communicator.world
    total = communicator.allreduce(np.array([world.rank + 1.0]), ReduceOp.SUM, name="sum")[0]
    return {"cross": [world.rank, world.size, world.cross_rank, world.local_size], "sum": float(total)}


def cut_off(fault: Fault, folder: Path, session: SparkSession, cluster: hosts.Cluster) -> dict[str, object]:
    """Run a job on all hosts, cut off the host of one rank, and connect all hosts again afterwards."""
    folder.mkdir()
    # Spark may have lost the executors of the hosts that were cut off in the previous job.
    while reserve_tasks(session, None, TaskResources(), Deadline.after(120.0)) < HOSTS:
        continue
    try:
        ended = inject(fault, folder, session, HOSTS)
    finally:
        for host in cluster.hosts:
            host.connect()
    wrong = complaints(fault, ended)
    sys.stderr.write(f"{fault.name}: {ended.seconds:.1f} s, {wrong}\n")
    named = re.search(r"on host ([\d.]+)", str(ended.error))
    if named is None or named[1] not in {host.address for host in cluster.hosts}:
        wrong.append("no host is named")
    return {"seconds": ended.seconds, "error": type(ended.error).__name__, "wrong": wrong}


def examined(
    session: SparkSession, shared: Store | None = None, nics: Sequence[str] | None = None
) -> dict[str, object]:
    report = sparkhvd.preflight(session, HOSTS, store=shared, nics=nics, timeout=200.0, stdout=sys.stderr)
    slots = next(check.says for check in report.checks if check.name == "slots")
    return {
        "problems": report.problems,
        "slots": slots,
        "hosts": [task.host for task in report.tasks],
        "seconds": report.seconds,
    }


def examined_apart(session: SparkSession, one: hosts.Host, other: hosts.Host) -> dict[str, object]:
    """Return the preflight's report while no packet gets from ``one`` to ``other``."""
    one.hide(other)
    try:
        return examined(session)
    finally:
        one.show(other)


def launched_apart(one: hosts.Host, others: Sequence[hosts.Host]) -> str:
    """Return the error of the mpi launcher while only the driver reaches a host."""
    for other in others:
        one.hide(other)
    try:
        sparkhvd.run(place, num_proc=HOSTS, launcher="mpi")
    except LaunchError as error:
        return str(error)
    finally:
        for other in others:
            one.show(other)
    return "nothing"


def learned_everywhere(spark: SparkSession, shared: Store, address: str, folder: Path) -> dict[str, list[float]]:
    """Return the errors of fits with Stores that all hosts reach: servers, and a shared folder."""
    from tests import lines  # noqa: PLC0415 - imports PyTorch

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("SPARKHVD_WARM_SECONDS", "60")  # the first fit imports PyTorch for all
        s3 = stack.enter_context(running_s3(address=address))
        folder.mkdir()
        hdfs = stack.enter_context(running_hdfs(folder, address=address))
        stores = {
            "s3": Store.create(f"s3a://{BUCKET}/store", storage_options=s3.options),
            "hdfs": Store.create(f"{hdfs.url}/store"),
            "a folder": shared,
        }
        return {name: lines.errors(spark, store, num_proc=HOSTS, batch_size=4) for name, store in stores.items()}


def place_and_say(backwards: str) -> dict[str, object]:
    """Return the rank's place; print a word, and reduce a tensor of its letters. Spark itself sends neither."""
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    found = place()
    word = "".join(reversed(backwards))
    print(f"printed {word}", flush=True)
    letters = np.frombuffer(f"reduced {word} ".encode(), np.uint8).copy()
    session.current().allreduce(letters, ReduceOp.MAX, name="letters")
    return found


def run_overheard(launcher: str, encrypt: str) -> dict[str, object]:
    """Return the places of a job's ranks, and what an observer between the hosts can read of the job."""
    word = "gnihtemos"
    traces = [f"printed {word[::-1]}", f"reduced {word[::-1]}", "finished/"]  # the rendezvous sends the last word
    environment = {"SPARKHVD_ENCRYPT": encrypt}
    with wire.overheard([trace.encode() for trace in traces]) as heard:
        ranks = sparkhvd.run(place_and_say, (word,), num_proc=HOSTS, launcher=launcher, env=environment)
    return {"ranks": ranks, "overheard": [trace for trace in traces if trace.encode() in heard]}


def session_on(cluster: hosts.Cluster) -> SparkSession:
    builder = SparkSession.builder.master(cluster.master).config("spark.executor.memory", "512m")
    for process in ("driver", "executor"):
        builder.config(f"spark.{process}.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        builder.config(name, cluster.address)
    builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "4")
    # An executor that fetches data from a silent host then asks another host within seconds, not minutes.
    builder.config("spark.shuffle.io.connectionTimeout", "5s").config("spark.shuffle.io.maxRetries", "0")
    return builder.config("spark.log.level", "ERROR").getOrCreate()


def main(folder: Path, thoroughly: bool) -> None:
    with hosts.cluster(HOSTS, folder) as cluster:
        os.environ["SPARK_LOCAL_IP"] = cluster.address
        session = session_on(cluster)
        try:
            shared = Store.create(str(folder / "store"))
            results: dict[str, object] = {
                "addresses": [host.address for host in cluster.hosts],
                "preflight": examined(session, shared),
                "preflight of two apart": examined_apart(session, *cluster.hosts[1:3]),
                "preflight of a network": examined(session, nics=[host.interface for host in cluster.hosts]),
                "preflight of bridges": examined(session, nics=["docker0"]),
                "jobs": {
                    f"{launcher}, {encrypt}": run_overheard(launcher, encrypt)
                    for launcher in ("barrier", "mpi")
                    for encrypt in ("0", "1")
                },
                "mpi, one apart": launched_apart(
                    cluster.hosts[1], [one for one in cluster.hosts if one is not cluster.hosts[1]]
                ),
                "cut off": {
                    fault.name: cut_off(fault, folder / f"cut {number}", session, cluster)
                    for number, fault in enumerate(CUT_OFF_FAULTS)
                    if thoroughly or fault.always
                },
            }
            if thoroughly:
                results["errors"] = learned_everywhere(session, shared, cluster.address, folder / "hdfs")
        finally:
            session.stop()
    print_results(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["thoroughly"])
