"""The supported versions of Spark, and the errors for others; tests/spark and tools/test-matrix run real versions."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sparkhvd.compat import spark as versions
from sparkhvd.driver.spark.job_failures import spark_failure
from sparkhvd.errors import LaunchError
from sparkhvd.task.entry import entry_of


class _ConnectSession(SimpleNamespace):
    """A Spark Connect session with the attributes that the check reads."""


_ConnectSession.__module__ = "pyspark.sql.connect.session"


def pass_batches(batches: Any) -> Any:
    yield from batches


@pytest.fixture
def set_pyspark_version(monkeypatch):
    return lambda version: monkeypatch.setattr(versions, "pyspark_version", lambda: version)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("3.5.0", (3, 5)), ("3.5.5-amzn-1", (3, 5)), ("4.10.0.dev0", (4, 10)), ("4.1", (4, 1)), ("unknown", (0, 0))],
)
def test_a_release_consists_of_the_first_two_numbers_of_a_version(version, numbers):
    assert versions.release(version) == numbers


@pytest.mark.parametrize(
    ("installed", "session"),
    [
        ("3.5.0", SimpleNamespace(version="3.5.5-amzn-1")),
        ("4.3.0", SimpleNamespace(version="4.3.2")),
        ("4.0.0", _ConnectSession(version="4.0.2")),
    ],
)
def test_patch_releases_and_suffixes_may_differ(set_pyspark_version, installed, session):
    set_pyspark_version(installed)
    versions.check_spark(session)


@pytest.mark.parametrize(
    ("installed", "session", "message"),
    [
        (
            "3.4.4",
            SimpleNamespace(version="3.4.4"),
            r"^This session runs Spark 3\.4\.4, but sparkhvd needs Spark 3\.5 or",
        ),
        ("3.5.0", SimpleNamespace(version="3.4.1"), r"^This session runs Spark 3\.4\.1, but"),
        (
            "3.5.6",
            _ConnectSession(version="3.5.6"),
            r"^This is a Spark Connect session with Spark 3\.5\.6, but .* from Spark 4\.0",
        ),
        (
            "4.0.1",
            SimpleNamespace(version="4.1.0"),
            r"^The driver's Python has pyspark 4\.0\.1, but the session runs Spark 4",
        ),
        (
            "4.1.0",
            _ConnectSession(version="4.0.1"),
            r"^The client has pyspark 4\.1\.0, but the Spark Connect server runs Spark 4\.0",
        ),
    ],
)
def test_an_unusable_version_of_spark_is_refused(set_pyspark_version, installed, session, message):
    set_pyspark_version(installed)
    with pytest.raises(LaunchError, match=message):
        versions.check_spark(session)


def test_a_task_whose_spark_differs_from_the_drivers_is_reported_in_one_sentence():
    entry = entry_of(pass_batches)
    assert list(entry(iter([1]))) == [1]
    with pytest.raises(
        LaunchError, match=rf"^The driver has pyspark 3\.4\.1, but {re.escape(sys.executable)} "
    ) as failed:
        list(replace(entry, spark="3.4.1")(iter([])))
    assert spark_failure(RuntimeError(f"Job aborted.\n{failed.value}\n\tat java")) == str(failed.value)


@pytest.mark.parametrize(("installed", "java"), [("3.5.0", "Java 8, 11 or 17"), ("4.0.0", "Java 17 or later")])
def test_the_required_java_depends_on_the_installed_spark(set_pyspark_version, installed, java):
    set_pyspark_version(installed)
    assert versions.java_versions() == java


@pytest.mark.parametrize(("installed", "ids"), [("3.5.0", [23, 22, 20, 21]), ("4.0.0", [20, 21, 22, 23])])
def test_the_numbers_of_a_stages_tasks_are_in_the_order_of_their_indices(set_pyspark_version, installed, ids):
    set_pyspark_version(installed)
    gathered = [] if installed == "4.0.0" else [str(task_id) for task_id in ids]  # 4.0 needs no all-gather

    def task(index: int) -> Any:
        return SimpleNamespace(
            partitionId=lambda: index, taskAttemptId=lambda: ids[index], allGather=lambda message: gathered
        )

    assert [versions.task_number(task(index)) for index in range(4)] == [20, 21, 22, 23]
