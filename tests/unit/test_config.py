from __future__ import annotations

import pytest

from sparkhvd.config import Config, from_environment
from sparkhvd.errors import ConfigError


def test_empty_environment_gives_the_defaults() -> None:
    assert from_environment({}) == Config()


def test_own_names_are_read() -> None:
    environment = {
        "SPARKHVD_COLLECTIVE_TIMEOUT": "2.5",
        "SPARKHVD_START_TIMEOUT": "7",
        "SPARKHVD_FUSION_THRESHOLD": "1024",
        "SPARKHVD_CACHE_CAPACITY": "3",
        "SPARKHVD_SHARED_MEMORY": "0",
    }
    assert from_environment(environment) == Config(2.5, 7.0, 1024, 3, shared_memory=False)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "collective_timeout"),
        ("HOROVOD_SPARK_START_TIMEOUT", "start_timeout"),
        ("HOROVOD_FUSION_THRESHOLD", "fusion_threshold"),
        ("HOROVOD_CACHE_CAPACITY", "cache_capacity"),
    ],
)
def test_names_of_horovod_are_a_fallback(name: str, field: str) -> None:
    assert getattr(from_environment({name: "12"}), field) == 12


def test_own_name_wins_over_that_of_horovod() -> None:
    environment = {"SPARKHVD_START_TIMEOUT": "1", "HOROVOD_SPARK_START_TIMEOUT": "2"}
    assert from_environment(environment).start_timeout == 1.0


def test_empty_value_counts_as_not_set() -> None:
    assert from_environment({"SPARKHVD_START_TIMEOUT": ""}).start_timeout == Config().start_timeout


@pytest.mark.parametrize(("text", "problem"), [("soon", "is not a number"), ("-1", "is negative")])
def test_unusable_value_is_refused_with_name_and_value(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"SPARKHVD_START_TIMEOUT='{text}' {problem}"):
        from_environment({"SPARKHVD_START_TIMEOUT": text})


def test_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKHVD_START_TIMEOUT", "41")
    assert from_environment().start_timeout == 41.0
