"""What Databricks sets, and what follows from it; the files of its mounts are tested with the Stores."""

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
def test_what_databricks_calls_a_folder_is_found_where_it_is_mounted(url, mounted):
    assert mounted_path(url) == mounted


@pytest.mark.parametrize("path", ["/dbfs/a/b", "/Volumes/c/s/v/a"])
def test_spark_finds_a_mounted_folder_under_the_name_that_leads_back_to_it(path):
    assert mounted_path(spark_url_of(path)) == path


def test_only_a_process_of_a_cluster_takes_its_mounts_for_databricks(monkeypatch):
    paths = ("/dbfs/a", "/Volumes/c/s/v/a", "/tmp/a", "dbfs:/a")
    assert not runs_on_databricks()
    assert [scheme_of(path) for path in paths] == ["file", "file", "file", "dbfs"]
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "16.4")
    assert runs_on_databricks()
    assert [scheme_of(path) for path in paths] == ["dbfs", "dbfs", "file", "dbfs"]


def test_a_task_that_sees_its_own_gpus_alone_names_them_however_spark_counts():
    assert task_gpus(["0"], ["3"]) == task_gpus(["3"], ["3"]) == ("3",)
    assert task_gpus(["0", "1"], ["1", "2"]) == task_gpus(["1", "2"], ["1", "2"]) == ("1", "2")
    assert task_gpus(["0"], ["2", "3"]) is None


@pytest.mark.parametrize("remapped", [True, False])
def test_the_ranks_of_an_executor_with_a_gpu_per_task_see_each_other_s_and_their_own_at_their_local_rank(remapped):
    # Four tasks of one executor; each has one of its machine's four GPUs, and sees no other one.
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
