"""The best model by a user's ``ModelCheckpoint(monitor=...)``, also for runs that resume in another process.

Every process has its own folder, and Lightning discards what it knows about files in another folder. The state of the
run therefore contains the weights of the best model, and the state of ``ModelCheckpoint`` is moved to the new folder.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sparkhvd.estimators.torch.safe_state import weights_of

logger = logging.getLogger(__name__)


def best_file(callbacks: Sequence[Any]) -> Path | None:
    """Return the file of the best model; None to return the last model."""
    monitoring = _monitoring(callbacks)
    found = next((Path(each.best_model_path) for each in monitoring if Path(each.best_model_path).is_file()), None)
    if found is None and monitoring:
        path = monitoring[0].best_model_path
        logger.warning(
            "The best model by ModelCheckpoint(monitor=...), %s, no longer exists; the last model is returned.", path
        )
    return found


def packed(callbacks: Sequence[Any]) -> dict[str, Any] | None:
    """Return the best model so far for ``unpack``; None if there is none."""
    for each in _monitoring(callbacks):
        if Path(each.best_model_path).is_file():
            return {"callback": each.state_key, "weights": weights_of(Path(each.best_model_path))}
    return None


def unpack(best: dict[str, Any] | None, callbacks: Sequence[Any], states: dict[str, Any], writes: bool) -> None:
    """Move the ``states`` of callbacks to the folders of this process before Lightning loads them.

    Without the best model or its callback nothing changes: a score without its model would only keep worse models out.

    Args:
        best: the result of ``packed``; its file is written if it is missing.
        callbacks: callbacks that write checkpoints.
        states: states of all callbacks by key.
        writes: whether this rank writes the file.
    """
    if best is None or best["callback"] not in {each.state_key for each in callbacks}:
        return
    for each in callbacks:
        state = states.get(each.state_key)
        if state is not None and state.get("best_k_models") and state["dirpath"] != each.dirpath:
            states[each.state_key] = _moved(state, each.dirpath)
    path = Path(states[best["callback"]]["best_model_path"])
    if writes and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": best["weights"]}, path)


def choosing(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks that choose the best model by a metric."""
    monitoring = [each for each in callbacks if getattr(each, "monitor", None) is not None]
    return [each for each in monitoring if hasattr(each, "best_model_path")]


def _monitoring(callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks that have chosen a best model by a metric."""
    return [each for each in choosing(callbacks) if each.best_model_path]


def _moved(state: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the state of a ``ModelCheckpoint`` with its files in ``folder``."""

    def place(path: str) -> str:
        inside = path and Path(path).is_relative_to(state["dirpath"])
        return str(Path(folder) / Path(path).relative_to(state["dirpath"])) if inside else path

    paths = {name: place(state[name]) for name in ("best_model_path", "kth_best_model_path", "last_model_path")}
    models = {place(path): score for path, score in state["best_k_models"].items()}
    return {**state, **paths, "dirpath": folder, "best_k_models": models}
