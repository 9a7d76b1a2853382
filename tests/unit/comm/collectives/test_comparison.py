"""Random mixtures of all collectives equal NumPy; seeds are fixed here, and ``make soak`` draws others."""

from __future__ import annotations

import pytest

from tests.comparison import compare

LAYOUTS = {
    "1": ("a",),
    "2 on one host": ("a", "a"),
    "2 apart": ("a", "b"),
    "3 on two hosts": ("a", "b", "a"),
    "4 on two hosts": ("a", "a", "b", "b"),
    "4 on one host": ("a",) * 4,
    "5 on three hosts": ("a", "a", "b", "c", "c"),
    "6 on two hosts": ("a", "b", "b", "a", "a", "b"),
    "6 apart": tuple("abcdef"),
}


@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_collectives_equal_numpy(hosts):
    results, wrong = compare(hosts, seed=20261123 + len(hosts), seconds=1.0)
    assert wrong == []
    assert results > 0


def test_encrypted_collectives_without_shared_memory_equal_numpy():
    for settings in ({"shared_memory": False}, {"encrypt": True}, {"fusion_threshold": 0}):
        results, wrong = compare(("a", "a", "b"), seed=7, seconds=0.5, **settings)
        assert wrong == []
        assert results > 0
