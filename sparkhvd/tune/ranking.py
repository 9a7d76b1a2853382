"""Which trials of a search are the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optuna

# The user attribute with the id of a trial's run. A study may also have trials of other programs, which have none.
RUN_ID = "sparkhvd:run_id"


def best_trials(trials: Iterable[optuna.trial.FrozenTrial], signs: Sequence[int]) -> list[optuna.trial.FrozenTrial]:
    """Return the best trial that a search completed; for several metrics, those that no other one surpasses in all.

    The first of equal trials counts.

    Args:
        trials: all trials of the study, by number.
        signs: by metric, 1 if lower is better, else -1.
    """
    scored: dict[tuple[float, ...], optuna.trial.FrozenTrial] = {}
    for trial in trials:
        if trial.state.name == "COMPLETE" and RUN_ID in trial.user_attrs:
            scores = tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))
            scored.setdefault(scores, trial)
    return [trial for scores, trial in scored.items() if not any(_surpasses(other, scores) for other in scored)]


def _surpasses(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
