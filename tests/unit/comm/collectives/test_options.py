from __future__ import annotations

import pytest

from sparkhvd.comm.collectives.buffers import ReduceOp
from sparkhvd.comm.collectives.options import Reduction, SubmitOptions, reduction_options


def test_keywords_become_a_reduction_and_a_way():
    assert reduction_options(ReduceOp.SUM) == (Reduction(ReduceOp.SUM, 1.0, 1.0), SubmitOptions(None, None, False))
    reduction, options = reduction_options("max", prescale=2.0, postscale=0.5, name="mine", with_waiter=True)
    assert reduction == Reduction(ReduceOp.MAX, 2.0, 0.5)
    assert options == SubmitOptions("mine", None, True)


def test_a_keyword_that_collectives_do_not_have_is_refused():
    with pytest.raises(TypeError, match="nmae"):
        reduction_options(ReduceOp.SUM, nmae="a slip of the pen")


def test_the_way_of_a_caller_who_waits_differs_in_that_alone():
    assert SubmitOptions("mine").waiting() == SubmitOptions("mine", None, True)
