from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

SPARK_HOME = Path(pyspark.__file__).parent
SCRIPT = Path(__file__).with_name("cluster_script.py")


PLACES = [{"rank": rank, "size": 2, "local_rank": rank, "cross_size": 1} for rank in range(2)]


def start(command: list[str | Path], folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        input=stdin,
        env={
            **os.environ,
            "PYTHONPATH": str(SCRIPT.parents[2]),
            "PYSPARK_DRIVER_PYTHON_OPTS": "-i",
            "SPARK_WORKER_DIR": str(folder),
            "SPARK_LOCAL_DIRS": str(folder),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def found_by(done: subprocess.CompletedProcess[str]) -> dict:
    found = re.search(r"FOUND (\{.*\})$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return json.loads(found[1])


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("local cluster")
    return start([sys.executable, SCRIPT, "local-cluster[2,1,1024]", folder / "attempts"], folder)


def test_a_local_cluster_runs_a_job_again_when_a_task_or_an_executor_is_killed(local_cluster):
    done, found = local_cluster, found_by(local_cluster)
    assert found["places"] == PLACES
    assert done.stdout.count("[0]<stdout>:hello") == done.stdout.count("[1]<stdout>:hello") == 1
    assert "num_proc=3 ranks were asked for, but the cluster has 2 slots" in found["slots"]
    assert (found["sums"], found["attempts"]) == ([3.0, 3.0], 3)
    assert found["left"] == []


def test_a_fit_that_loses_an_executor_goes_on_from_its_last_checkpoint(local_cluster):
    found = found_by(local_cluster)
    assert found["resumed"] == found["undisturbed"]
    first, second = ([step for step in found["steps"] if step.startswith(epoch)] for epoch in ("0.", "1."))
    assert len(first) == len(set(second)) == 8, "the first epoch was trained once"
    assert len(second) <= 8 + 2, f"executor lost after step 4, every second step kept: {second}"


@pytest.fixture
def standalone_master(tmp_path):
    """A master and a worker with two cores on loopback, each a JVM of ours, ended by its process."""
    environment = {**os.environ, "SPARK_WORKER_DIR": str(tmp_path), "SPARK_DAEMON_MEMORY": "256m"}
    environment["SPARK_DAEMON_JAVA_OPTS"] = "-XX:TieredStopAtLevel=1"
    processes = []

    def serve(name: str, *arguments: str) -> Path:
        log = tmp_path / f"{name}.log"
        with log.open("w") as file:
            command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
            processes.append(
                subprocess.Popen(
                    [*command, "--port", "0", "--webui-port", "0", *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            )
        return log

    try:
        master = await_line(serve("master.Master"), r"Starting Spark master at (spark://\S+)", processes)
        worker = serve("worker.Worker", "--cores", "2", "--memory", "800m", master)
        await_line(worker, r"(Successfully registered) with master", processes)
        yield master
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def await_line(log: Path, pattern: str, processes: list[subprocess.Popen]) -> str:
    for _ in range(600):
        if found := re.search(pattern, log.read_text()):
            return found[1]
        with pytest.raises(subprocess.TimeoutExpired):
            processes[-1].wait(0.1)
    raise AssertionError(f"{pattern} did not appear in time:\n{log.read_text()}")


SHELL_INPUT = """
import json, os, sparkhvd
def place():
    names = ("RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE")
    return {name.lower(): int(os.environ["SPARKHVD_" + name]) for name in names}

print("FOUND", json.dumps({"places": sparkhvd.run(place)}))
sparkhvd.run(place, num_proc=3, start_timeout=2)
"""


def test_a_function_typed_into_the_pyspark_shell_runs_on_all_slots_of_a_standalone_cluster(standalone_master, tmp_path):
    settings = ["spark.ui.enabled=false", "spark.executor.memory=700m"]
    settings += [f"spark.{one}.extraJavaOptions=-XX:TieredStopAtLevel=1" for one in ("driver", "executor")]
    options = [option for setting in settings for option in ("--conf", setting)]
    done = start([SPARK_HOME / "bin" / "pyspark", "--master", standalone_master, *options], tmp_path, SHELL_INPUT)
    assert found_by(done) == {"places": PLACES}
    assert "SlotsError: num_proc=3 ranks were asked for, but the cluster has 2 slots after waiting" in done.stderr
