from __future__ import annotations

from pathlib import Path

import pytest

from sparkhvd.driver.mpi.command import find_mpirun, interface_parameters, parameters_of
from sparkhvd.errors import LaunchError

_OTHER_MPI_VERSIONS = {
    "MPICH": "HYDRA build details:",
    "Intel": "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005 (id: 74c4a23)",
}


def program(folder: Path, name: str, version: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("version", _OTHER_MPI_VERSIONS.values(), ids=_OTHER_MPI_VERSIONS.keys())
@pytest.mark.parametrize(
    ("with_orted", "alternative"),
    [(True, r"use launcher='barrier', which needs no MPI\."), (False, r"leave out --mpi\.")],
    ids=["on Spark", "sparkhvdrun"],
)
def test_mpirun_of_another_mpi_is_refused_with_an_alternative(version, with_orted, alternative, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path, "mpirun", version)
    with pytest.raises(LaunchError) as caught:
        find_mpirun(with_orted=with_orted)
    assert caught.match(rf"mpirun is not Open MPI's: .* Put Open MPI's mpirun first on the PATH, or {alternative}$")
    assert version in str(caught.value)


@pytest.mark.parametrize("version", _OTHER_MPI_VERSIONS.values(), ids=_OTHER_MPI_VERSIONS.keys())
def test_open_mpi_is_found_beside_another_mpi(version, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path, "mpirun", version)
    open_mpi = program(tmp_path, "mpirun.openmpi", "mpirun.openmpi (OpenRTE) 4.1.4")
    assert find_mpirun() == open_mpi


@pytest.mark.parametrize(
    ("arguments", "environment", "names"),
    [
        ("-mca btl_tcp_if_exclude lo,docker0", {}, ["oob_tcp_if_include"]),
        ("--mca btl_tcp_if_include ib0 --gmca oob_tcp_if_exclude lo", {}, []),
        ("", {"OMPI_MCA_oob_tcp_if_include": "eth0"}, ["btl_tcp_if_include"]),
        (
            "-x btl_tcp_if_exclude -mca pml ob1",
            {"btl_tcp_if_exclude": "lo"},
            ["oob_tcp_if_include", "btl_tcp_if_include"],
        ),
    ],
)
def test_open_mpi_gets_the_networks_unless_the_user_has_set_them(arguments, environment, names):
    parameters = interface_parameters("10.0.0.0/24", parameters_of(arguments.split(), environment))
    assert parameters == dict.fromkeys(names, "10.0.0.0/24")
