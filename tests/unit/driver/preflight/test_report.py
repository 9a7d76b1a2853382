from __future__ import annotations

from dataclasses import replace

import pytest

from sparkhvd.driver.preflight.report import Check, PreflightReport, Verdict, cluster_checks
from sparkhvd.task.host.examination import Examination

VERSIONS = {"python": "3.11.7", "sparkhvd": "0.1.0", "pyspark": "4.3.0", "torch": "2.13.0"}
TASK = Examination(
    task_index=0,
    host="node-a",
    host_hash="a",
    versions=VERSIONS,
    cpus=2,
    devices=("0",),
    device_kind="GPU (NVIDIA H100)",
    shared_memory=1 << 30,
    orted=True,
)


def verdicts(*tasks: Examination) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in cluster_checks(tasks, VERSIONS)}


def test_identical_tasks_pass_every_check():
    other = replace(TASK, task_index=1, host="node-b", host_hash="b")
    assert set(verdicts(TASK, other).values()) == {Verdict.OK}


@pytest.mark.parametrize(
    ("changes", "name", "verdict", "words"),
    [
        ({"unreachable": ("node-a cannot reach node-b: timed out",)}, "network", Verdict.FAIL, "name the network"),
        ({"driver_problem": "timed out"}, "elastic", Verdict.WARN, "node-b cannot connect to the driver: timed out. S"),
        ({"devices": (), "device_kind": ""}, "devices", Verdict.FAIL, "those on node-b have none"),
        ({"device_kind": "GPU (NVIDIA L4)"}, "devices", Verdict.WARN, "GPU (NVIDIA H100); GPU (NVIDIA L4)"),
        ({"versions": {**VERSIONS, "python": "3.12.1"}}, "versions", Verdict.FAIL, "python 3.11.7 and 3.12.1"),
        ({"versions": {**VERSIONS, "python": "3.11.9"}}, "versions", Verdict.OK, "the same"),
        ({"versions": {**VERSIONS, "sparkhvd": "0.0.9"}}, "versions", Verdict.FAIL, "sparkhvd 0.0.9 and 0.1.0"),
        ({"versions": {**VERSIONS, "pyspark": "4.1.2"}}, "versions", Verdict.FAIL, "pyspark 4.1.2 and 4.3.0"),
        ({"versions": {**VERSIONS, "pyspark": "4.3.1"}}, "versions", Verdict.OK, "the same"),
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "versions", Verdict.WARN, "torch 2.12.0 and 2.13.0"),
        ({"shared_memory": 64 << 20}, "shared memory", Verdict.WARN, "64 MiB in /dev/shm on host node-b"),
    ],
)
def test_a_difference_between_tasks_is_reported_with_a_remedy(changes, name, verdict, words):
    other = replace(TASK, **{"task_index": 1, "host": "node-b", "host_hash": "b", **changes})
    check = next(check for check in cluster_checks([TASK, other], VERSIONS) if check.name == name)
    assert check.verdict is verdict
    assert words in check.says


def test_tasks_that_did_not_run_together_leave_the_network_between_hosts_unchecked():
    other = replace(TASK, task_index=1, host="node-b", host_hash="b")
    (apart, *_), (on_one_host, *_) = (
        cluster_checks(tasks, VERSIONS, together=False) for tasks in ([TASK, other], [TASK, replace(TASK)])
    )
    assert (apart.name, apart.verdict) == ("network", Verdict.SKIPPED)
    assert on_one_host.verdict is Verdict.OK


def test_gpus_that_spark_does_not_assign_are_a_warning():
    free = replace(TASK, devices=())
    assert verdicts(free)["devices"] is Verdict.WARN


def test_tensorflow_and_pytorch_on_the_driver_are_a_warning_with_the_order_of_imports():
    both = {**VERSIONS, "tensorflow": "2.20.0"}
    checks = {check.name: check for check in cluster_checks([replace(TASK, versions=both)], both)}
    assert checks["frameworks"].verdict is Verdict.WARN
    assert "`import torch._dynamo` before `import keras`" in checks["frameworks"].says
    assert "frameworks" not in verdicts(TASK)


def test_a_report_with_warnings_but_without_failures_is_ready():
    warned = Check("devices", Verdict.WARN, "slow")
    failed = Check("slots", Verdict.FAIL, "too few")
    report = PreflightReport((warned,), (TASK,), VERSIONS, 1.0)
    assert report.ok
    assert str(report).startswith("sparkhvd preflight: ready (1.0 s)\n")
    report = replace(report, checks=(warned, failed))
    assert not report.ok
    assert report.problems == ("too few",)
    assert "FAIL  slots    too few" in str(report)
    row = next(line for line in str(report).splitlines() if line.startswith("0 "))
    assert row.split() == ["0", "node-a", "2", "0", "GPU", "(NVIDIA", "H100)", "1024", "MiB", "yes", *VERSIONS.values()]


def test_an_examination_survives_serialization():
    assert Examination.from_json(TASK.to_json()) == TASK
