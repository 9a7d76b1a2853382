from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import sparkhvd
from sparkhvd.errors import ConfigError, LaunchError

pytestmark = pytest.mark.spark


def place() -> tuple[int, int, str]:
    from mpi4py import MPI  # noqa: PLC0415

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, os.environ["SPARKHVD_RANK"]


def test_open_mpi_starts_ranks_for_spark_tasks_and_jobs_wait_for_free_slots(spark):
    with ThreadPoolExecutor(2) as pool:  # each job needs three of the four slots
        jobs = [pool.submit(sparkhvd.run, place, num_proc=3, use_mpi=True, nics=["lo"], spark=spark) for _ in range(2)]
        assert [job.result() for job in jobs] == [[(0, 3, "0"), (1, 3, "1"), (2, 3, "2")]] * 2


def test_a_network_interface_that_does_not_exist_is_named(spark):
    assert sparkhvd.run(len, ("four",), num_proc=1, nics=["lo"]) == [4]
    with pytest.raises(LaunchError, match=r"None of the network interfaces \['bogus0'\] has an address on host 127"):
        sparkhvd.run(place, num_proc=1, nics=["bogus0"])


def test_a_driver_without_open_mpi_is_refused_before_any_task_starts(spark, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"mpirun was not found on the driver's PATH.*launcher='barrier'"):
        sparkhvd.run(place, num_proc=1, launcher="mpi")
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details\n")
    other.chmod(0o755)
    with pytest.raises(LaunchError, match=r"mpirun is not Open MPI's: --version prints 'HYDRA build details'"):
        sparkhvd.run(place, num_proc=1, launcher="mpi")


def test_contradictory_launcher_arguments_are_refused(spark):
    with pytest.raises(ConfigError, match=r"launcher \(local\) and use_mpi=True \(mpi\) contradict each other"):
        sparkhvd.run(place, launcher="local", use_mpi=True)
    with pytest.raises(ConfigError, match=r"Unknown launcher='slurm'; expected 'auto' or one of \['barrier'"):
        sparkhvd.run(place, launcher="slurm")
