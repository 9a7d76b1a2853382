"""Fake GPUs from a Spark discovery script, on a real cluster of one machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import sparkhvd
from sparkhvd import SparkBackend
from sparkhvd.errors import ConfigError, LaunchError
from tests import lines
from tests.scripts import results_of, run_script

SCRIPT = Path(__file__).with_name("gpu_script.py")


def run_with_four_gpus(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    discovery = folder / "discover.sh"
    discovery.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1", "2", "3"]}\'\n')
    discovery.chmod(0o755)
    return run_script([sys.executable, SCRIPT, discovery, *words], folder, 280)


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_get_the_gpus_that_spark_assigns_to_their_tasks(tmp_path):
    done = run_with_four_gpus(tmp_path)
    results = results_of(done)
    two = results["two each"]
    firsts, rest = [one["own"][0] for one in two], [one["own"][1] for one in two]
    assert {*firsts, *rest} == {"0", "1", "2", "3"}
    assert [one["CUDA_VISIBLE_DEVICES"] for one in two] == [",".join(firsts + rest)] * 2
    assert [one["OMP_NUM_THREADS"] for one in two] == [one["TF_NUM_INTRAOP_THREADS"] for one in two] == ["2", "2"]
    line = f"[0]<stdout>:rank 1: host 127.0.0.1, local rank 1, GPU {', '.join(two[1]['own'])}"
    assert line in done.stdout.splitlines()
    one = results["one each, by mpi"]
    assert [entry["CUDA_VISIBLE_DEVICES"] for entry in one] == [",".join(entry["own"][0] for entry in one)] * 2
    shared = results["shared"]
    assert shared[0]["own"] == shared[1]["own"], "Spark fills a GPU before it takes the next one"
    halves = [entry["own"] for entry in results["half each"]]
    assert halves[0] == halves[1] != halves[2] == halves[3]
    for entry in (*shared, *results["half each"]):
        assert [entry["CUDA_VISIBLE_DEVICES"]] == entry["own"]
    assert re.search(
        r"^\[0\]<stdout>:Spark assigned GPU \d on host 127\.0\.0\.1 to ranks 0, 1\. ", done.stdout, re.MULTILINE
    )
    assert [entry["CUDA_DEVICE_ORDER"] for entry in (*two, *one, *shared)] == ["PCI_BUS_ID"] * 6
    assert results["the user's"][0]["CUDA_VISIBLE_DEVICES"] == "7"
    assert results["the user's"][0]["CUDA_DEVICE_ORDER"] is None
    assert results["the user's"][0]["own"] == ["7"]
    assert results["parallelism of the rest"] == 4
    assert "num_proc=3 is more than the 2 slots of the cluster" in results["slots"]
    assert "spark.task.cpus=1, 2 GPUs per task" in results["slots"]


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.usefixtures("warm_ranks")
def test_the_ranks_of_a_fit_get_gpus_and_the_threads_of_their_cores(tmp_path):
    results = results_of(run_with_four_gpus(tmp_path, "with fits"))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    assert results["threads"] == [{"torch": 1} | dict.fromkeys(names, "1") | {"TF_NUM_INTEROP_THREADS": "2"}]
    fit = results["fit"]
    assert fit["error"] < 0.5, "the line y = 3x + 1 spans 3 and is nearly learned"
    given = re.findall(
        r"^\[0\]<stdout>:rank \d: host \S+, local rank \d, GPU (\d), (\d)$", fit["printed"], re.MULTILINE
    )
    assert sorted(name for pair in given for name in pair) == ["0", "1", "2", "3"]
    assert results["refused fit"]["slots"] == results["slots"]
    assert results["refused fit"]["left"] == [], "nothing is prepared before the slots are checked"
    assert results["refused fit"]["preflight"] == [results["slots"]]
    assert [len(names) for names in results["refused fit"]["devices"]] == [2, 2]


@pytest.mark.spark
def test_unsupported_stage_resources_are_an_error(spark):
    with pytest.raises(
        LaunchError, match=r"do not work with master local\[4\]: Spark supports resources per stage only"
    ):
        sparkhvd.run(print, num_proc=1, cpus_per_task=2)
    with pytest.raises(
        LaunchError, match=r"do not work with master local\[4\]: Spark supports resources per stage only"
    ):
        lines.errors(spark, None, num_proc=None, backend=SparkBackend(1, cpus_per_task=2))
    with pytest.raises(
        ConfigError, match=r"gpus_per_task must be a positive integer or a fraction between 0 and 1 .*, got 1\.5\."
    ):
        sparkhvd.run(print, num_proc=1, gpus_per_task=1.5)
    with pytest.raises(ConfigError, match="configure Spark tasks, but launcher='local' starts none"):
        sparkhvd.run(print, num_proc=1, gpus_per_task=1, launcher="local")
