from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import sparkhvd
from sparkhvd.compat.spark import pyspark_version
from sparkhvd.driver.host_process import SshOptions
from sparkhvd.driver.hosts import Host
from sparkhvd.driver.launcher import LaunchRequest, choose_launcher
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.errors import ConfigError, LaunchError, ParamError
from sparkhvd.estimators.params.backend import SparkBackend, check_backend, reserve_ranks, session_of
from sparkhvd.estimators.params.params import EstimatorParams

HOSTS = (Host("node1", 2),)


@pytest.mark.parametrize(
    ("launcher", "use_mpi", "use_gloo", "request_fields", "chosen"),
    [
        ("auto", None, None, {}, "barrier"),
        ("auto", False, False, {}, "barrier"),
        ("auto", None, True, {}, "barrier"),
        ("auto", True, None, {}, "mpi"),
        ("auto", None, None, {"extra_mpi_args": ("-x", "A")}, "mpi"),
        ("auto", None, None, {"hosts": HOSTS}, "ssh"),
        ("mpi", True, None, {"extra_mpi_args": ("-x", "A")}, "mpi"),
        ("local", None, None, {}, "local"),
        ("ssh", None, None, {"hosts": HOSTS, "access": SshOptions(port=2222)}, "ssh"),
        ("barrier", None, None, {"resources": TaskResources(cpus=2)}, "barrier"),
        ("ray", None, None, {"resources": TaskResources(cpus=2, gpus=1)}, "ray"),
    ],
)
def test_the_arguments_select_the_launcher(launcher, use_mpi, use_gloo, request_fields: dict[str, Any], chosen):
    assert choose_launcher(launcher, use_mpi, use_gloo, LaunchRequest(2, **request_fields)) == chosen


@pytest.mark.parametrize(
    ("launcher", "use_mpi", "use_gloo", "request_fields", "words"),
    [
        ("auto", True, True, {}, r"use_mpi=True \(mpi\) and use_gloo=True \(barrier\) contradict"),
        ("barrier", True, None, {}, r"launcher \(barrier\) and use_mpi=True \(mpi\) contradict"),
        ("local", None, None, {"hosts": HOSTS}, r"launcher \(local\) and hosts \(ssh\) contradict"),
        ("barrier", None, None, {"extra_mpi_args": ("-x",)}, r"extra_mpi_args \(mpi\) contradict"),
        ("auto", None, None, {"access": SshOptions(port=22)}, "require launcher='ssh', got 'barrier'"),
        ("ssh", None, None, {"hosts": HOSTS, "resources": TaskResources(gpus=1)}, "launcher='ssh' starts none"),
        ("horovod", None, None, {}, "Unknown launcher='horovod'; expected 'auto' or one of"),
    ],
)
def test_contradictory_arguments_are_refused(launcher, use_mpi, use_gloo, request_fields: dict[str, Any], words):
    with pytest.raises(ConfigError, match=words):
        choose_launcher(launcher, use_mpi, use_gloo, LaunchRequest(2, **request_fields))


_NEARBY_LAUNCHER = """
from sparkhvd.driver.launchers.local import LocalLauncher


class NearbyLauncher(LocalLauncher):
    def reserve(self, deadline):
        return 2
"""


def test_another_package_adds_a_launcher(install):
    with pytest.raises(ConfigError, match="Unknown launcher='nearby'"):
        sparkhvd.run(_rank, launcher="nearby")
    install(_NEARBY_LAUNCHER, "sparkhvd.launchers", "nearby = added_package:NearbyLauncher")
    assert sparkhvd.run(_rank, launcher="nearby") == [0, 1]
    with pytest.raises(ConfigError, match="configure Spark tasks, but launcher='nearby' starts none"):
        sparkhvd.run(_rank, launcher="nearby", gpus_per_task=1)
    names = "'barrier', 'local', 'mpi', 'nearby', 'ray', 'ssh'"
    with pytest.raises(ConfigError, match=rf"expected 'auto' or one of \[{names}\]"):
        sparkhvd.run(_rank, launcher="far")


def test_an_added_launcher_is_a_backend_of_the_estimators(install):
    with pytest.raises(
        ParamError, match="backend='nearby' must be one of 'auto', 'barrier', 'mpi', 'local', 'ray', or an"
    ):
        EstimatorParams(backend="nearby")
    install(_NEARBY_LAUNCHER, "sparkhvd.launchers", "nearby = added_package:NearbyLauncher")
    plan = EstimatorParams(backend="nearby")._plan()
    assert reserve_ranks(plan, SimpleNamespace(version=pyspark_version())) == 2
    with pytest.raises(ParamError, match="backend='nearby' cannot send the rows of a DataFrame"):
        check_backend(plan, "direct")
    with pytest.raises(
        ParamError, match="must be one of 'auto', 'barrier', 'mpi', 'local', 'ray', 'nearby', or an object"
    ):
        EstimatorParams(backend="far")


@pytest.mark.parametrize("backend", ["local", "ray", SparkBackend(2, launcher="local")])
def test_ranks_without_spark_need_no_session(backend, monkeypatch):
    monkeypatch.setattr("sparkhvd.estimators.params.backend.current_session", lambda: None)
    plan = EstimatorParams(backend=backend)._plan()
    assert session_of(plan) is None


def test_ranks_in_spark_tasks_need_a_session(monkeypatch):
    monkeypatch.setattr("sparkhvd.compat.spark.current_session", lambda: None)
    with pytest.raises(LaunchError, match="There is no active SparkSession"):
        session_of(EstimatorParams(backend="barrier")._plan())


def _rank():
    import sparkhvd.torch as hvd  # noqa: PLC0415

    hvd.init()
    return hvd.rank()
