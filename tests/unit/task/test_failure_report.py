from __future__ import annotations

from dataclasses import replace

import pytest

from sparkhvd.task.failure_report import FailureReport, describe_exit
from sparkhvd.task.supervision import size_failure


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by signal 9 (SIGKILL); the kernel sends this signal on a host that runs out of memory"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-63, "was killed by signal 63 (unknown)"),
    ],
)
def test_every_exit_status_is_described_precisely(returncode, words):
    assert describe_exit(returncode) == words


def test_a_failure_report_survives_serialization():
    report = FailureReport(3, "node-1", "raised ValueError: é", traceback="trace", stderr_tail="tail", secondary=True)
    report = replace(report, error="ValueError: é", is_final=True)
    assert FailureReport.from_json(report.to_json()) == report


def test_a_long_traceback_is_shortened_in_the_middle():
    report = FailureReport(0, "h", "raised", traceback="first" + "x" * 1_000_000 + "last")
    shortened = FailureReport.from_json(report.to_json()).traceback
    assert len(shortened) < 70_000
    assert shortened.startswith("first")
    assert shortened.endswith("last")


def test_results_are_refused_only_above_the_cap_and_the_largest_is_named():
    assert size_failure([50, 50], ["a", "b"], cap=100) is None
    report = size_failure([40, 61], ["a", "b"], cap=100)
    assert report is not None
    assert report.sentence() == (
        "Rank 1 on host b returned 61 bytes, and all ranks together returned 101; the driver accepts at most 100 "
        "bytes. Write large results to a Store from within fn and return their path"
    )
