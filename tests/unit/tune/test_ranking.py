from __future__ import annotations

import optuna
import pytest

from sparkhvd.tune.ranking import RUN_ID, best_trials


def trials(*values, state=optuna.trial.TrialState.COMPLETE, **attributes):
    created = []
    for number, objectives in enumerate(values):
        trial = optuna.trial.create_trial(state=state, values=objectives, user_attrs={RUN_ID: "run", **attributes})
        trial.number = number
        created.append(trial)
    return created


@pytest.mark.parametrize(
    ("values", "signs", "best"),
    [
        ([[3.0], [1.0], [2.0]], [1], [1]),
        ([[3.0], [1.0], [2.0]], [-1], [0]),
        ([[1.0], [1.0]], [1], [0]),
        ([[1.0, 5.0], [2.0, 4.0], [2.0, 6.0], [1.0, 5.0]], [1, 1], [0, 1]),
        ([[1.0, 5.0], [2.0, 4.0], [2.0, 6.0]], [1, -1], [0, 2]),
        ([], [1], []),
    ],
)
def test_the_best_trials_are_those_that_no_other_trial_dominates(values, signs, best):
    assert [trial.number for trial in best_trials(trials(*values), signs)] == best


def feasible(created):
    """Return the values of the best trial according to Optuna."""
    study = optuna.create_study()
    study.add_trials(created)
    return study.best_trial.values


@pytest.mark.parametrize(("name", "values"), [("constraints", ([0.0, 1.0], [-1.0, 0.0])), ("constraints:size", (1, 0))])
def test_trials_that_violate_a_constraint_are_not_among_the_best(name, values):
    created = trials([1.0], [2.0])
    for trial, value in zip(created, values, strict=True):
        trial.system_attrs = {name: value}
    with pytest.raises(ValueError, match="feasible"):
        feasible(created[:1])
    assert feasible(created) == best_trials(created, [1])[0].values == [2.0]
    assert best_trials(created[:1], [1]) == []


def test_trials_of_other_programs_and_failed_trials_do_not_count():
    own_trial, foreign_trial = trials([2.0])[0], trials([1.0])[0]
    del foreign_trial.user_attrs[RUN_ID]
    failed = trials(None, state=optuna.trial.TrialState.FAIL)
    assert best_trials([foreign_trial, own_trial, *failed], [1]) == [own_trial]
