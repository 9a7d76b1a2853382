"""Resuming a Lightning run that was interrupted within an epoch."""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from sparkhvd.estimators.lightning.best_model import State


def validates_after(trainer: Trainer, batches: int) -> bool:
    """Whether Lightning validates after this number of batches of the epoch.

    A checkpoint is made before such a validation, and a run that resumes from it would skip the validation.
    """
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or every in (None, math.inf):
        return False  # never, by time, or at the end of the epoch
    if epochs is None:
        return (int(trainer.fit_loop.total_batch_idx) + 1) % int(every) == 0
    return (int(trainer.current_epoch) + 1) % int(epochs) == 0 and batches % int(every) == 0


def repeat_epoch_start_hooks(trainer: Trainer, call: ModuleType) -> None:
    """Call the hooks of the epoch's start, which Lightning skips when a run resumes within an epoch.

    Values that they set in callbacks and the module are lost with the interrupted process.

    Args:
        trainer: Lightning's Trainer, after all hooks of ``on_train_start``.
        call: Lightning's module that calls hooks.
    """
    if getattr(trainer.fit_loop, "restarted_mid_epoch", False):  # Lightning before 2.5 always calls them
        call._call_callback_hooks(trainer, "on_train_epoch_start")  # noqa: SLF001
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")  # noqa: SLF001


def finish_epoch(trainer: Trainer) -> None:
    """Let a run that resumes at the end of an epoch begin the next one, after its loops are restored.

    With ``max_steps``, Lightning would end the last epoch again, without batches, and report its values anew.
    """
    loop = trainer.fit_loop
    if not hasattr(loop, "restarted_mid_epoch"):  # Lightning before 2.5
        return
    super(type(loop), type(loop)).restarting.fset(loop, False)  # type: ignore[attr-defined]  # the loop's own ignores it


def resume_after_batch(checkpoint: State, done: int) -> None:
    """Change a checkpoint from a batch's last hook so that Lightning resumes with the next batch.

    Lightning counts a batch as completed only after its hooks, and its versions treat an incomplete batch differently.

    Args:
        checkpoint: the loaded checkpoint, changed in place before Lightning restores its loops from it.
        done: how many batches of the epoch Lightning shall count as done.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], done)
    progress["total"]["completed"] = progress["total"]["processed"]
    progress["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
