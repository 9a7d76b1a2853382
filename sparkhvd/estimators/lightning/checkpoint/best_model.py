"""The best model by a user's ``ModelCheckpoint(monitor=...)``, also for runs that resume in another process.

Every process has its own folder, and Lightning discards its records of files in another folder. The state of the
run therefore contains the weights of the best model, and the state of ``ModelCheckpoint`` is moved to the new folder.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

import torch

from sparkhvd.estimators.torch.checkpoint.safe_state import content_of

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint

logger = logging.getLogger(__name__)

State = dict[str, Any]  # a state in a checkpoint, which only its owner can read

RUN_KEY = "sparkhvd"  # the key of the run callback's state in a checkpoint
_KEPT_OF_RUN = ("buffers", "masks")


class BestModel(TypedDict):
    """The best model so far.

    Attributes:
        callback: the key of the ``ModelCheckpoint`` that chose it.
        weights: its weights.
        run: its buffers that are not persistent, and its masks of pruned weights, see ``RunCallback.state_dict``.
    """

    callback: str
    weights: Mapping[str, torch.Tensor]
    run: State


def best_file(callbacks: Sequence[object]) -> Path | None:
    """Return the file of the best model; None to return the last model."""
    monitoring = _callbacks_with_best(callbacks)
    best = next(
        (Path(callback.best_model_path) for callback in monitoring if Path(callback.best_model_path).is_file()), None
    )
    if best is None and monitoring:
        path = monitoring[0].best_model_path
        logger.warning(
            "The best model by ModelCheckpoint(monitor=...), %s, no longer exists; the last model is returned.", path
        )
    return best


def pack_best_model(callbacks: Sequence[object]) -> BestModel | None:
    """Return the best model so far for ``unpack_best_model``; None if there is none."""
    for callback in _callbacks_with_best(callbacks):
        if Path(callback.best_model_path).is_file():
            content = content_of(Path(callback.best_model_path))
            run = run_state(content)
            kept = {name: run[name] for name in _KEPT_OF_RUN if name in run}
            return {"callback": callback.state_key, "weights": content["state_dict"], "run": kept}
    return None


def unpack_best_model(best: BestModel | None, callbacks: Sequence[Any], states: dict[str, State], writes: bool) -> None:
    """Move the ``states`` of callbacks to the folders of this process before Lightning loads them.

    Without the best model or its callback nothing changes: a score without its model would only keep worse models out.

    Args:
        best: the result of ``pack_best_model``; its file is written if it is missing.
        callbacks: callbacks that write checkpoints.
        states: states of all callbacks by key.
        writes: whether this rank writes the file.
    """
    if best is None or best["callback"] not in {callback.state_key for callback in callbacks}:
        return
    for callback in callbacks:
        state = states.get(callback.state_key)
        if state is not None and state.get("best_k_models") and state["dirpath"] != callback.dirpath:
            states[callback.state_key] = _with_folder(state, callback.dirpath)
    path = Path(states[best["callback"]]["best_model_path"])
    if writes and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": best["weights"], "callbacks": {RUN_KEY: best.get("run", {})}}, path)


def run_state(checkpoint: State) -> State:
    """Return the state of the run in a checkpoint; empty if the checkpoint holds only the weights."""
    state: State = checkpoint.get("callbacks", {}).get(RUN_KEY, {})
    return state


def choosing_callbacks(callbacks: Sequence[object]) -> list[ModelCheckpoint]:
    """Return the callbacks that choose the best model by a metric."""
    return [callback for callback in callbacks if _chooses(callback)]


def _chooses(callback: object) -> TypeGuard[ModelCheckpoint]:
    return getattr(callback, "monitor", None) is not None and hasattr(callback, "best_model_path")


def _callbacks_with_best(callbacks: Sequence[object]) -> list[ModelCheckpoint]:
    """Return the callbacks that have chosen a best model by a metric."""
    return [callback for callback in choosing_callbacks(callbacks) if callback.best_model_path]


def _with_folder(state: State, folder: str) -> State:
    """Return the state of a ``ModelCheckpoint`` with the paths of its files in ``folder``."""

    def new_path(path: str) -> str:
        inside = path and Path(path).is_relative_to(state["dirpath"])
        return str(Path(folder) / Path(path).relative_to(state["dirpath"])) if inside else path

    paths = {name: new_path(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    models = {new_path(path): score for path, score in state["best_k_models"].items()}
    return {**state, **paths, "dirpath": folder, "best_k_models": models}
