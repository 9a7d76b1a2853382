"""The effect of Databricks' environment variables; the tests of the Stores cover the files of its mounts."""

from __future__ import annotations

import pytest

from sparkhvd.compat.databricks import mounted_path, spark_url_of, task_gpus
from sparkhvd.config import runs_on_databricks
from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.store.registry import scheme_of
from sparkhvd.task.assignment import assign
from sparkhvd.task.devices import cuda_names, device_variables


@pytest.mark.parametrize(
    ("url", "mounted"),
    [
        ("dbfs:/a/b", "/dbfs/a/b"),
        ("/dbfs/a/b", "/dbfs/a/b"),
        ("file:/dbfs/a/b", "/dbfs/a/b"),
        ("file:///dbfs/a/b", "/dbfs/a/b"),
        ("/Volumes/c/s/v/a", "/Volumes/c/s/v/a"),
        ("dbfs:/Volumes/c/s/v/a", "/Volumes/c/s/v/a"),
        ("file:/Volumes/c/s/v/a", "/Volumes/c/s/v/a"),
        ("dbfs://a/b", None),
        ("/dbfsx/a", None),
        ("/tmp/a", None),
        ("s3://dbfs/a", None),
    ],
)
def test_databricks_paths_are_translated_to_their_mount_points(url, mounted):
    assert mounted_path(url) == mounted


@pytest.mark.parametrize("path", ["/dbfs/a/b", "/Volumes/c/s/v/a"])
def test_the_spark_url_of_a_mounted_folder_translates_back_to_it(path):
    assert mounted_path(spark_url_of(path)) == path


def test_mounts_are_translated_only_on_databricks_clusters(monkeypatch):
    paths = ("/dbfs/a", "/Volumes/c/s/v/a", "/tmp/a", "dbfs:/a")
    assert not runs_on_databricks()
    assert [scheme_of(path) for path in paths] == ["file", "file", "file", "dbfs"]
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    assert runs_on_databricks()
    assert [scheme_of(path) for path in paths] == ["dbfs", "dbfs", "file", "dbfs"]


def test_a_task_that_sees_only_its_own_gpus_ignores_sparks_indices():
    assert task_gpus(["0"], ["3"]) == task_gpus(["3"], ["3"]) == ("3",)
    assert task_gpus(["0", "1"], ["1", "2"]) == task_gpus(["1", "2"], ["1", "2"]) == ("1", "2")
    assert task_gpus(["0"], ["2", "3"]) is None


@pytest.mark.parametrize("remapped", [True, False])
def test_ranks_of_an_executor_see_all_its_gpus_with_their_own_at_the_local_rank(remapped):
    # Four tasks of one executor; each task sees only one of the machine's four GPUs.
    tasks = [
        ("2", "0" if remapped else "2"),
        ("0", "0"),
        ("3", "0" if remapped else "3"),
        ("1", "0" if remapped else "1"),
    ]
    slots = assign(
        [
            TaskOffer(index, "worker", "10.0.0.1", "10.0.0.1", cuda_names([address], visible))
            for index, (visible, address) in enumerate(tasks)
        ]
    )
    for slot in slots:
        seen = dict(device_variables(slots, slot))["CUDA_VISIBLE_DEVICES"].split(",")
        assert seen[slot.world.local_rank] == tasks[slot.offer.task_index][0]
        assert sorted(seen) == ["0", "1", "2", "3"]
