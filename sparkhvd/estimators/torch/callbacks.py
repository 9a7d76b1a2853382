"""Callbacks of a torch training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass
class TorchRun:
    """What callbacks see of a running training.

    Attributes:
        model: the module as it is trained on this rank.
        optimizer: its optimizer; what is changed in ``param_groups`` holds from the next step on. Change the same on
            every rank.
        rank: this rank.
        size: the number of ranks.
        epochs: the last epoch's number, counted from 1.
        stop: set it to True to end the training after this epoch; it ends on all ranks when one wants it.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    size: int
    epochs: int
    stop: bool = False


class TorchCallback:
    """Base of callbacks for ``TorchEstimator(callbacks=[...])``; override what you need.

    They are pickled, sent to the ranks and called on every rank, in the order of the list. What writes files or prints
    should ask ``run.rank == 0``. They must not start collectives on some of the ranks only. A callback's own attributes
    are not part of checkpoints.

    Example:
        >>> class ShowRate(TorchCallback):
        ...     def on_epoch_end(self, run, epoch, logs):
        ...         if run.rank == 0:
        ...             first, *_ = run.optimizer.param_groups
        ...             print(epoch, logs["loss"], first["lr"])
    """

    def on_train_begin(self, run: TorchRun) -> None:
        """Before the first step of this process; also where a run is continued."""

    def on_epoch_begin(self, run: TorchRun, epoch: int) -> None:
        """Before an epoch (from 0)."""

    def on_step_end(self, run: TorchRun, epoch: int, step: int, loss: float | None) -> None:
        """After an optimizer step.

        Args:
            run: the training.
            epoch: from 0.
            step: batches of the epoch that are done.
            loss: of this rank's rows; None where it had none.
        """

    def on_epoch_end(self, run: TorchRun, epoch: int, logs: Mapping[str, float]) -> None:
        """After an epoch and its validation, before its checkpoint.

        Args:
            run: the training.
            epoch: from 0.
            logs: loss and metrics over all ranks' rows, those of the validation with ``val_`` before their names.
        """

    def on_train_end(self, run: TorchRun) -> None:
        """After the last epoch."""
