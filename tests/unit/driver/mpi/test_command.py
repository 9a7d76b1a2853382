from __future__ import annotations

import pytest

from sparkhvd.driver.mpi.command import interface_parameters, parameters_of


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
    found = interface_parameters("10.0.0.0/24", parameters_of(arguments.split(), environment))
    assert found == dict.fromkeys(names, "10.0.0.0/24")
