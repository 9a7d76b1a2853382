"""The state from which a fit resumes its run."""

from __future__ import annotations

from sparkhvd._util.counts import counted
from sparkhvd.errors import ParamError
from sparkhvd.estimators.runs.resume_check import ModelFacts, check_resumable
from sparkhvd.estimators.training import checkpoint
from sparkhvd.estimators.training.checkpoint import Checkpoint
from sparkhvd.store import Store


def last_checkpoint(store: Store, run_id: str, facts: ModelFacts) -> Checkpoint | None:
    """Load the last checkpoint of the run; None if it has none.

    Raises:
        ParamError: the checkpoint belongs to another model, or was taken within an epoch with another loss or metrics.
    """
    path = checkpoint.latest(store, run_id)
    if path is None:
        return None
    loaded = checkpoint.load(store, path)
    if loaded.model is not None:
        interrupted_epoch = None if loaded.within is None else loaded.epoch
        check_resumable(run_id, f"{store.url}/{path}", loaded.model, facts, interrupted_epoch)
    return loaded


def refuse_longer_run(run_id: str, epochs: int, last: Checkpoint | None) -> None:
    """Raise ``ParamError`` if ``resume="auto"`` found a run that was trained for more epochs than requested."""
    trained = 0 if last is None else last.epoch + 1
    if trained > epochs:
        raise ParamError(
            f"resume='auto' found run {run_id!r}, which was trained for {counted(trained, 'epoch')}, more than "
            f"epochs={epochs}. Set epochs={trained} to get its model, or pass run_id to train a new run."
        )


def refuse_other_order(run_id: str, seed: int | None, steps: int | None, last: Checkpoint | None) -> None:
    """Raise ``ParamError`` if a run was interrupted within an epoch that this fit's seed or steps do not continue."""
    if last is None or last.within is None:
        return
    if seed is not None and seed != last.seed:
        raise ParamError(
            f"Run {run_id!r} was interrupted within epoch {last.epoch + 1}, whose rows were shuffled with "
            f"random_seed={last.seed}. With random_seed={seed}, the rest of the epoch would have other rows. Set "
            f"random_seed={last.seed} or leave it out to resume, or choose another run_id to train from the start."
        )
    done = last.within.parts[0].step
    if steps is not None and done > steps:
        raise ParamError(
            f"Run {run_id!r} was interrupted in epoch {last.epoch + 1} after step {done}, more than "
            f"train_steps_per_epoch={steps}. Set train_steps_per_epoch={done} or more to resume, or choose another "
            "run_id to train from the start."
        )
