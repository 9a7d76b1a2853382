from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import sparkhvd.ray
from sparkhvd.driver.ray.cluster import RankResources
from sparkhvd.errors import ConfigError, LaunchError
from sparkhvd.ray import RayExecutor
from sparkhvd.ray.settings import Layout, RaySettings, layout_of, settings_from

ARGUMENTS: dict[str, Any] = {
    "num_workers": None,
    "num_hosts": None,
    "num_workers_per_host": None,
    "cpus_per_worker": 1,
    "use_gpu": False,
    "gpus_per_worker": None,
}


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ({"num_workers": 3}, Layout(3, None, RankResources(1, 0.0))),
        ({"num_hosts": 2}, Layout(2, 1, RankResources(1, 0.0))),
        (
            {"num_hosts": 2, "num_workers_per_host": 4, "cpus_per_worker": 2, "use_gpu": True},
            Layout(8, 4, RankResources(2, 1.0)),
        ),
        ({"num_workers": 2, "use_gpu": True, "gpus_per_worker": 0.5}, Layout(2, None, RankResources(1, 0.5))),
    ],
)
def test_the_arguments_of_an_executor_determine_its_ranks(arguments, layout):
    assert layout_of(**{**ARGUMENTS, **arguments}) == layout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Exactly one of num_workers and num_hosts must be set, got num_workers=None and num_hosts=None"),
        ({"num_workers": 2, "num_hosts": 2}, "got num_workers=2 and num_hosts=2"),
        ({"num_workers": 2, "num_workers_per_host": 1}, "num_workers_per_host=1 requires num_hosts"),
        ({"num_workers": 0}, "num_workers must be an integer of at least 1, got 0"),
        ({"num_workers": 1, "cpus_per_worker": 0.5}, r"cpus_per_worker must be an integer of at least 1, got 0\.5"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "gpus_per_worker=1 requires use_gpu=True"),
        ({"num_workers": 1, "use_gpu": True, "gpus_per_worker": 1.5}, r"gpus_per_worker must be .*, got 1\.5"),
        ({"num_workers": 1, "reset_limit": 3}, "reset_limit is for elastic jobs. Set min_workers or max_workers"),
        ({"num_hosts": 1, "min_workers": 1}, "num_hosts and num_workers_per_host have no effect with min_workers"),
        (
            {"min_workers": 1, "override_discovery": False},
            "override_discovery=False is not supported by RayExecutor",
        ),
        ({"max_workers": 2, "cpus_per_worker": 0}, "cpus_per_worker must be an integer of at least 1, got 0"),
        ({"num_workers": 1, "placement_group_timeout_s": 0}, "placement_group_timeout_s must be a positive number"),
        (
            {"num_workers": 1, "settings": SimpleNamespace(elastic=True)},
            "Pass these settings to ElasticRayExecutor",
        ),
        ({"num_workers": 1, "settings": 5}, r"settings=5 must come from RayExecutor\.create_settings"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        RayExecutor(**arguments)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("num_worker", "num_workers"),
        ("num_slots", "num_workers_per_host"),
        ("cpus_per_slot", "cpus_per_worker"),
        ("gpus_per_slot", "gpus_per_worker"),
    ],
)
def test_an_unknown_argument_is_refused_with_the_closest_name(name, suggestion):
    unknown: dict[str, Any] = {name: 2}
    with pytest.raises(TypeError, match=rf"takes no argument '{name}'\. Did you mean {suggestion}\?"):
        RayExecutor(**unknown)


def test_settings_of_horovod_are_accepted():
    horovods = SimpleNamespace(timeout_s=30, placement_group_timeout_s=20, nics={"eth1", "eth0"}, verbose=2, key=b"")
    assert settings_from(horovods) == RaySettings(30, 20, ("eth0", "eth1"), 2)
    assert settings_from(None) == RaySettings()


def test_settings_for_ssh_have_no_effect(caplog):
    with caplog.at_level(logging.WARNING):
        assert RayExecutor.create_settings(30, ssh_str="key") == RaySettings(timeout_s=30)
    assert "ssh_str has no effect: Ray starts the ranks" in caplog.text


def test_names_that_are_missing_are_explained():
    with pytest.raises(AttributeError, match=r"has no attribute 'RayExecuter'\. Did you mean 'RayExecutor'"):
        sparkhvd.ray.RayExecuter  # noqa: B018


def test_a_job_that_is_not_elastic_warns_of_an_elastic_timeout(caplog):
    RayExecutor(num_workers=1, elastic_timeout=60)
    assert caplog.messages == [
        "elastic_timeout has no effect without min_workers or max_workers: this job is not elastic."
    ]


def test_an_executor_with_min_workers_runs_elastic_jobs(monkeypatch):
    calls = []

    def run_elastic(fn, args, kwargs, **options):
        calls.append(options)
        return [fn(*args, **(kwargs or {}))]

    monkeypatch.setattr("sparkhvd.ray.elastic.run_elastic", run_elastic)
    executor = RayExecutor(RayExecutor.create_settings(30), min_workers=2, max_workers=4, reset_limit=5)
    with pytest.raises(LaunchError, match=r"has not been started\. Call start\(\) first"):
        executor.run(max, (1, 2))
    executor.start(dict, executable_kwargs={"a": 1}, extra_env_vars={"MINE": "yes"})
    assert executor.run(max, (1, 2)) == [2]
    assert executor.execute(list) == [["a"]]
    for call in (executor.run_remote, executor.execute_single):
        with pytest.raises(LaunchError, match=r"ranks of an elastic job end with each call\. Use run\(\) or execute"):
            call(list)
    expected = {"min_num_proc": 2, "max_num_proc": 4, "num_proc": None, "reset_limit": 5, "start_timeout": 30}
    assert {name: calls[0][name] for name in expected} == expected
    assert (calls[0]["launcher"], calls[0]["env"], calls[0]["gpus_per_task"]) == ("ray", {"MINE": "yes"}, None)
    executor.shutdown()
    with pytest.raises(LaunchError, match="has not been started"):
        executor.execute(list)
