"""Successive halving: train all trials for a few epochs, and only the best ones longer.

This is the asynchronous form (ASHA) of Li et al., "A System for Massively Parallel Hyperparameter Tuning" (2020): a
trial is promoted as soon as it is among the best that have reached its rung, without waiting for the other trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.errors import ParamError


@dataclass(frozen=True)
class SuccessiveHalving:
    """Trains every trial for ``min_epochs``, and promotes the best ``1 / factor`` of the trials of each rung.

    Each rung trains ``factor`` times as long as the one before, and the last rung for the estimator's ``epochs``. A
    promoted trial resumes from its checkpoint.

    Attributes:
        min_epochs: epochs of the first rung.
        factor: the ratio between consecutive rungs, of their epochs and of their numbers of trials.

    Raises:
        ParamError: ``min_epochs`` or ``factor`` is too small or not an integer.
    """

    min_epochs: int = 1
    factor: int = 3

    def __post_init__(self) -> None:
        are_integers = all(type(number) is int for number in (self.min_epochs, self.factor))  # no bool
        if not are_integers or self.min_epochs < 1 or self.factor < 2:
            raise ParamError(
                f"SuccessiveHalving(min_epochs={self.min_epochs}, factor={self.factor}): min_epochs must be a whole "
                "number of at least 1, and factor a whole number of at least 2."
            )

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return the number of epochs at which a trial reaches each rung; the last one is ``epochs``."""
        rungs = []
        reached = self.min_epochs
        while reached < epochs:
            rungs.append(reached)
            reached *= self.factor
        return (*rungs, epochs)


class Ladder:
    """Decides which trial is promoted to the next rung.

    Args:
        rungs: the number of rungs; a trial that reaches the last one is complete.
        factor: see ``SuccessiveHalving``.
    """

    def __init__(self, rungs: int, factor: int) -> None:
        self._factor = factor
        self._scores: list[dict[int, float]] = [{} for _ in range(rungs)]  # by trial; lower is better
        self._promoted: list[set[int]] = [set() for _ in range(rungs)]

    def reach(self, rung: int, trial: int, score: float) -> None:
        """Record that a trial has reached a rung, with its score."""
        self._scores[rung][trial] = score

    def drop(self, trial: int) -> None:
        """Forget a trial that failed or was pruned, so that it no longer ranks above other trials."""
        for scores in self._scores:
            scores.pop(trial, None)

    def promote(self, *, is_closed: bool) -> tuple[int, int] | None:
        """Return a trial to promote and its next rung, the highest possible; None if no trial can be promoted.

        Args:
            is_closed: whether no trial runs and none will start. Then the best trial is promoted, in the end to the
                last rung, even from rungs with fewer than ``factor`` trials.
        """
        for rung in reversed(range(len(self._scores) - 1)):
            promoted = self._promote(rung, len(self._scores[rung]) // self._factor)
            if promoted is not None:
                return promoted
        if is_closed:  # not earlier, because a better trial may be on a lower rung
            for rung in reversed(range(len(self._scores) - 1)):
                if self._scores[rung]:
                    return self._promote(rung, 1)
        return None

    def _promote(self, rung: int, count: int) -> tuple[int, int] | None:
        """Promote one of the best ``count`` trials of a rung, unless all of them have been promoted."""
        for trial in self._best(rung)[:count]:
            if trial not in self._promoted[rung]:
                self._promoted[rung].add(trial)
                return trial, rung + 1
        return None

    def _best(self, rung: int) -> Sequence[int]:
        scores = self._scores[rung]
        return sorted(scores, key=lambda trial: (scores[trial], trial))
