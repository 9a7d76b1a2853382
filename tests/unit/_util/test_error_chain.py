from __future__ import annotations

from sparkhvd._util.error_chain import error_chain


def test_the_chain_follows_causes_and_contexts():
    first, second, third = ValueError("first"), TypeError("second"), KeyError("third")
    third.__cause__, second.__context__ = second, first
    assert list(error_chain(third)) == [third, second, first]
    assert list(error_chain(None)) == []


def test_a_chain_that_returns_to_its_first_error_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert list(error_chain(first)) == [first, second]
