"""Rows of the fault matrix; the endurance run produces all of them."""

from __future__ import annotations

import pytest

from tests.launch.faults import FAULTS, complaints, ports_taken, produced
from tests.launch.hosts import why_not
from tests.launch.losses import DRIVER_FAULTS, lost_driver

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.always], ids=lambda fault: fault.name)
def test_the_driver_says_soon_what_went_wrong_and_nothing_is_left(fault, spark, tmp_path):
    assert complaints(fault, produced(fault, tmp_path, spark)) == []


def test_nothing_is_left_of_a_job_whose_driver_is_killed(tmp_path):
    fault = next(one for one in DRIVER_FAULTS if one.name == "driver killed, in mid-training, mpi")
    assert lost_driver(fault, tmp_path)[2] == []


def test_a_host_without_a_free_port_is_an_error_of_whoever_needs_one_and_no_trouble_to_others(tmp_path):
    if why_not():
        pytest.skip(why_not())
    found = ports_taken(tmp_path)
    assert {name: complained for name, (_, _, complained) in found.items() if complained} == {}
    assert len(found) == 4
