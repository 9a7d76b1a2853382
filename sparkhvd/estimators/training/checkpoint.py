"""Checkpoints of a run in its Store: one object for each state that is kept.

A checkpoint is a line of JSON (where the run stands, seed, history), then what each rank has of its own, and then the
trainer's state, which is the same on all ranks. It is published whole or not at all, so a reader never sees half of
one. What is not kept any more is deleted after the next one has appeared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkhvd.data.schema.manifest import Manifest
from sparkhvd.errors import StoreError
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.runs.resume_check import ModelFacts, facts_from_json
from sparkhvd.estimators.runs.run_lease import Fence, owned_checkpoints
from sparkhvd.estimators.training.history import record_from_json
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

_FORMAT = "sparkhvd checkpoint"
_FORMAT_VERSION = 2


@dataclass(frozen=True)
class EpochPosition:
    """Where a run stands within an epoch.

    Attributes:
        step: batches of every rank that have been trained on in the epoch.
        num_proc: how many ranks there were.
        batch_size: rows of a full batch.
        division: tells divisions of the rows into batches apart; the next batch is known only with the same one.
        sums: the epoch's metrics so far: (sum over the rows of all ranks, rows) by name.
        rank_states: what each rank has of its own, such as the state of its random numbers.
    """

    step: int
    num_proc: int
    batch_size: int
    division: str
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    rank_states: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """Where a run stands.

    Attributes:
        epoch: the last epoch that is in it, wholly or partly.
        seed: the run's seed.
        history: all epochs that have been completed.
        state: what ``Trainer.state()`` gave.
        within: how far it is in ``epoch``; None at its end.
        model: what a model must have in common with this one to go on from here.
        ended: whether a callback has ended the run.
    """

    epoch: int
    seed: int
    history: tuple[EpochRecord, ...]
    state: bytes = field(repr=False)
    within: EpochPosition | None = None
    model: ModelFacts | None = None
    ended: bool = False

    @property
    def first_epoch(self) -> int:
        """The epoch to go on with."""
        return self.epoch + 1 if self.within is None else self.epoch


def division_digest(manifest: Manifest, order: Sequence[object]) -> str:
    """What tells a division of a dataset's rows into batches from others.

    Args:
        manifest: the rows.
        order: what decides, besides seed, ranks and batch size, which of them come when; JSON knows it.
    """
    content = [manifest.schema.names(), manifest.train.block_rows(), list(order)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def save(fence: Fence, checkpoint: Checkpoint, keep: int = 1, also: Collection[int] = ()) -> None:
    """Publish a checkpoint and then delete the earlier ones of the run, but those to keep.

    Args:
        fence: the run, and the right to publish in it.
        checkpoint: what.
        keep: how many of the last epochs' ends stay, this one included.
        also: epochs whose ends stay whatever comes later.

    Raises:
        StoreError: the Store cannot be written, or another fit has taken the run over.
    """
    store, run_id = fence.store, fence.run_id
    fence.check()
    within = checkpoint.within
    path = layout.checkpoint_path(run_id, checkpoint.epoch, None if within is None else within.step, fence.token)
    store.publish(path, _content(checkpoint))
    fence.check()  # what is deleted now may be another's to go on from
    ended = checkpoint.epoch if within is None else checkpoint.epoch - 1
    wanted = {*also, *range(ended - keep + 1, ended + 1)}
    there = store.list(layout.checkpoints_folder(run_id))
    ours = set(owned_checkpoints(store, run_id, there))
    for other in _checkpoints(there):
        place = layout.checkpoint_position(other)
        is_wanted = other in ours and place is not None and place[1] == float("inf") and place[0] in wanted
        if other != path and not is_wanted and layout.token_of(other) <= fence.token:
            store.delete(other)


def save_final(fence: Fence, checkpoint: Checkpoint) -> None:
    """Publish what a run has ended with, from which nothing is trained any more."""
    fence.check()
    fence.store.publish(layout.ended_path(fence.run_id, fence.token), _content(checkpoint))


def epoch_end_path(store: Store, run_id: str, epoch: int) -> str:
    """The path of the checkpoint at the end of an epoch.

    Raises:
        StoreError: it is not kept.
    """
    for path in _checkpoints(_paths(store, run_id)):
        if layout.checkpoint_position(path) == (epoch, float("inf")):
            return path
    path = layout.checkpoint_path(run_id, epoch)
    raise StoreError(f"{store.url}/{path}, the best epoch of run {run_id!r}, is not there any more. Train anew.")


def kept_epochs(store: Store, run_id: str) -> frozenset[int]:
    """The epochs of a run whose ends are kept."""
    places = map(layout.checkpoint_position, _checkpoints(_paths(store, run_id)))
    return frozenset(place[0] for place in places if place is not None and place[1] == float("inf"))


def latest(store: Store, run_id: str) -> str | None:
    """The path of a run's last checkpoint; None where there is none."""
    found = _paths(store, run_id)
    if ends := [path for path in found if layout.is_end(path)]:
        return ends[-1]
    return max(_checkpoints(found), key=layout.checkpoint_position, default=None)  # type: ignore[arg-type]  # none is None


def load(store: Store, path: str) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        StoreError: it cannot be read, or is not a checkpoint of this version.
    """
    with store.open(path, "rb") as file:
        header, _, rest = file.read().partition(b"\n")
    try:
        return _from_json(json.loads(header), rest)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{store.url}/{path} is not a checkpoint that this version reads ({error}). Choose another run_id, or "
            "delete the file to train from the start."
        ) from error


def _paths(store: Store, run_id: str) -> list[str]:
    return owned_checkpoints(store, run_id, store.list(layout.checkpoints_folder(run_id)))


def _checkpoints(found: Sequence[str]) -> list[str]:
    return [path for path in found if layout.checkpoint_position(path) is not None]


def _content(checkpoint: Checkpoint) -> bytes:
    within = checkpoint.within
    own = () if within is None else within.rank_states
    header: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "epoch": checkpoint.epoch,
        "seed": checkpoint.seed,
        "history": [record.to_json() for record in checkpoint.history],
        "model": None if checkpoint.model is None else checkpoint.model.to_json(),
        "ended": checkpoint.ended,
        "within": None,
        "rank_states": [len(state) for state in own],
    }
    if within is not None:
        names = ("step", "num_proc", "batch_size", "division", "sums")
        header["within"] = {name: getattr(within, name) for name in names}
    return b"".join([json.dumps(header).encode(), b"\n", *own, checkpoint.state])


def _from_json(content: dict[str, Any], rest: bytes) -> Checkpoint:
    if (content["format"], content["format_version"]) != (_FORMAT, _FORMAT_VERSION):
        raise ValueError(f"format {content['format']!r} version {content['format_version']!r}")
    history = tuple(record_from_json(record) for record in content["history"])
    own, at = [], 0
    for size in content["rank_states"]:
        own.append(rest[at : at + size])
        at += size
    within = None
    if (found := content["within"]) is not None:
        sums = {name: (float(total), float(rows)) for name, (total, rows) in found["sums"].items()}
        within = EpochPosition(**{**found, "sums": sums, "rank_states": tuple(own)})
    known = content.get("model")
    model = None if known is None else facts_from_json(known)
    stands = (int(content["epoch"]), int(content["seed"]), history)
    return Checkpoint(*stands, rest[at:], within, model, bool(content.get("ended", False)))
