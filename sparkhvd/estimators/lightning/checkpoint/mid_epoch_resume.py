"""Resuming a Lightning run that was interrupted within an epoch."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparkhvd.estimators.torch.checkpoint.optimizer_groups import options_unchanged
from sparkhvd.estimators.torch.checkpoint.versions import has_only_parameters

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

    from sparkhvd.estimators.lightning.checkpoint.best_model import State


_KNOWN_PACKAGES = ("lightning.", "pytorch_lightning.", "sparkhvd.")


def validates_after(trainer: Trainer, batches: int) -> bool:
    """Return whether Lightning validates after this number of batches of the epoch.

    A checkpoint is made before such a validation, and a run that resumes from it would skip the validation.
    """
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or every in (None, math.inf):
        return False  # never, by time, or at the end of the epoch
    if epochs is None:
        return (int(trainer.fit_loop.total_batch_idx) + 1) % int(every) == 0
    return (int(trainer.current_epoch) + 1) % int(epochs) == 0 and batches % int(every) == 0


def can_keep_state(trainer: Trainer, modules: torch.nn.Module) -> bool:
    """Return whether a rank has the whole state of its last complete step, see ``has_only_parameters``.

    A step that is interrupted may have changed gradients of a manual optimization, or the state of a user's callback.
    Schedulers that read a metric step after the hooks of a batch, and again when the run resumes. Only rank 0 has the
    file of the best model.
    """
    steps_by_metric = any(
        config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs
    )
    callbacks = vars(trainer)["callbacks"]  # Lightning does not declare the attribute
    is_plain = all(type(callback).state_dict.__module__.startswith(_KNOWN_PACKAGES) for callback in callbacks)
    keeps_best = any(getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks)
    is_automatic: bool = trainer.lightning_module.automatic_optimization
    return is_automatic and not steps_by_metric and not keeps_best and is_plain and has_only_parameters(modules)


def ends_by_steps(trainer: Trainer) -> bool:
    """Return whether ``max_steps`` ends the training here, so that a run that resumes here would report no epoch."""
    return 0 <= trainer.max_steps <= trainer.global_step


def repeat_epoch_start_hooks(trainer: Trainer, call: ModuleType) -> None:
    """Call the hooks of the epoch's start, which Lightning skips when a run resumes within an epoch.

    Values that the hooks set in callbacks and the module are lost with the interrupted process. Values in the
    checkpoint stay unchanged: a hook that multiplies a learning rate has already done so when the epoch began.

    Args:
        trainer: Lightning's Trainer, after all hooks of ``on_train_start``.
        call: Lightning's module that calls hooks.
    """
    if trainer.fit_loop.restarted_mid_epoch:
        callbacks = vars(trainer)["callbacks"][:-1]  # all but the run's own; Lightning does not declare the attribute
        states = [copy.deepcopy(callback.state_dict()) for callback in callbacks]
        with options_unchanged(trainer.optimizers):
            call._call_callback_hooks(trainer, "on_train_epoch_start")  # noqa: SLF001
            call._call_lightning_module_hook(trainer, "on_train_epoch_start")  # noqa: SLF001
        for callback, state in zip(callbacks, states, strict=True):
            if _differ(state, callback.state_dict()):
                callback.load_state_dict(state)


def _differ(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two states of a callback differ; False if they hold tensors, which cannot be compared."""
    try:
        return bool(state != other)
    except (RuntimeError, ValueError):
        return False


def end_epoch_with_schedulers(trainer: Trainer) -> None:
    """Let schedulers that read a metric step at the end of the epoch within which a run resumes.

    Lightning omits this step after any restart, because its checkpoints contain no metrics. Call this once the epoch's
    first batch begins.
    """
    trainer.fit_loop._restarting = False  # noqa: SLF001  (the public setter also changes the loops within)


def finish_epoch(trainer: Trainer) -> None:
    """Let a run that resumes at the end of an epoch begin the next one, after its loops are restored.

    With ``max_steps``, Lightning would end the last epoch again, without batches, and report its values anew.
    """
    loop = trainer.fit_loop
    super(type(loop), type(loop)).restarting.fset(loop, False)  # type: ignore[attr-defined]  # the loop's own ignores it


def reload_batches(trainer: Trainer) -> None:
    """Let Lightning ask for the number of batches again, before it begins or resumes the next epoch."""
    trainer.fit_loop._combined_loader = None  # noqa: SLF001  (the public option counts epochs)


def resume_after_batch(checkpoint: State, done: int) -> None:
    """Change a checkpoint from a batch's last hook so that Lightning resumes with the next batch.

    Lightning counts a batch as completed only after its hooks, and its versions treat an incomplete batch differently.

    Args:
        checkpoint: the loaded checkpoint, changed in place before Lightning restores its loops from it.
        done: the number of batches of the epoch for Lightning to count as done.
    """
    loop = checkpoint["loops"]["fit_loop"]
    progress = loop["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], done)
    progress["total"]["completed"] = progress["total"]["processed"]
    progress["is_last_batch"] = False
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
