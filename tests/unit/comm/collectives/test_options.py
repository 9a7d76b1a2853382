from __future__ import annotations

import pytest

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions, reduction_options


def test_keywords_become_a_reduction_and_options():
    assert reduction_options(ReduceOp.SUM) == (Reduction(ReduceOp.SUM, 1.0, 1.0), SubmitOptions(None, None, False))
    reduction, options = reduction_options("max", prescale=2.0, postscale=0.5, name="mine", with_waiter=True)
    assert reduction == Reduction(ReduceOp.MAX, 2.0, 0.5)
    assert options == SubmitOptions("mine", None, True)


def test_an_unknown_keyword_of_a_collective_is_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
        reduction_options(ReduceOp.SUM, nmae="a slip of the pen")


def test_the_options_of_a_blocking_call_differ_only_in_blocking():
    assert SubmitOptions("mine").waiting() == SubmitOptions("mine", None, True)
