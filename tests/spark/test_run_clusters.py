from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyspark
import pytest

from tests.launch.elastic_cluster_script import check_of_a_lost_executor
from tests.scripts import results_of, run_script

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

RANKS_ARE_CHILDREN = True  # tests look for tasks and executors among the ancestors of a rank
SPARK_HOME = Path(pyspark.__file__).parent
SCRIPT = Path(__file__).with_name("cluster_script.py")


PLACES = [{"rank": rank, "size": 2, "local_rank": rank, "cross_size": 1} for rank in range(2)]


def start(command: list[str | Path], folder: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    more = {"PYSPARK_DRIVER_PYTHON_OPTS": "-i", "SPARK_WORKER_DIR": str(folder)}
    return run_script(command, folder, 500, stdin=stdin, **more)


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    return on_a_local_cluster(tmp_path_factory.mktemp("local cluster"), "run", "interrupted")


@pytest.fixture(scope="module")
def another_local_cluster(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("another local cluster")
    return results_of(on_a_local_cluster(folder, "torch", "lightning", "keras", "executor lost"))


def on_a_local_cluster(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    return start([sys.executable, SCRIPT, "local-cluster[2,1,1024]", folder, *parts], folder)


@pytest.mark.soak
@pytest.mark.usefixtures("connect_port")
@pytest.mark.parametrize("how", ["master", "remote"])
def test_dynamic_allocation_is_refused_on_a_cluster_and_ignored_on_a_local_master(how, tmp_path):
    script = SCRIPT.with_name("dynamic_allocation_script.py")
    local = results_of(run_script([sys.executable, script, how, "local[2]"], tmp_path, 240))
    assert local == {"ranks": ["0", "1"]}
    cluster = results_of(run_script([sys.executable, script, how, "local-cluster[1,1,1024]"], tmp_path, 240))
    assert re.search(r"does not run barrier stages .*dynamicAllocation.enabled=false", cluster["refused"])


def test_a_local_cluster_runs_a_job_again_when_a_task_or_an_executor_is_killed(local_cluster):
    done, results = local_cluster, results_of(local_cluster)
    assert results["places"] == PLACES
    assert results["met"] == ["Introductions", "Introductions"], "Spark numbers the tasks of two executors as well"
    assert done.stdout.count("[0]<stdout>:hello") == done.stdout.count("[1]<stdout>:hello") == 1
    assert "num_proc=3 is more than the 2 slots of the cluster" in results["slots"]
    assert (results["sums"], results["attempts"]) == ([3.0, 3.0], 3)
    assert results["left"] == []


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["torch", "lightning", "keras"])
def test_a_fit_that_loses_an_executor_resumes_from_its_last_checkpoint(another_local_cluster, framework):
    found = another_local_cluster[framework]
    assert found["resumed"] == found["undisturbed"]
    first, second = ([step for step in found["steps"] if step.startswith(epoch)] for epoch in ("0.", "1."))
    assert len(first) == 8, "the first epoch was trained once"
    # In the rest of an epoch, Keras counts the batches from the first one again.
    assert 8 <= len(second) <= 8 + 2, f"every second step is kept: {second}"


@pytest.mark.soak
def test_with_open_mpi_a_lost_executor_is_one_error_without_leftovers(another_local_cluster):
    assert another_local_cluster["executor lost"] == []


def test_with_open_mpi_interrupting_a_job_with_waiting_tasks_ends_no_executor(local_cluster):
    assert results_of(local_cluster)["interrupted"] == []


# A separate mount namespace without a visible NVIDIA driver.
ISOLATED = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc/driver && exec "$@"', "sh")


@cache
def can_isolate() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Standalone:
    """A cluster, and the processes of its workers."""

    master: str
    workers: tuple[int, int]


@pytest.fixture
def standalone(tmp_path):
    """Run a master and two workers with one core and one GPU each, as JVMs that this fixture ends.

    Spark's index of both GPUs is 0. As on Databricks, the executors of the second worker see only one GPU of the
    machine. Where namespaces can be created, sparkhvd considers each worker a separate host.
    """
    discovery = tmp_path / "discover.sh"
    discovery.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0"]}\'\n')
    discovery.chmod(0o755)
    gpu = "-Dspark.worker.resource.gpu"
    environment = {**os.environ, "SPARK_WORKER_DIR": str(tmp_path), "SPARK_DAEMON_MEMORY": "128m"}
    environment["SPARK_DAEMON_JAVA_OPTS"] = "-XX:TieredStopAtLevel=1"
    environment["SPARK_WORKER_OPTS"] = f"{gpu}.amount=1 {gpu}.discoveryScript={discovery}"
    processes = []

    def serve(name: str, *arguments: str, prefix: tuple[str, ...] = (), more: dict[str, str] | None = None) -> Path:
        log = tmp_path / f"{name}-{len(processes)}.log"
        with log.open("w") as file:
            command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
            processes.append(
                subprocess.Popen(
                    [*prefix, *command, "--port", "0", "--webui-port", "0", *arguments],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=environment | (more or {}),
                )
            )
        return log

    try:
        master = await_line(serve("master.Master"), r"Starting Spark master at (spark://\S+)", processes)
        prefix = ISOLATED if can_isolate() else ()
        logs = [
            serve("worker.Worker", "--cores", "1", "--memory", "800m", master, prefix=prefix, more=more)
            for more in ({}, {"CUDA_VISIBLE_DEVICES": "5", "DATABRICKS_RUNTIME_VERSION": "16.4"})
        ]
        for log in logs:
            await_line(log, r"(Successfully registered) with master", processes)
        yield Standalone(master, (processes[1].pid, processes[2].pid))
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


def await_line(log: Path, pattern: str, processes: list[subprocess.Popen]) -> str:
    for _ in range(600):
        if match := re.search(pattern, log.read_text()):
            return match[1]
        with pytest.raises(subprocess.TimeoutExpired):
            processes[-1].wait(0.1)
    raise AssertionError(f"{pattern} did not appear in time:\n{log.read_text()}")


SHELL_INPUT = """
import json, os, sparkhvd
from pathlib import Path
from sparkhvd.errors import LaunchError
def place():
    names = ("RANK", "SIZE", "LOCAL_RANK", "CROSS_SIZE")
    return {name.lower(): int(os.environ["SPARKHVD_" + name]) for name in names}

def devices():
    import sparkhvd.task
    return [sparkhvd.task.get_available_devices(), os.environ.get("CUDA_VISIBLE_DEVICES")]

def refused(launcher):
    try:
        sparkhvd.run(place, num_proc=2, launcher=launcher)
    except LaunchError as error:
        return str(error)

def add_gpu(worker, model):
    folder = Path("/proc", worker, "root/proc/driver/nvidia/gpus/0000:05:00.0")
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: " + model)

found = {"places": sparkhvd.run(place), "devices": sparkhvd.run(devices, num_proc=2, gpus_per_task=1)}
first, second, can_isolate = os.environ["WORKERS"].split()
if can_isolate == "True":
    add_gpu(first, "NVIDIA L4")
    found["refused"] = [refused("barrier"), refused("mpi")]
    add_gpu(second, "NVIDIA H100")
    found["devices again"] = sparkhvd.run(devices, num_proc=2, gpus_per_task=1)

print("RESULTS", json.dumps(found))
sparkhvd.run(place, num_proc=3, start_timeout=2)
"""


def test_a_function_typed_into_the_pyspark_shell_runs_on_all_slots_and_gpus_of_a_standalone_cluster(
    standalone, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORKERS", f"{standalone.workers[0]} {standalone.workers[1]} {can_isolate()}")
    settings = ["spark.ui.enabled=false", "spark.executor.memory=700m", "spark.executor.resource.gpu.amount=1"]
    settings += [f"spark.{one}.extraJavaOptions=-XX:TieredStopAtLevel=1" for one in ("driver", "executor")]
    options = [option for setting in settings for option in ("--conf", setting)]
    done = start([SPARK_HOME / "bin" / "pyspark", "--master", standalone.master, *options], tmp_path, SHELL_INPUT)
    results = results_of(done)
    assert "SlotsError: num_proc=3 is more than the 2 slots of the cluster after waiting" in done.stderr
    if not can_isolate():
        assert results["places"] == PLACES
        assert sorted(results["devices"]) == [[["0"], "0,5"], [["5"], "0,5"]]
        return
    assert results["places"] == [one | {"local_rank": 0, "cross_size": 2} for one in PLACES]
    assert sorted(results["devices"]) == sorted(results["devices again"]) == [[["0"], "0"], [["5"], "5"]]
    for message in results["refused"]:
        assert re.match(
            r"Ranks must all run on GPUs or all on CPUs: task \d on host 127\.0\.0\.1 has a GPU \(NVIDIA L4\), "
            r"task \d on host 127\.0\.0\.1 has none",
            message,
        )
    assert done.stdout.count("[0]<stdout>:The ranks have different GPUs: GPU (NVIDIA H100) on host 127.0.0.1; ") == 1


@pytest.mark.soak
def test_an_elastic_job_on_a_standalone_cluster_survives_the_loss_of_an_executor(standalone, tmp_path):
    command = [sys.executable, "-m", "tests.launch.elastic_cluster_script", standalone.master, tmp_path / "job"]
    check_of_a_lost_executor(results_of(run_script(command, tmp_path, 400, SPARKHVD_WARM_SECONDS="0")))
