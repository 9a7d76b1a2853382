"""Policies that a run applies to its history after every epoch: whether to stop, and which epoch was the best.

The history is the same on every rank, so all ranks reach the same decision.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparkhvd._util.suggestions import did_you_mean
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.plain_values import plain

if TYPE_CHECKING:
    from sparkhvd.estimators.reports import EpochRecord

Mode = Literal["min", "max", "auto"]

# Higher values of a metric are better if its name contains one of the first words and none of the second.
_HIGHER_IS_BETTER = re.compile(
    "acc|accuracy|ap|auc|auroc|bleu|correlation|corrcoef|dice|f1|fbeta|fmeasure|iou|jaccard|kappa|map|mrr|ndcg|"
    "negatives|positives|precision|psnr|r2|recall|rouge|sensitivity|similarity|specificity|ssim"
)
_LOWER_IS_BETTER = re.compile("error|false|loss")


@dataclass(frozen=True)
class EarlyStopping:
    """Ends training when it no longer improves.

    Attributes:
        monitor: the monitored metric: ``loss``, the name of a metric, or either with the prefix ``val_``.
        patience: epochs without an improvement after which the training ends; epochs without validation do not count.
        min_delta: a value counts as an improvement only if it is better by more than this.
        mode: ``min`` if lower is better, or ``max`` if higher is better. ``auto`` is ``max`` if ``monitor`` contains a
            word such as "accuracy", "auc" or "f1", and ``min`` otherwise.
    """

    monitor: str = "val_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "patience", plain(self.patience))
        object.__setattr__(self, "min_delta", plain(self.min_delta))
        object.__setattr__(self, "mode", _resolved_mode("EarlyStopping", self.mode, self.monitor))
        if self.patience < 1 or not self.min_delta >= 0:
            raise ParamError(
                f"EarlyStopping(patience={self.patience}, min_delta={self.min_delta}): patience must be at least 1 "
                "and min_delta at least 0."
            )

    def ends(self, history: Sequence[EpochRecord]) -> bool:
        """Return whether the training ends after these epochs."""
        best = best_epoch(history, self.monitor, self.mode, self.min_delta)
        later = history if best is None else history[best + 1 :]
        return sum(not _lacks_validation(record, self.monitor) for record in later) >= self.patience


@dataclass(frozen=True)
class Checkpoints:
    """Which checkpoints of a run are kept, and which epoch's model is returned.

    Attributes:
        every_steps: training steps between checkpoints within an epoch; None checkpoints at the end of epochs only.
        keep: number of last epochs whose checkpoints stay in the Store.
        best: the metric (named as in ``EarlyStopping``) that selects the best epoch, whose model is kept and returned;
            None returns the last epoch's.
        mode: whether lower or higher values of ``best`` are better, as in ``EarlyStopping``.
    """

    every_steps: int | None = None
    keep: int = 1
    best: str | None = None
    mode: Mode = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", plain(self.keep))
        object.__setattr__(self, "every_steps", plain(self.every_steps))
        object.__setattr__(self, "mode", _resolved_mode("Checkpoints", self.mode, self.best or ""))
        if self.keep < 1 or (self.every_steps is not None and self.every_steps < 1):
            raise ParamError(
                f"Checkpoints(every_steps={self.every_steps}, keep={self.keep}): both numbers must be at least 1."
            )

    def best_epoch(self, history: Sequence[EpochRecord], lost_epochs: Collection[int] = ()) -> int | None:
        """Return the epoch whose model ``fit`` returns, ignoring ``lost_epochs``; None means the last epoch."""
        return None if self.best is None else best_epoch(history, self.best, self.mode, lost_epochs=lost_epochs)


def best_epoch(
    history: Sequence[EpochRecord], monitor: str, mode: Mode, min_delta: float = 0.0, lost_epochs: Collection[int] = ()
) -> int | None:
    """Return the last epoch that improved on the best one before it by more than ``min_delta``.

    The first value that is not NaN counts as an improvement. The result is None if all values are NaN. Two kinds of
    epochs do not count: ``lost_epochs``, and epochs that Lightning ends without the validation that ``monitor`` needs.
    """
    best, value = None, math.inf
    for index, record in enumerate(history):
        if index in lost_epochs or _lacks_validation(record, monitor):
            continue
        current = metric_value(record, monitor) * (1 if mode == "min" else -1)
        if current < value - min_delta or (best is None and not math.isnan(current)):
            best, value = index, current
    return best


def _lacks_validation(record: EpochRecord, monitor: str) -> bool:
    """Return whether an epoch had no validation: ``max_steps`` ended it, or ``check_val_every_n_epoch`` omitted it."""
    return monitor.startswith("val_") and not record.validation and monitor not in record.train


def metric_value(record: EpochRecord, monitor: str) -> float:
    """Return the value of a metric in an epoch.

    Raises:
        ParamError: the epoch does not report this metric.
    """
    values = metric_values(record)
    if monitor not in values:
        raise ParamError(f"Unknown metric {monitor!r}; an epoch reports {', '.join(values)}.")
    return values[monitor]


def metric_values(record: EpochRecord) -> dict[str, float]:
    """Return the metrics of an epoch by the names that policies monitor."""
    return {**record.train, **{f"val_{name}": value for name, value in record.validation.items()}}


def monitored_metrics(params: Mapping[str, object]) -> dict[str, str]:
    """Return the monitored metrics by parameter, for the parameters that all estimators share."""
    stopping, checkpoints = params.get("early_stopping"), params.get("checkpoints")
    monitors = {
        "early_stopping": stopping.monitor if isinstance(stopping, EarlyStopping) else None,
        "checkpoints": checkpoints.best if isinstance(checkpoints, Checkpoints) else None,
    }
    return {name: monitor for name, monitor in monitors.items() if monitor is not None}


def check_monitored(monitors: Mapping[str, str], names: Collection[str]) -> None:
    """Refuse to monitor a metric that no epoch will report.

    Args:
        monitors: the monitored metrics by parameter.
        names: the metrics of the training; the validation's metrics have the same names with the prefix ``val_``.

    Raises:
        ParamError: the message names the nearest metric.
    """
    known = [*names, *(f"val_{name}" for name in names)]
    for parameter, monitor in monitors.items():
        if monitor not in known:
            hint = f" {did_you_mean(monitor, known)}".rstrip()
            raise ParamError(f"{parameter} monitors {monitor!r}, but an epoch reports {', '.join(known)}.{hint}")


def _resolved_mode(policy: str, mode: Mode, monitor: str) -> Mode:
    """Return ``min`` or ``max``; the mode belongs to the identity of a run, so ``auto`` never reaches it."""
    if mode not in {"min", "max", "auto"}:
        raise ParamError(f"{policy}(mode={mode!r}): mode must be 'auto', 'min' or 'max'.")
    return _mode_by_name(monitor) if mode == "auto" else mode


def _mode_by_name(monitor: str) -> Mode:
    """Return the mode of a metric by the words in its name, such as ``val_top_5_acc`` or ``MulticlassF1Score``."""
    words_apart = monitor.replace("IoU", "Iou").replace("mAP", "map")
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words_apart)
    numbered: list[str] = re.findall(r"[a-z]+[0-9]*", separated.lower().replace("io_u", "iou"))
    words = {*numbered, *(word.rstrip("0123456789") for word in numbered)}
    is_higher, is_lower = (any(map(kind.fullmatch, words)) for kind in (_HIGHER_IS_BETTER, _LOWER_IS_BETTER))
    return "max" if is_higher and not is_lower else "min"
