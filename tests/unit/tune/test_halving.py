from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkhvd.errors import ParamError
from sparkhvd.tune.halving import Ladder, SuccessiveHalving


@pytest.mark.parametrize(
    ("halving", "epochs", "rungs"),
    [
        (SuccessiveHalving(1, 3), 9, (1, 3, 9)),
        (SuccessiveHalving(1, 3), 10, (1, 3, 9, 10)),
        (SuccessiveHalving(2, 2), 7, (2, 4, 7)),
        (SuccessiveHalving(5, 3), 5, (5,)),
        (SuccessiveHalving(5, 3), 2, (2,)),
    ],
)
def test_the_last_rung_has_all_epochs(halving, epochs, rungs):
    assert halving.rungs(epochs) == rungs


@pytest.mark.parametrize("numbers", [(0, 3), (1, 1), (1.5, 3), (1, 2.5), (True, 3)])
def test_invalid_numbers_are_refused(numbers):
    with pytest.raises(
        ParamError, match="min_epochs must be a whole number of at least 1, and factor a whole number of at least 2"
    ):
        SuccessiveHalving(*numbers)


def test_the_best_of_three_trials_is_promoted_as_soon_as_all_three_have_reached_the_rung():
    ladder = Ladder(rungs=3, factor=3)
    for trial, score in enumerate([0.5, 0.3]):
        ladder.reach(0, trial, score)
        assert ladder.promote(is_closed=False) is None
    ladder.reach(0, 2, 0.4)
    assert ladder.promote(is_closed=False) == (1, 1)
    assert ladder.promote(is_closed=False) is None


def test_another_trial_is_promoted_in_place_of_a_failed_trial():
    ladder = Ladder(rungs=2, factor=3)
    for trial, score in enumerate([0.5, 0.3, 0.4]):
        ladder.reach(0, trial, score)
    assert ladder.promote(is_closed=False) == (1, 1)
    ladder.drop(1)
    assert ladder.promote(is_closed=False) is None
    assert ladder.promote(is_closed=True) == (2, 1)


def test_a_better_trial_is_promoted_from_a_lower_rung_before_the_search_closes():
    ladder = Ladder(rungs=3, factor=3)
    for trial in range(3):
        ladder.reach(0, trial, score=1.0)
    assert ladder.promote(is_closed=False) == (0, 1)
    ladder.reach(1, 0, score=1.0)
    ladder.reach(0, 3, score=0.0)
    assert ladder.promote(is_closed=True) == (3, 1)
    ladder.reach(1, 3, score=0.0)
    assert ladder.promote(is_closed=True) == (3, 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 4), st.integers(2, 4))
def test_the_best_trial_completes_and_no_trial_skips_a_rung(scores, rungs, factor):
    """Act like a search with one worker: promote a trial if possible, otherwise start one; scores do not change."""
    ladder = Ladder(rungs, factor)
    reached = [[] for _ in range(rungs)]
    waiting = list(enumerate(scores))
    while True:
        step = ladder.promote(is_closed=not waiting)
        if step is None and not waiting:
            break
        trial, rung = step or (waiting.pop(0)[0], 0)
        reached[rung].append(trial)
        ladder.reach(rung, trial, scores[trial])
    assert len(set(reached[0])) == len(scores)
    assert scores.index(min(scores)) in reached[-1]
    for lower, upper in pairwise(reached):
        assert set(upper) <= set(lower)
        assert len(upper) == len(set(upper))
