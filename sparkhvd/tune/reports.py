"""Reports of a fit's epochs to an Optuna trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.errors import ParamError

if TYPE_CHECKING:
    import optuna


class SearchArgumentError(ParamError):
    """An argument of a search cannot work for any trial: the space, or a metric that no epoch reports."""


class TrialReports:
    """Reports a metric to a trial after every epoch, and ends the training if the study's pruner prunes the trial.

    Pass it as the ``epoch_callback`` of the trial's fit. With several metrics it reports nothing, because Optuna cannot
    prune by several metrics.

    Args:
        trial: the trial.
        metrics: the metrics that the study optimizes, by the names that ``EarlyStopping`` uses, such as ``val_loss``.

    Attributes:
        last: the metrics of the last epoch that counts; empty before the first one.
        is_pruned: whether the pruner has ended the training.

    Examples:
        >>> def objective(trial):
        ...     reports = TrialReports(trial, "val_loss")
        ...     estimator.copy({estimator.epoch_callback: reports}).fit(df)
        ...     return reports.value()
    """

    def __init__(self, trial: optuna.Trial, *metrics: str) -> None:
        self._trial = trial
        self._metrics = metrics or ("val_loss",)
        self.last: tuple[float, ...] = ()
        self._epochs: set[int] = set()  # those already reported; a resumed run reports earlier epochs again
        self.is_pruned = False

    def __call__(self, epoch: int, values: Mapping[str, float]) -> bool:
        """Report an epoch; return whether the trial is pruned. A validation metric ignores epochs without validation.

        Raises:
            ParamError: an epoch does not have the metric.
        """
        if any(map(_is_validation, self._metrics)) and not any(map(_is_validation, values)):
            return self.is_pruned
        self.last = metrics_of(values, self._metrics)
        if len(self._metrics) == 1 and epoch not in self._epochs:
            self._epochs.add(epoch)
            self._trial.report(self.last[0], epoch)
            self.is_pruned = self.is_pruned or self._trial.should_prune()
        return self.is_pruned

    def value(self) -> float | tuple[float, ...]:
        """Return the metric of the last epoch, or the metrics as a tuple, for the objective to return.

        With ``Checkpoints(best=...)``, the model may be that of another epoch.

        Raises:
            optuna.TrialPruned: the trial was pruned.
            ParamError: no epoch was reported.
        """
        import optuna  # noqa: PLC0415  (optional)

        if self.is_pruned:
            raise optuna.TrialPruned
        if not self.last:
            raise ParamError("No epoch was reported to the trial: pass the object as epoch_callback of the fit.")
        return self.last[0] if len(self._metrics) == 1 else self.last


def _is_validation(name: str) -> bool:
    return name.startswith("val_")


def metrics_of(values: Mapping[str, float], names: Sequence[str]) -> tuple[float, ...]:
    """Return the metrics of an epoch with these names.

    Raises:
        SearchArgumentError: the epoch does not have a metric.
    """
    for name in names:
        if name not in values:
            hint = f" {did_you_mean(name, values)}".rstrip()
            raise SearchArgumentError(f"The search optimizes {name!r}, but an epoch reports {', '.join(values)}.{hint}")
    return tuple(values[name] for name in names)
