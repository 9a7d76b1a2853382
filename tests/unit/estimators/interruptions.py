"""Training runs that are interrupted within epochs, on a rank of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import pytest

from sparkhvd.comm import session
from sparkhvd.data.read.batches import BatchSource
from sparkhvd.errors import HorovodInternalError
from sparkhvd.estimators.plugin import Trainer, TrainSpec
from sparkhvd.estimators.reports import StepReport
from sparkhvd.estimators.training.commits import Commits
from sparkhvd.estimators.training.hooks import RunHooks


class EveryStep(Commits):
    """Commits that are due after every step."""

    def is_due(self) -> bool:
        return True


class Interrupting(RunHooks):
    """Hooks that end the training after a step; ``position`` has its epoch and number."""

    position = (-1, -1)

    def on_step_end(self, report: StepReport, trainer: Trainer) -> None:
        super().on_step_end(report, trainer)
        if (report.epoch, report.step) == self.position:
            raise InterruptedError


Values = list[tuple[dict[str, float], dict[str, float]]]


def values_of_epochs(
    make: Callable[[], Trainer], rows: BatchSource, how: TrainSpec, interruptions: Sequence[tuple[int, int]]
) -> tuple[Values, Values]:
    """Return the metrics of an undisturbed training, and of one that is interrupted and resumed from commits.

    Args:
        make: returns a new trainer.
        rows: the rows for training and validation.
        how: the parameters of the training.
        interruptions: epoch and step of each interruption, in order.
    """

    def train(commits: Commits | None, position: tuple[int, int]) -> RunHooks:
        hooks = Interrupting(None, "run", how, session.current(), commits=commits)
        hooks.position = position
        trainer = make()
        if hooks.resume.checkpoint is not None:
            trainer.restore(hooks.resume.checkpoint.state)
        with contextlib.suppress(InterruptedError):
            trainer.fit(rows, rows, hooks)
        return hooks

    undisturbed, commits = train(None, (-1, -1)), EveryStep()
    for position in interruptions:
        hooks = train(commits, position)
        assert (hooks.resume.checkpoint is None) == (position == interruptions[0])
        assert len(hooks.history) == position[0], "the training was not interrupted there"
    resumed = train(commits, (-1, -1))
    return tuple([(record.train, record.validation) for record in hooks.history] for hooks in (undisturbed, resumed))


class FirstStepOnly(Commits):
    """Makes one commit, after the first step. From then on, the ranks exchange their metrics in every step."""

    def is_due(self) -> bool:
        return self.checkpoint is None

    def _next_interval(self, started: float) -> tuple[int, bool]:
        return 1, self.can_recover


Fit = tuple[Trainer, Values]


def fits_with_and_without_loss(
    make: Callable[[bool], Trainer], rows: BatchSource, how: TrainSpec
) -> tuple[tuple[int, int], Fit, Fit] | None:
    """Train undisturbed; also lose a rank, and resume from the last complete step.

    Args:
        make: returns a new trainer, which raises ``HorovodInternalError`` in a step if the argument is true.
        rows: the rows for training and validation.
        how: the parameters of the training.

    Returns:
        Epoch and step of the resumption, and both trainers with their metrics. None if the survivors of the loss
        return to their last commit.
    """

    def hooks_of(commits: Commits | None) -> RunHooks:
        return RunHooks(None, "run", how, session.current(), commits=commits)

    def values(hooks: RunHooks) -> Values:
        return [(record.train, record.validation) for record in hooks.history]

    commits = FirstStepOnly()
    hooks = hooks_of(commits)
    with pytest.raises(HorovodInternalError):
        make(True).fit(rows, rows, hooks)
    assert commits.checkpoint is not None
    recovered = None if commits._recover is None else commits._recover()
    if recovered is None:
        return None
    assert recovered.within is not None
    undisturbed, whole = make(False), hooks_of(None)
    undisturbed.fit(rows, rows, whole)
    commits.checkpoint = recovered
    resumed, rest = make(False), hooks_of(commits)
    resumed.restore(recovered.state)
    resumed.fit(rows, rows, rest)
    return (recovered.epoch, recovered.within.step), (undisturbed, values(whole)), (resumed, values(rest))


def assert_equal_values(undisturbed: Values, resumed: Values, rel: float) -> None:
    """Compare the metrics of two epochs, by ``values_of_epochs``."""
    assert len(undisturbed) == len(resumed) == 2
    for one, other in zip(undisturbed, resumed, strict=True):
        assert one == tuple(pytest.approx(values, rel=rel) for values in other)
