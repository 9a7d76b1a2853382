"""Lightning's checkpoint of a run that was interrupted within an epoch."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any


def validates_after(trainer: Any, batches: int) -> bool:
    """Whether Lightning validates after so many batches of the epoch, by their number.

    A checkpoint is made before that. A run that goes on from it does not make up for the validation.
    """
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or every in (None, math.inf):
        return False  # never, by the clock, or at the end of the epoch
    if epochs is None:
        return (int(trainer.fit_loop.total_batch_idx) + 1) % int(every) == 0
    return (int(trainer.current_epoch) + 1) % int(epochs) == 0 and batches % int(every) == 0


def begin_epoch_again(trainer: Any, call: ModuleType) -> None:
    """Call the hooks of the epoch's start, which Lightning leaves out where a run goes on within an epoch.

    What they set in callbacks and the module was in the process that is gone.

    Args:
        trainer: Lightning's, after all hooks of ``on_train_start``.
        call: how this Lightning calls hooks.
    """
    if getattr(trainer.fit_loop, "restarted_mid_epoch", False):  # before Lightning 2.5 it calls them always
        call._call_callback_hooks(trainer, "on_train_epoch_start")  # noqa: SLF001
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")  # noqa: SLF001


def go_on_after(checkpoint: dict[str, Any], done: int) -> None:
    """Make a checkpoint of a batch's last hook, as it was loaded, one from which Lightning goes on with the next batch.

    Lightning counts a batch as completed after its hooks, and what it makes of one that is not differs among its
    versions.

    Args:
        checkpoint: changed in place, before Lightning restores its loops from it.
        done: how many batches of the epoch Lightning is to count as done.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], done)
    progress["total"]["completed"] = progress["total"]["processed"]
    progress["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
