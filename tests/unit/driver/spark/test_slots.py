from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from sparkhvd.deadline import Deadline
from sparkhvd.driver.spark import slots
from sparkhvd.driver.spark.slots import Cluster, fixed_slots, largest_growth, reserve
from sparkhvd.errors import LaunchError, SlotsError
from tests.waiting import soon

MOST = {"spark.dynamicAllocation.maxExecutors": "6"}


def cluster(master: str, *counts: int, task_cpus: int = 1) -> Cluster:
    """Return a cluster that reports these numbers of slots one after another, and then keeps the last number."""
    series = itertools.chain(counts, itertools.repeat(counts[-1] if counts else 0))
    return Cluster(master, task_cpus, lambda: next(series))


@pytest.mark.parametrize(
    ("master", "task_cpus", "expected"),
    [
        ("local", 1, 5),
        ("local[*]", 1, 5),
        ("local[5,3]", 1, 5),
        ("local-cluster[2,3,1024]", 1, 6),
        ("local-cluster[2, 3, 1024]", 2, 2),
        ("spark://host:7077", 1, None),
        ("yarn", 1, None),
        ("k8s://https://host", 1, None),
        ("connect", 1, None),
    ],
)
def test_masters_of_fixed_size_have_a_known_number_of_slots(master, task_cpus, expected):
    assert fixed_slots(cluster(master, 5, task_cpus=task_cpus)) == expected


def test_too_few_local_slots_fail_at_once_with_both_numbers_and_the_setting():
    with pytest.raises(SlotsError) as caught:
        reserve(cluster("local[2]", 2), 3, soon())
    assert str(caught.value) == (
        "num_proc=3 is more than the 2 slots of the cluster (master local[2], spark.task.cpus=1). "
        "Start the session with master local[3], or lower num_proc."
    )


def test_too_few_slots_of_a_local_cluster_fail_before_its_executors_register():
    with pytest.raises(SlotsError, match=r"num_proc=3 is more than the 2 slots .*local-cluster\[3,1,1024\]"):
        reserve(cluster("local-cluster[2,1,1024]", 0), 3, soon())


def session(**settings: str) -> SimpleNamespace:
    return SimpleNamespace(conf={f"spark.{name.replace('_', '.')}": value for name, value in settings.items()})


@pytest.mark.parametrize(
    ("master", "is_cluster"),
    [("local", False), ("local[2]", False), ("local-cluster[1,1,1024]", True), ("yarn", True), ("", True)],
)
def test_only_a_cluster_has_dynamic_allocation(master, is_cluster):
    assert slots.has_dynamic_allocation(session(dynamicAllocation_enabled="true", master=master)) == is_cluster
    assert not slots.has_dynamic_allocation(session(master=master))


def test_dynamic_allocation_is_refused_before_any_job():
    with pytest.raises(LaunchError, match=r"does not run barrier stages .*dynamicAllocation\.enabled=false"):
        slots._check_session(session(dynamicAllocation_enabled="true", master="yarn"))


def test_reserve_waits_for_executors_that_register_late():
    assert reserve(cluster("spark://host:7077", 0, 1, 3), 3, soon()) == 3
    assert reserve(cluster("local-cluster[2,1,1024]", 0, 1, 2), None, soon()) == 2


def test_too_few_slots_of_other_masters_fail_after_a_wait_that_the_deadline_limits():
    with pytest.raises(
        SlotsError, match=r"num_proc=4 is more than the 2 slots of the cluster after waiting 0 s .*spark.cores.max"
    ):
        reserve(cluster("spark://host:7077", 2), 4, Deadline.after(0.3))
    with pytest.raises(SlotsError, match=r"spark.executor.instances"):
        reserve(cluster("yarn", 0), None, Deadline.after(0.1))


def test_all_slots_are_used_once_their_number_is_stable(monkeypatch):
    monkeypatch.setattr(slots, "_STABLE_SECONDS", 0.5)
    assert reserve(cluster("spark://host:7077", 0, 2, 2, 4), None, soon()) == 4
    assert reserve(cluster("local[2]", 2), None, soon()) == 2


@pytest.mark.parametrize(
    ("master", "settings", "expected"),
    [
        ("yarn", {}, (None, "")),
        ("yarn", {"spark.executor.cores": "4", **MOST}, (24, "spark.dynamicAllocation.maxExecutors=6")),
        ("yarn", MOST, (6, "spark.dynamicAllocation.maxExecutors=6")),
        ("k8s://https://host", {"spark.cores.max": "2", **MOST}, (6, "spark.dynamicAllocation.maxExecutors=6")),
        ("spark://host:7077", MOST, (None, "")),  # the executors may have any number of cores
        ("spark://host:7077", {"spark.cores.max": "7", **MOST}, (7, "spark.cores.max=7")),
        ("spark://host:7077", {"spark.executor.cores": "2", "spark.cores.max": "7"}, (6, "spark.cores.max=7")),
        ("local-cluster[3,4,1024]", MOST, (12, "master local-cluster[3,4,1024]")),
        ("local-cluster[3,4,1024]", {"spark.executor.cores": "3", **MOST}, (9, "master local-cluster[3,4,1024]")),
        ("local-cluster[9,1,1024]", MOST, (6, "spark.dynamicAllocation.maxExecutors=6")),
    ],
)
def test_the_settings_limit_how_far_dynamic_allocation_grows(master, settings, expected):
    assert largest_growth(cluster(master), settings.get) == expected


def test_the_growth_of_dynamic_allocation_depends_on_the_cores_and_gpus_of_a_task():
    assert largest_growth(cluster("yarn", task_cpus=2), {"spark.executor.cores": "5", **MOST}.get)[0] == 12
    gpus = Cluster("yarn", 1, lambda: 0, task_gpus=0.5, executor_gpus=1)
    assert largest_growth(gpus, {"spark.executor.cores": "5", **MOST}.get)[0] == 12
