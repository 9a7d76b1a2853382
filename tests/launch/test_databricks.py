"""All that Databricks sets, at once: its GPUs, two cores per task, its mount, a notebook's output."""

from __future__ import annotations

import shutil
import sys
import uuid
from pathlib import Path

import pytest

from tests.scripts import results_of, run_script


@pytest.fixture
def mounted():
    """Provide a folder of DBFS."""
    made, folder = Path("/dbfs").exists(), Path("/dbfs", uuid.uuid4().hex)
    try:
        folder.mkdir(parents=True)
    except OSError:
        pytest.skip("making /dbfs, where Databricks mounts its files, needs root")
    yield folder
    shutil.rmtree(folder)
    if not made:
        Path("/dbfs").rmdir()


@pytest.mark.spark
@pytest.mark.cluster
@pytest.mark.soak
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_run_and_train_in_the_environment_of_databricks(mounted, tmp_path):
    discovery = tmp_path / "discover.sh"
    discovery.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    discovery.chmod(0o755)
    command = [sys.executable, "-m", "tests.launch.databricks_script", tmp_path, mounted.name]
    results = results_of(run_script(command, tmp_path, 280, DATABRICKS_RUNTIME_VERSION="16.4"))
    for launcher in ("barrier", "mpi"):
        ranks, printed = results[launcher], results[f"printed, {launcher}"].splitlines()
        assert sorted(rank["own"][0] for rank in ranks) == ["4", "5"], "CUDA's names, not Spark's"
        assert [rank["local rank"] for rank in ranks] == [0, 1]
        for number, rank in enumerate(ranks):
            assert sorted(rank["seen"]) == ["4", "5"]
            assert rank["own"] == [rank["seen"][rank["local rank"]]], "set_device(hvd.local_rank()) is right"
            assert rank["threads"] == [2, "2", "2"], "spark.task.cpus"
            assert rank["runtime"] == "16.4"
            assert f"[{number}]<stdout>:hello" in printed
            line = f"[0]<stdout>:rank {number}: host 127.0.0.1, local rank {number}, GPU {rank['own'][0]}"
            assert line in printed, printed
    assert results["report"].startswith("sparkhvd preflight: ready"), results["report"]
    assert "slots          2 ranks (all slots; " in results["report"]
    assert results["error"] < 0.5, "the line y = 3x + 1 spans 3 and is nearly learned"
    logs = mounted / "store" / "logs"
    files = [sorted(logs.glob(f"rank.{rank}/stdout.*")) for rank in range(2)]  # a slow rank begins a second one
    kept = ["".join(path.read_text() for path in of_rank) for of_rank in files]
    assert [text.splitlines()[-1] for text in kept] == ["hello"] * 2
