"""Checkpoints of a run in its Store: after every epoch one object, which replaces the one before.

A checkpoint is a line of JSON (epoch, seed, history) and then the trainer's state. It is published whole or not at
all, so a reader never sees half of one. Only the last is kept: the ones before are deleted after it has appeared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sparkhvd.errors import StoreError
from sparkhvd.estimators.history import EpochRecord, record_from_json
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

_FORMAT = "sparkhvd checkpoint"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands after an epoch.

    Attributes:
        epoch: the last epoch that is in it.
        seed: the run's seed.
        history: all epochs so far.
        state: what ``Trainer.state()`` gave.
    """

    epoch: int
    seed: int
    history: tuple[EpochRecord, ...]
    state: bytes


def save(store: Store, run_id: str, checkpoint: Checkpoint) -> None:
    """Publish a checkpoint and then delete the earlier ones of the run."""
    header = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "epoch": checkpoint.epoch,
        "seed": checkpoint.seed,
        "history": [record.to_json() for record in checkpoint.history],
    }
    path = layout.checkpoint_path(run_id, checkpoint.epoch)
    store.publish(path, json.dumps(header).encode() + b"\n" + checkpoint.state)
    for other in store.list(layout.checkpoints_folder(run_id)):
        epoch = layout.checkpoint_epoch(other)
        if epoch is not None and epoch < checkpoint.epoch:
            store.delete(other)


def latest(store: Store, run_id: str) -> str | None:
    """The path of a run's last checkpoint; None where there is none."""
    paths = [
        path for path in store.list(layout.checkpoints_folder(run_id)) if layout.checkpoint_epoch(path) is not None
    ]
    return max(paths, default=None)


def load(store: Store, path: str) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        StoreError: it cannot be read, or is not a checkpoint of this version.
    """
    with store.open(path, "rb") as file:
        header, _, state = file.read().partition(b"\n")
    try:
        return _from_json(json.loads(header), state)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{store.url}/{path} is not a checkpoint that this version reads ({error}). Choose another run_id, or "
            "delete the file to train from the start."
        ) from error


def _from_json(content: dict[str, Any], state: bytes) -> Checkpoint:
    if (content["format"], content["format_version"]) != (_FORMAT, _FORMAT_VERSION):
        raise ValueError(f"format {content['format']!r} version {content['format_version']!r}")
    history = tuple(record_from_json(record) for record in content["history"])
    return Checkpoint(int(content["epoch"]), int(content["seed"]), history, state)
