"""Callbacks of ``TorchEstimator``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass
class TorchRun:
    """State of a running training, as callbacks see it.

    Attributes:
        model: the module that this rank trains.
        optimizer: the model's optimizer; changes in ``param_groups`` take effect with the next step. Make the same
            change on every rank.
        rank: this rank.
        size: the number of ranks.
        epochs: the total number of epochs, including those before a resume.
        stop: set this to True to end the training after this epoch; one rank suffices to end it on all ranks.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    size: int
    epochs: int
    stop: bool = False


class TorchCallback:
    """Base class for ``TorchEstimator(callbacks=[...])``; override the methods that you need.

    Callbacks are pickled, sent to the ranks and called on every rank, in the order of the list. Check ``run.rank == 0``
    before writing files or printing. If a callback starts a collective, it must do so on every rank.

    Modules in the attributes of a callback, such as an ``AveragedModel``, are part of checkpoints, and their buffers
    are averaged over the ranks like those of the model. Create such modules on every rank. Checkpoints do not contain
    other attributes of a callback.

    Examples:
        >>> class ShowRate(TorchCallback):
        ...     def on_epoch_end(self, run, epoch, logs):
        ...         if run.rank == 0:
        ...             first, *_ = run.optimizer.param_groups
        ...             print(epoch, logs["loss"], first["lr"])
    """

    def on_train_begin(self, run: TorchRun) -> None:
        """Run before the first step of this process, in a resumed run too."""

    def on_epoch_begin(self, run: TorchRun, epoch: int) -> None:
        """Run before every epoch, counted from 0, and again when a run resumes within an epoch.

        When a run resumes within an epoch, the changes that this call makes to existing ``param_groups`` are undone,
        because the checkpoint already contains them.
        """

    def on_step_end(self, run: TorchRun, epoch: int, step: int, loss: float | None) -> None:
        """Run after an optimizer step.

        Args:
            run: the training.
            epoch: the epoch, counted from 0.
            step: number of batches of the epoch that are done.
            loss: mean over this rank's rows in the step; None if it had no rows.
        """

    def on_epoch_end(self, run: TorchRun, epoch: int, logs: Mapping[str, float]) -> None:
        """Run after an epoch and its validation, before its checkpoint.

        Args:
            run: the training.
            epoch: the epoch, counted from 0.
            logs: loss and metrics over all ranks' rows; names of validation metrics start with ``val_``.
        """

    def on_train_end(self, run: TorchRun) -> None:
        """Run after the last epoch, also when a run resumes that was interrupted there."""
