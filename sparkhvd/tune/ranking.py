"""The best trials of a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

# The user attribute with the id of a trial's run. A study may also have trials of other programs, which have none.
RUN_ID = "sparkhvd:run_id"
# Optuna's system attributes with the constraints of a sampler, and with those that the space sets.
CONSTRAINTS = "constraints"


def best_trials(trials: Iterable[optuna.trial.FrozenTrial], signs: Sequence[int]) -> list[optuna.trial.FrozenTrial]:
    """Return the best completed trial of a search; with several metrics, the trials that no other trial dominates.

    A trial dominates another if none of its metrics is worse and one is better. Of equal trials, only the first is
    returned. As in Optuna, a trial that violates a constraint is never among the best.

    Args:
        trials: all trials of the study, by number.
        signs: by metric, 1 if lower is better, else -1.
    """
    scored: dict[tuple[float, ...], optuna.trial.FrozenTrial] = {}
    for trial in trials:
        if trial.state.name == "COMPLETE" and RUN_ID in trial.user_attrs and _is_feasible(trial):
            scores = tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))
            scored.setdefault(scores, trial)
    return [trial for scores, trial in scored.items() if not any(_dominates(other, scores) for other in scored)]


def _is_feasible(trial: optuna.trial.FrozenTrial) -> bool:
    of_sampler = trial.system_attrs.get(CONSTRAINTS) or ()
    of_space = [value for name, value in trial.system_attrs.items() if name.startswith(f"{CONSTRAINTS}:")]
    return all(value <= 0 for value in (*of_sampler, *of_space))


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
