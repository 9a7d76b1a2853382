from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from tests.launch.elastic_cluster_script import check_of_a_lost_executor
from tests.scripts import results_of, run_script
from tests.yarn_server import running_yarn

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.soak]

SCRIPT = Path(__file__).with_name("yarn_script.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory, hdfs) -> Iterator[dict]:
    folder = tmp_path_factory.mktemp("yarn")
    # A container with isolated GPUs finds a single GPU with the number 0.
    discovery = folder / "discover.sh"
    discovery.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0"]}'\n""")
    discovery.chmod(0o755)
    with running_yarn(folder) as conf:
        command = [sys.executable, SCRIPT, folder / "staging", f"{hdfs.url}/store", discovery]
        done = run_script(command, folder, 400, HADOOP_CONF_DIR=str(conf))
        logs = "".join(path.read_text()[-2000:] for path in folder.glob("logs/*/*/std*"))
        yield results_of(done, logs)
    shutil.rmtree(folder)


@pytest.mark.parametrize("launcher", ["barrier", "mpi"])
def test_ranks_in_two_containers_of_yarn_add_up_and_find_their_tokens(results, launcher):
    ranks = results[launcher]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert [rank["total"] for rank in ranks] == [3.0, 3.0]
    assert len({rank["container"] for rank in ranks}) == 2
    assert all(rank["tokens"] for rank in ranks), "Hadoop's token file must be where the ranks look for it"


def test_yarn_containers_are_hosts_to_open_mpi_and_share_memory_in_a_barrier_stage(results):
    assert [rank["shares_memory_with"] for rank in results["mpi"]] == [[0], [1]]
    assert [rank["shares_memory_with"] for rank in results["barrier"]] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("launcher", ["barrier", "mpi"])
def test_with_separate_gpu_indices_per_yarn_container_the_local_rank_is_the_device(results, launcher):
    assert [(rank["local_rank"], rank["local_size"], rank["visible"]) for rank in results[launcher]] == [
        (0, 1, "0")
    ] * 2


def test_an_estimator_trains_and_predicts_on_yarn_with_a_store_on_hdfs(results):
    assert len(results["errors"]) == 64
    assert max(results["errors"]) < 0.5, "the line y = 3x + 1 spans 3 and is nearly learned"


def test_an_elastic_job_survives_the_loss_of_a_container(tmp_path):
    jars = f"spark.yarn.jars=local:{Path(pyspark.__file__).parent}/jars/*"
    settings = ["spark.executor.instances=2", "spark.executor.memoryOverhead=2g", "spark.yarn.am.memory=512m", jars]
    staging = f"spark.yarn.stagingDir={tmp_path / 'staging'}"
    command = [
        sys.executable,
        "-m",
        "tests.launch.elastic_cluster_script",
        "yarn",
        tmp_path / "job",
        *settings,
        staging,
    ]
    with running_yarn(tmp_path) as conf:
        done = run_script(command, tmp_path, 400, HADOOP_CONF_DIR=str(conf), SPARKHVD_WARM_SECONDS="0")
    check_of_a_lost_executor(results_of(done))
    shutil.rmtree(tmp_path)
