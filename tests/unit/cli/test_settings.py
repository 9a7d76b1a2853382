"""The settings that result from flags and from keys of a configuration file."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import pytest

from sparkhvd.cli.flags import SETTING_FLAGS, parser
from sparkhvd.cli.run import mpirun_words
from sparkhvd.cli.settings import notices, read_file, variables
from sparkhvd.config import WITHOUT_EFFECT, Config, from_environment
from sparkhvd.driver.hosts import parse_hosts
from sparkhvd.errors import ConfigError

# A flag, the section, key and value of the same setting in a file, and the ranks' variable and its text.
TABLE = [
    ("fusion-threshold-mb=8", "params", "fusion_threshold_mb", 8, "FUSION_THRESHOLD", f"{8 << 20}"),
    ("cycle-time-ms=3", "params", "cycle_time_ms", 3, "CYCLE_TIME", "3"),
    ("cache-capacity=7", "params", "cache_capacity", 7, "CACHE_CAPACITY", "7"),
    ("hierarchical-allreduce", "params", "hierarchical_allreduce", True, "HIERARCHICAL_ALLREDUCE", "1"),
    ("no-hierarchical-allreduce", "params", "hierarchical_allreduce", False, "HIERARCHICAL_ALLREDUCE", "0"),
    ("hierarchical-allgather", "params", "hierarchical_allgather", True, "HIERARCHICAL_ALLGATHER", "1"),
    ("torus-allreduce", "params", "torus_allreduce", True, "TORUS_ALLREDUCE", "1"),
    ("autotune", "autotune", "enabled", True, "AUTOTUNE", "1"),
    ("autotune-log-file=f", "autotune", "log_file", "f", "AUTOTUNE_LOG", "f"),
    ("autotune-warmup-samples=2", "autotune", "warmup_samples", 2, "AUTOTUNE_WARMUP_SAMPLES", "2"),
    ("autotune-steps-per-sample=4", "autotune", "steps_per_sample", 4, "AUTOTUNE_STEPS_PER_SAMPLE", "4"),
    ("autotune-bayes-opt-max-samples=5", "autotune", "bayes_opt_max_samples", 5, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "5"),
    (
        *("autotune-gaussian-process-noise=0.5", "autotune", "gaussian_process_noise", 0.5),
        *("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.5"),
    ),
    ("timeline-filename=f", "timeline", "filename", "f", "TIMELINE", "f"),
    ("timeline-mark-cycles", "timeline", "mark_cycles", True, "TIMELINE_MARK_CYCLES", "1"),
    ("no-stall-check", "stall_check", "enabled", False, "STALL_CHECK_DISABLE", "1"),
    ("stall-check", "stall_check", "enabled", True, "STALL_CHECK_DISABLE", "0"),
    ("stall-check-warning-time-seconds=9", "stall_check", "warning_time_seconds", 9, "STALL_CHECK_TIME_SECONDS", "9"),
    (
        *("stall-check-shutdown-time-seconds=9", "stall_check", "shutdown_time_seconds", 9),
        *("STALL_SHUTDOWN_TIME_SECONDS", "9"),
    ),
    ("mpi-threads-disable", "library_options", "mpi_threads_disable", True, "MPI_THREADS_DISABLE", "1"),
    ("num-nccl-streams=2", "library_options", "num_nccl_streams", 2, "NUM_NCCL_STREAMS", "2"),
    ("thread-affinity=2", "library_options", "thread_affinity", 2, "THREAD_AFFINITY", "2"),
    ("gloo-timeout-seconds=9", "library_options", "gloo_timeout_seconds", 9, "GLOO_TIMEOUT_SECONDS", "9"),
    ("log-level=debug", "logging", "level", "debug", "LOG_LEVEL", "debug"),
    ("log-hide-timestamp", "logging", "hide_timestamp", True, "LOG_HIDE_TIME", "1"),
    ("log-without-timestamp", "logging", "with_timestamp", False, "LOG_HIDE_TIME", "1"),
    ("log-with-timestamp", "logging", "with_timestamp", True, "LOG_HIDE_TIME", "0"),
]
READ = {
    "FUSION_THRESHOLD": {"fusion_threshold": 8 << 20},
    "CACHE_CAPACITY": {"cache_capacity": 7},
    "HIERARCHICAL_ALLGATHER": {"hierarchical_allgather": True},
    "AUTOTUNE": {"autotune": True},
    "AUTOTUNE_LOG": {"autotune_log": "f"},
    "AUTOTUNE_WARMUP_SAMPLES": {"autotune_warmup_samples": 2},
    "AUTOTUNE_STEPS_PER_SAMPLE": {"autotune_steps_per_sample": 4},
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": {"autotune_max_samples": 5},
    "TIMELINE": {"timeline": "f"},
    "TIMELINE_MARK_CYCLES": {"timeline_mark_cycles": True},
    "STALL_CHECK_TIME_SECONDS": {"stall_check_seconds": 9.0},
    "LOG_LEVEL": {"log_level": logging.DEBUG},
    "STALL_SHUTDOWN_TIME_SECONDS": {"stall_shutdown_seconds": 9.0},
    "THREAD_AFFINITY": {"thread_affinity": (2,)},
}
SWITCHED = {
    ("HIERARCHICAL_ALLREDUCE", "1"): {"hierarchical_allreduce": True},
    ("HIERARCHICAL_ALLREDUCE", "0"): {"hierarchical_allreduce": False},
    ("STALL_CHECK_DISABLE", "1"): {"stall_check": False},
    ("STALL_CHECK_DISABLE", "0"): {"stall_check": True},
}


def settings(words, content, tmp_path) -> dict[str, str]:
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps(content))  # JSON is valid YAML
    flags = parser().parse_args([*words, "--config-file", str(file), "program"])
    environment = variables(flags, read_file(flags.config_file))
    assert notices(flags, environment, "local", on_hosts=False) == []
    return environment


@pytest.mark.parametrize(
    ("flag", "section", "key", "value", "variable", "text"), TABLE, ids=[f"{one[0]}, {one[2]}" for one in TABLE]
)
def test_a_flag_and_a_key_set_the_variable_of_the_ranks(flag, section, key, value, variable, text, tmp_path):  # noqa: PLR0917
    expected = {f"HOROVOD_{variable}": text}
    assert settings([f"--{flag}"], {}, tmp_path) == expected
    assert settings([], {section: {key: value}}, tmp_path) == expected
    read = SWITCHED.get((variable, text), READ.get(variable))
    if read is None:
        assert f"HOROVOD_{variable}" in WITHOUT_EFFECT, "run reports that the variable has no effect"
    else:
        assert from_environment(expected) == replace(Config(), **read)


def test_the_table_has_every_flag_of_the_settings():
    flags = {flag.partition("=")[0].removeprefix("no-") for flag, *_ in TABLE}
    assert {flag.name for flag in SETTING_FLAGS} <= flags


def test_flags_override_the_file_even_under_its_alternative_keys(tmp_path):
    given = settings(["--log-with-timestamp", "--no-autotune"], {"logging": {"with_timestamp": False}}, tmp_path)
    assert given == {"HOROVOD_LOG_HIDE_TIME": "0", "HOROVOD_AUTOTUNE": "0"}


@pytest.mark.parametrize("name", ["gloo", "GLOO", "Mpi"])
def test_a_file_names_the_controller_in_any_case(name, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(f"controller: {name}\n")
    assert read_file(str(file)) == {"controller": {"name": name.lower()}}


def test_a_timestamp_that_is_neither_true_nor_false_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--log-hide-timestamp='perhaps': must be true or false"):
        settings([], {"logging": {"with_timestamp": "perhaps"}}, tmp_path)


def test_a_flag_without_effect_is_reported():
    flags = parser().parse_args(["--disable-cache", "program"])
    assert notices(flags, {}, "local", on_hosts=False) == [
        "--disable-cache has no effect: no state of the hosts is cached between runs."
    ]


def words_of_mpirun(*given: str, hosts: str = "") -> str:
    flags = parser().parse_args([*given, "--mpi", "program"])
    return " ".join(
        mpirun_words(
            flags, parse_hosts(hosts) if hosts else (), {"PATH": "/bin", "A": "1", "OMPI_MCA_x": "y"}, root=False
        )
    )


def test_mpirun_gets_the_hosts_and_the_ssh_options():
    words = words_of_mpirun("-np", "3", "-p", "2222", "-i", "/a/key", hosts="a:2,b:2")
    assert words.startswith("-np 3 -H a:2,b:1 --bind-to none --map-by slot -mca pml ob1 ")
    assert " -mca plm_rsh_args -p 2222 -i /a/key " in words
    assert words.endswith(" --tag-output -x PATH -x A")


def test_an_identity_file_with_a_space_is_refused_for_mpirun():
    with pytest.raises(ConfigError, match=r"--ssh-identity-file='/my keys/a' contains a space"):
        words_of_mpirun("-np", "1", "-i", "/my keys/a")


def test_mpirun_gets_no_ipv6_address():
    with pytest.raises(
        ConfigError, match=r"mpirun takes no IPv6 address for a host, got fd00::5\. Give the host a name"
    ):
        words_of_mpirun(hosts="a:1,[fd00::5]:1")


def test_mpirun_gets_the_options_for_binding_output_and_its_own_arguments():
    words = words_of_mpirun(
        *("--binding-args=--bind-to core", "-prefix-timestamp", "--output-filename", "out", "--mpi-args=-x 'B=c d'"),
        *("--network-interfaces", "eth0,eth1"),
    )
    assert words.startswith("--bind-to core -mca pml ob1 ")
    assert " --output-filename out:nojobid --timestamp-output --tag-output " in words
    assert " -mca oob_tcp_if_include eth0,eth1 -mca btl_tcp_if_include eth0,eth1 " in words
    assert words.endswith(" -x A -x B=c d")
    assert "--allow-run-as-root" not in words
    words = words_of_mpirun("--network-interfaces", "eth0", "--mpi-args=-mca btl_tcp_if_exclude lo")
    assert "btl_tcp_if_include" not in words


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--fusion-threshold-mb=inf", "--fusion-threshold-mb='inf': cannot convert float infinity to integer."),
        ("--log-level=loud", "--log-level: HOROVOD_LOG_LEVEL must be one of"),
        ("--cache-capacity=many", "--cache-capacity: HOROVOD_CACHE_CAPACITY must be a number, got 'many'"),
    ],
)
def test_an_invalid_value_is_refused_with_its_flag(word, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        variables(parser().parse_args([word, "program"]), {})
