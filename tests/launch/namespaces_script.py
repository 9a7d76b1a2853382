"""Run by test_namespaces.py in a process of its own: run and fit on four hosts, on every Store; a host that is cut off.

python -m tests.launch.namespaces_script FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from pyspark.sql import SparkSession

import sparkhvd
from sparkhvd import Store, TorchEstimator
from sparkhvd.errors import LaunchError
from tests.hdfs_server import running_hdfs
from tests.launch import hosts
from tests.s3_server import BUCKET, running_s3
from tests.waiting import happens

HOSTS = 4


def place() -> dict[str, object]:
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    communicator = session.current()
    world = communicator.world
    total = communicator.allreduce(np.array([world.rank + 1.0]), ReduceOp.SUM, name="sum")[0]
    return {"cross": [world.rank, world.size, world.cross_rank, world.local_size], "sum": float(total)}


def busy(folder: str) -> None:
    """Collectives without end."""
    import numpy as np  # noqa: PLC0415

    from sparkhvd.comm import session  # noqa: PLC0415
    from sparkhvd.comm.buffers import ReduceOp  # noqa: PLC0415

    session.init()
    communicator = session.current()
    while True:
        communicator.allreduce(np.ones(1 << 16, np.float32), ReduceOp.SUM, name="endless")
        Path(folder, str(communicator.world.rank)).write_text(str(os.getpid()))


def cut(launcher: str, victim: hosts.Host, folder: Path) -> dict[str, object]:
    """Cut a host off in the middle of a job: the error, how long it took, and who was left in the end."""
    folder.mkdir()
    began: list[float] = []

    def pull() -> None:
        happens(lambda: len([one for one in folder.iterdir() if one.read_text()]) == HOSTS, 120.0)
        began.append(time.monotonic())
        victim.cut_off()

    thread = threading.Thread(target=pull)
    thread.start()
    try:
        sparkhvd.run(busy, (str(folder),), launcher=launcher, num_proc=HOSTS, stdout=sys.stderr)
        message = "no error"
    except LaunchError as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began[0]
    thread.join()
    pids = [int(one.read_text()) for one in folder.iterdir()]
    happens(lambda: not any(psutil.pid_exists(pid) for pid in pids), 60.0)
    ended = time.monotonic() - began[0]
    victim.connect()
    left = [pid for pid in pids if psutil.pid_exists(pid)]
    return {"error": message, "host": victim.address, "seconds": seconds, "ended": ended, "left": left}


def trained(spark: SparkSession, store: Store) -> list[float]:
    df = spark.range(64).selectExpr("id / 64.0D AS x", "3 * id / 64.0D + 1 AS y")
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    estimator = TorchEstimator(
        num_proc=HOSTS,
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.3),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=4,
        epochs=10,
        random_seed=1,
        verbose=0,
    )
    rows = estimator.fit(df).transform(df).select("y", "y__output").collect()
    return [abs(row.y - row.y__output) for row in rows]


def trained_remotely(spark: SparkSession, address: str, folder: Path) -> dict[str, list[float]]:
    """The same on servers that the hosts reach by their network."""
    folder.mkdir()
    with running_hdfs(folder, address=address) as hdfs, running_s3(address=address) as s3:
        stores = {
            "hdfs": Store.create(f"{hdfs.url}/store"),
            "s3": Store.create(f"s3a://{BUCKET}/store", storage_options=s3.options),
        }
        return {name: trained(spark, store) for name, store in stores.items()}


def session_on(cluster: hosts.Cluster) -> SparkSession:
    builder = SparkSession.builder.master(cluster.master).config("spark.executor.memory", "512m")
    for process in ("driver", "executor"):
        builder.config(f"spark.{process}.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        builder.config(name, cluster.address)
    builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "4")
    return builder.config("spark.log.level", "ERROR").getOrCreate()


def main(folder: Path, thoroughly: bool) -> None:
    with hosts.cluster(HOSTS, folder) as cluster:
        os.environ["SPARK_LOCAL_IP"] = cluster.address
        session = session_on(cluster)
        try:
            shared = Store.create(str(folder / "store"))
            report = sparkhvd.preflight(session, HOSTS, store=shared, timeout=200.0, stdout=sys.stderr)
            found: dict[str, object] = {
                "preflight": report.problems,
                "preflight seconds": report.seconds,
                "hosts": [task.host for task in report.tasks],
                "addresses": [host.address for host in cluster.hosts],
                "barrier": sparkhvd.run(place, num_proc=HOSTS, launcher="barrier"),
                "mpi": sparkhvd.run(place, num_proc=HOSTS, launcher="mpi"),
                "errors": {
                    "a folder": trained(session, shared),
                    **trained_remotely(session, cluster.address, folder / "hdfs"),
                },
                "barrier cut": cut("barrier", cluster.hosts[2], folder / "barrier"),
            }
            if thoroughly:
                found["mpi cut"] = cut("mpi", cluster.hosts[1], folder / "mpi")
        finally:
            session.stop()
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["thoroughly"])
