from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from sparkhvd.config import (
    WITHOUT_EFFECT,
    Config,
    declarations,
    from_environment,
    inverted_switch,
    setting_variables,
    warn_if_horovod_rank,
    warn_ignored_variables,
    with_changed_variables,
)
from sparkhvd.errors import ConfigError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert from_environment({}) == Config()


def test_variables_of_sparkhvd_are_read() -> None:
    environment = {
        "SPARKHVD_COLLECTIVE_TIMEOUT": "2.5",
        "SPARKHVD_START_TIMEOUT": "7",
        "SPARKHVD_FUSION_THRESHOLD": "1024",
        "SPARKHVD_CACHE_CAPACITY": "3",
        "SPARKHVD_SHARED_MEMORY": "0",
    }
    expected = Config(
        collective_timeout=2.5, start_timeout=7.0, fusion_threshold=1024, cache_capacity=3, shared_memory=False
    )
    assert from_environment(environment) == expected


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("HOROVOD_SPARK_START_TIMEOUT", "start_timeout"),
        ("HOROVOD_FUSION_THRESHOLD", "fusion_threshold"),
        ("HOROVOD_CACHE_CAPACITY", "cache_capacity"),
        ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune_warmup_samples"),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune_steps_per_sample"),
        ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune_max_samples"),
        ("HOROVOD_LOG_LEVEL", "log_level"),
    ],
)
def test_variables_of_horovod_are_a_fallback(name: str, field: str) -> None:
    assert getattr(from_environment({name: "12"}), field) == 12


def test_autotuning_is_off_by_default_and_explicit_settings_are_distinguished_from_defaults() -> None:
    assert not from_environment({"HOROVOD_AUTOTUNE_LOG": "log.csv"}).autotune
    tuned = from_environment({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "log.csv"})
    assert (tuned.autotune, tuned.autotune_log) == (True, "log.csv")
    assert (tuned.fusion_threshold, tuned.hierarchical_allreduce) == (None, None)
    explicit = from_environment({"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"})
    assert (explicit.fusion_threshold, explicit.hierarchical_allreduce) == (0, True)


def test_variables_of_sparkhvd_take_precedence_over_those_of_horovod() -> None:
    environment = {"SPARKHVD_START_TIMEOUT": "1", "HOROVOD_SPARK_START_TIMEOUT": "2"}
    assert from_environment(environment).start_timeout == 1.0


def test_an_empty_value_counts_as_not_set() -> None:
    assert from_environment({"SPARKHVD_START_TIMEOUT": ""}).start_timeout == Config().start_timeout


@pytest.mark.parametrize(("text", "problem"), [("soon", "must be a number"), ("-1", "must be at least 0")])
def test_the_error_for_an_invalid_value_contains_name_and_value(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"SPARKHVD_START_TIMEOUT {problem}, got '{text}'"):
        from_environment({"SPARKHVD_START_TIMEOUT": text})


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("0", False), ("true", True), ("OFF", False), ("2", True), ("0.0", False)]
)
def test_a_switch_is_read_from_a_number_or_a_word(text: str, value: bool) -> None:
    assert from_environment({"SPARKHVD_SHARED_MEMORY": text}).shared_memory is value
    assert inverted_switch(text) is not value


def test_a_level_is_read_by_its_name_or_number() -> None:
    assert from_environment({"SPARKHVD_LOG_LEVEL": "Warning"}).log_level == logging.WARNING
    assert from_environment({"HOROVOD_LOG_LEVEL": "trace"}).log_level == logging.DEBUG
    assert from_environment({"SPARKHVD_LOG_LEVEL": "20"}).log_level == logging.INFO


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("SPARKHVD_FUSION_THRESHOLD", "1.5", "must be a whole number"),
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "must be a number"),
        ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "0", "must be at least 1"),
        ("SPARKHVD_LINK_GBITS", "inf", "must be finite"),
        ("SPARKHVD_SHARED_MEMORY", "maybe", "must be 1 or 0"),
        ("SPARKHVD_GPU_OPERATIONS", "gloo", "must be one of automatic, nccl, staged"),
        ("SPARKHVD_LOG_LEVEL", "loud", "must be one of trace, debug, info, warning, error, fatal, .*"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} {problem}, got '{text}'"):
        from_environment({name: text})


def test_values_of_horovods_variable_for_gpu_operations_are_translated() -> None:
    assert Config().gpu_operations == "automatic"
    assert from_environment({"SPARKHVD_GPU_OPERATIONS": "NCCL"}).gpu_operations == "nccl"
    assert from_environment({"HOROVOD_GPU_OPERATIONS": "NCCL"}).gpu_operations == "nccl"
    assert from_environment({"HOROVOD_GPU_OPERATIONS": "MPI"}).gpu_operations == "staged"
    both = {"HOROVOD_GPU_OPERATIONS": "NCCL", "SPARKHVD_GPU_OPERATIONS": "staged"}
    assert from_environment(both).gpu_operations == "staged"


def test_no_variable_is_declared_twice() -> None:
    declared = [name for setting in declarations().values() for name in setting.readers] + list(WITHOUT_EFFECT)
    assert len(declared) == len(set(declared))


def test_every_variable_that_users_of_horovod_set_on_ranks_is_accepted() -> None:
    names = """
        FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE
        AUTOTUNE AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES
        AUTOTUNE_GAUSSIAN_PROCESS_NOISE TIMELINE TIMELINE_MARK_CYCLES STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS
        STALL_SHUTDOWN_TIME_SECONDS MPI_THREADS_DISABLE NUM_NCCL_STREAMS BATCH_D2D_MEMCOPIES DISABLE_GROUP_FUSION
        DISABLE_NVTX_RANGES ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS DYNAMIC_PROCESS_SETS ADASUM_MPI_CHUNK_SIZE
        THREAD_AFFINITY CONTROLLER CPU_OPERATIONS GLOO_TIMEOUT_SECONDS LOG_LEVEL LOG_HIDE_TIME CCL_CACHE START_TIMEOUT
        SPARK_START_TIMEOUT ELASTIC ELASTIC_TIMEOUT GPU_OPERATIONS SPARK_USE_LOCAL_RANK_GPU_INDEX
    """
    accepted = {name for setting in declarations().values() for name in setting.readers} | set(WITHOUT_EFFECT)
    assert {f"HOROVOD_{name}" for name in names.split()} - accepted == set()


def test_variables_without_effect_are_accepted_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": ""}
    assert from_environment(environment) == Config()
    warn_ignored_variables(environment)
    assert len(caplog.messages) == 1
    assert "HOROVOD_CYCLE_TIME (a collective starts as soon as all ranks have submitted it" in caplog.text
    assert "HOROVOD_CONTROLLER" in caplog.text
    assert "HOROVOD_CPU_OPERATIONS" not in caplog.text
    warn_ignored_variables({})
    assert len(caplog.messages) == 1


def test_a_warning_is_logged_if_horovods_variables_describe_several_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_if_horovod_rank({"HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"})
    assert not caplog.messages
    warn_if_horovod_rank({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "1"})
    assert "HOROVOD_SIZE=4 is set, but no launcher of sparkhvd started this process" in caplog.text


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKHVD_START_TIMEOUT", "41")
    assert from_environment().start_timeout == 41.0


LAUNCH_CONFIG = Config(cache_capacity=7, timeline="of-a-flag.json")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({}, {}, LAUNCH_CONFIG),
        ({"SPARKHVD_CACHE_CAPACITY": "9"}, {"SPARKHVD_CACHE_CAPACITY": "9"}, LAUNCH_CONFIG),
        ({}, {"HOROVOD_TIMELINE": "own.json"}, replace(LAUNCH_CONFIG, timeline="own.json")),
        ({"HOROVOD_TIMELINE": "a"}, {"HOROVOD_TIMELINE": "b"}, replace(LAUNCH_CONFIG, timeline="b")),
        ({"HOROVOD_TIMELINE": "a"}, {}, replace(LAUNCH_CONFIG, timeline="")),
        ({"HOROVOD_TIMELINE": "a"}, {"HOROVOD_TIMELINE": ""}, replace(LAUNCH_CONFIG, timeline="")),
        ({"HOROVOD_TIMELINE": ""}, {}, LAUNCH_CONFIG),
        # A fallback variable that the program sets takes precedence over an inherited variable of sparkhvd.
        (
            {"SPARKHVD_TIMELINE": "a"},
            {"SPARKHVD_TIMELINE": "a", "HOROVOD_TIMELINE": "b"},
            replace(LAUNCH_CONFIG, timeline="b"),
        ),
        ({"SPARKHVD_TIMELINE": "a", "HOROVOD_TIMELINE": "b"}, {"SPARKHVD_TIMELINE": "a"}, LAUNCH_CONFIG),
        (
            {"SPARKHVD_TIMELINE": "a", "HOROVOD_TIMELINE": "b"},
            {"HOROVOD_TIMELINE": "b"},
            replace(LAUNCH_CONFIG, timeline="b"),
        ),
        ({}, {"SPARKHVD_TIMELINE": "a", "HOROVOD_TIMELINE": "b"}, replace(LAUNCH_CONFIG, timeline="a")),
        ({}, {"HOROVOD_STALL_CHECK_DISABLE": "1"}, replace(LAUNCH_CONFIG, stall_check=False)),
        ({}, {"SPARKHVD_ENCRYPT": "0", "UNRELATED": "1"}, LAUNCH_CONFIG),
    ],
)
def test_changes_of_a_program_take_precedence_over_settings_of_the_launch(before, now, expected):
    assert with_changed_variables(LAUNCH_CONFIG, setting_variables(before), now) == expected


def test_a_program_cannot_change_whether_its_job_is_encrypted():
    with pytest.raises(ConfigError, match=r"SPARKHVD_ENCRYPT has changed .* run without encryption"):
        with_changed_variables(Config(), {}, {"SPARKHVD_ENCRYPT": "1"})


def test_an_invalid_change_is_refused():
    with pytest.raises(ConfigError, match="HOROVOD_CACHE_CAPACITY must be a number, got 'many'"):
        with_changed_variables(Config(), {}, {"HOROVOD_CACHE_CAPACITY": "many"})
