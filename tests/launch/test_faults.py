"""Rows of the fault matrix; the endurance run produces all of them."""

from __future__ import annotations

import pytest

from tests.launch.faults import FAULTS, complaints, produced

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.always], ids=lambda fault: fault.name)
def test_the_driver_says_soon_what_went_wrong_and_nothing_is_left(fault, spark, tmp_path):
    assert complaints(fault, produced(fault, tmp_path, spark)) == []
