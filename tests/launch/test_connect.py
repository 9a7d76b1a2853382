from __future__ import annotations

import json
import re
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.s3_server import BUCKET, SECRET
from tests.scripts import results_of, run_script

SCRIPT = Path(__file__).with_name("connect_script.py")


def results_of_script(folder: Path, *words: str, **environment: str) -> tuple[dict[str, Any], str, str]:
    """Return the results of the script, and its output."""
    discovery = folder / "discover.sh"
    discovery.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    discovery.chmod(0o755)
    done = run_script([sys.executable, SCRIPT, *words], folder, 580, GPU_SCRIPT=str(discovery), **environment)
    return results_of(done), done.stdout, done.stderr


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("connect_port")
def test_run_fit_and_transform_work_through_a_spark_connect_server(tmp_path):
    results, stdout, _ = results_of_script(tmp_path)
    assert results["module"] == "pyspark.sql.connect.session"
    assert results["places"] == [[0, 2], [1, 2]]
    assert {"[0]<stdout>:hello", "[1]<stdout>:hello"} <= set(stdout.splitlines())
    assert re.match(r"Rank \d on host \S+ raised ValueError: no luck", results["failure"])
    assert "num_proc=3 is more than the 2 slots of the cluster" in results["slots"]
    assert "a Spark Connect client is not such a driver. Use launcher='barrier'" in results["mpi"]
    assert sorted(results["gpus"]) == [["0"], ["1"]]
    assert results["elastic"] == [[0, 2, True], [1, 2, True]]
    assert "is more than the 1 slot of the cluster" in results["slots for GPUs"]
    assert "spark.task.cpus=1, 2 GPUs per task" in results["slots for GPUs"]
    assert "spark.sql.leafNodeDefaultParallelism=7 of this cluster overrides. Set num" in results["hidden cores"]
    assert "spark.sql.leafNodeDefaultParallelism=7 of this cluster hides it" in results["hidden slots"]
    (ready, asked), (refused, all_slots) = results["preflight with hidden cores"]
    assert ready, asked
    assert "2 ranks requested; spark.sql.leafNodeDefaultParallelism=7 hides the number of slots" in asked
    assert "all ranks are on one host" in asked, "the tasks were asked"
    assert re.search(r"^- +slots +num_proc=None uses all slots.* Set num_proc\.$", all_slots, re.MULTILINE), refused
    for store in ("without a Store", "with a Store"):
        check_learned(results[f"errors {store}"])
    check_searched(results["search"])
    assert results["doubled"] == [0.0, 2.0, 4.0, 6.0]
    assert results["predictions"] == 1, "two outputs must not make two predictions"
    assert results["interrupted"].startswith("Spark aborted the job: it was cancelled (Operation has been canceled).")
    assert results["left by Ctrl-C"] == []
    assert "were not free at the same time within start_timeout=5 s" in results["busy"]
    waiting = "WaitingJob(ranks=2, priority=0, tags=frozenset({'second'}))"
    assert results["slots of two jobs"] == [
        f"SlotUse(total=2, running=(2,), waiting=({waiting},), tasks=None)",
        "A job of 2 ranks was cancelled while it waited for its slots.",
        "SlotUse(total=2, running=(), waiting=(), tasks=None)",
    ]
    assert results["places afterwards"] == results["places"]


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("connect_port")
def test_s3_the_doctor_slow_rows_and_killed_clients_work_through_a_spark_connect_server(s3, tmp_path):
    store = {"url": f"s3://{BUCKET}/{uuid.uuid4().hex}", "storage_options": s3.options}
    results, stdout, stderr = results_of_script(tmp_path, "thoroughly", S3_STORE=json.dumps(store))
    assert [sorted(names) for names in results["gpus without num_proc"]] == [["0", "1"]]
    ready, printed = results["preflight"]
    assert ready, printed
    code, printed = results["doctor"]
    assert code == 0, printed
    assert "sparkhvd preflight: ready" in printed
    assert "2 ranks (2 requested; master connect)" in printed
    check_learned(results["errors on S3"])
    assert SECRET not in stdout + stderr
    before, after = results["executors of slow rows"]
    assert before == after, "the interrupt cost an executor"
    assert "were not free at the same time within start_timeout=5 s" in results["all busy"]
    assert results["left by a killed client"] == []
    assert results["places afterwards"] == results["places"]


def check_searched(search: dict[str, Any]) -> None:
    """Check a search that Ctrl-C interrupted and that then continued."""
    assert search["states"].count("COMPLETE") == 2, search
    assert set(search["states"]) == {"COMPLETE", "FAIL"}, search
    assert search["mean squared error"] == pytest.approx(search["best value"], rel=1e-5)
    assert search["runs"] == 1, "only the run of the best trial stays"
    assert search["slots"] == "SlotUse(total=2, running=(), waiting=(), tasks=None)"


def check_learned(errors: list[float]) -> None:
    assert len(errors) == 64
    assert max(errors) < 0.5, "the line y = 3x + 1 spans 3 and is nearly learned"


@pytest.mark.spark
@pytest.mark.soak
@pytest.mark.usefixtures("connect_port")
def test_the_doctor_reports_that_a_connect_server_without_executors_assigns_no_gpus(tmp_path):
    words = ["-m", "sparkhvd.cli.main", "doctor", "--remote", "local[2]", "-np", "2", "--gpus-per-task", "1"]
    done = run_script([sys.executable, *words], tmp_path, 110)
    assert done.returncode == 1
    refused = r"^FAIL +tasks +gpus_per_task and cpus_per_task do not work on this Spark Connect server: Spark supports "
    assert re.search(refused, done.stdout, re.MULTILINE), done.stdout + done.stderr
