"""Successive halving: train all trials for a few epochs, and only the best of them further.

This is the asynchronous form (ASHA) of Li et al., "A System for Massively Parallel Hyperparameter Tuning" (2020): a
trial is promoted as soon as it is among the best of those that have reached its rung, without waiting for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.errors import ParamError


@dataclass(frozen=True)
class SuccessiveHalving:
    """Trains every trial for ``min_epochs``, and the best ``1 / factor`` of them ``factor`` times as long, repeatedly.

    The last rung has the estimator's ``epochs``. A trial that is promoted resumes from its checkpoint.

    Attributes:
        min_epochs: epochs of every trial.
        factor: one in ``factor`` trials is promoted.

    Raises:
        ParamError: a number is too small or not whole.
    """

    min_epochs: int = 1
    factor: int = 3

    def __post_init__(self) -> None:
        whole = all(type(number) is int for number in (self.min_epochs, self.factor))  # no bool
        if not whole or self.min_epochs < 1 or self.factor < 2:
            raise ParamError(
                f"SuccessiveHalving(min_epochs={self.min_epochs}, factor={self.factor}): min_epochs must be a whole "
                "number of at least 1, and factor a whole number of at least 2."
            )

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return the numbers of epochs after which trials are compared; the last one is that of a full training."""
        rungs = []
        reached = self.min_epochs
        while reached < epochs:
            rungs.append(reached)
            reached *= self.factor
        return (*rungs, epochs)


class Ladder:
    """Decides which trial is promoted to the next rung.

    Args:
        rungs: number of rungs; trials that reach the last one are complete.
        factor: see ``SuccessiveHalving``.
    """

    def __init__(self, rungs: int, factor: int) -> None:
        self._factor = factor
        self._scores: list[dict[int, float]] = [{} for _ in range(rungs)]  # by trial; less is better
        self._promoted: list[set[int]] = [set() for _ in range(rungs)]

    def reach(self, rung: int, trial: int, score: float) -> None:
        """Note that a trial has reached a rung."""
        self._scores[rung][trial] = score

    def drop(self, trial: int) -> None:
        """Forget a trial that failed or was pruned, so that another one is promoted in its place."""
        for scores in self._scores:
            scores.pop(trial, None)

    def promote(self, *, is_closed: bool) -> tuple[int, int] | None:
        """Return the trial to promote and its next rung, from the highest rung that allows it; None if none does.

        Args:
            is_closed: whether no trial runs or will start. Then the best trial reaches the last rung, even if there
                are fewer than ``factor`` trials in a rung.
        """
        for rung in reversed(range(len(self._scores) - 1)):
            number = len(self._scores[rung]) // self._factor
            if is_closed and not any(self._scores[rung + 1 :]):
                number = max(1, number)
            for trial in self._best(rung)[:number]:
                if trial not in self._promoted[rung]:
                    self._promoted[rung].add(trial)
                    return trial, rung + 1
        return None

    def _best(self, rung: int) -> Sequence[int]:
        scores = self._scores[rung]
        return sorted(scores, key=lambda trial: (scores[trial], trial))
