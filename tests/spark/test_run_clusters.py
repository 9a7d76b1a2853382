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


def run_script(master: str, folder: Path) -> tuple[dict, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), master],
        env={**os.environ, "SPARK_WORKER_DIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    found = re.search(r"^FOUND (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return json.loads(found[1]), done.stdout


def check(found: dict, output: str) -> None:
    place = {"size": 2, "cross_size": 1}
    assert found["places"] == [[{"rank": 0, "local_rank": 0, **place}, {"rank": 1, "local_rank": 1, **place}]] * 2
    assert found["failure"].startswith("Rank 1 on host 127.0.0.1 raised ValueError: on purpose.")
    assert "num_proc=3 ranks were asked for, but the cluster has 2 slots" in found["slots"]
    assert output.count("[0]<stdout>:hello") == output.count("[1]<stdout>:hello") == 2


def test_run_works_on_a_local_cluster(tmp_path):
    check(*run_script("local-cluster[2,1,1024]", tmp_path))


@pytest.fixture
def standalone_master(tmp_path):
    """A master and a worker with two cores on loopback, each a JVM of ours, ended by its process."""
    environment = {**os.environ, "SPARK_WORKER_DIR": str(tmp_path), "SPARK_DAEMON_MEMORY": "256m"}
    processes = []

    def start(name: str, *arguments: str) -> Path:
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
        master = await_line(start("master.Master"), r"Starting Spark master at (spark://\S+)", processes)
        worker = start("worker.Worker", "--cores", "2", "--memory", "800m", master)
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


def test_run_works_on_a_standalone_cluster(standalone_master, tmp_path):
    check(*run_script(standalone_master, tmp_path))


SHELL_INPUT = """
import sparkhvd
def square_rank(n):
    import os
    return (int(os.environ["SPARKHVD_RANK"]) + n) ** 2

print("SQUARES", sparkhvd.run(square_rank, (1,), num_proc=2))
"""


def test_run_takes_a_function_that_was_typed_into_the_pyspark_shell(tmp_path):
    done = subprocess.run(
        [SPARK_HOME / "bin" / "pyspark", "--master", "local[2]", "--conf", "spark.ui.enabled=false"],
        input=SHELL_INPUT,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "PYSPARK_DRIVER_PYTHON_OPTS": "-i"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "SQUARES [1, 4]" in done.stdout, done.stdout + done.stderr
