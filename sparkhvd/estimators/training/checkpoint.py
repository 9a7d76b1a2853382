"""Checkpoints of a run in its Store: one object per checkpoint.

A checkpoint is a line of JSON (position of the run, seed, history), followed by the states of all ranks, the states of
their metrics, and the trainer's state, which is the same on all ranks. It is published atomically, so a reader never
sees a partial checkpoint. Old checkpoints are deleted after the next one is published.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from sparkhvd.data.schema.manifest import Manifest
from sparkhvd.errors import StoreError
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.runs.resume_check import ModelFacts, facts_from_json
from sparkhvd.estimators.runs.run_lease import Fence, owned_checkpoints
from sparkhvd.estimators.training.logs.history import record_from_json
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

_FORMAT = "sparkhvd checkpoint"
_FORMAT_VERSION = 2


@dataclass(frozen=True)
class EpochPart:
    """A part of an epoch whose rows were divided in one way.

    Attributes:
        step: the steps of this part that are done.
        num_proc: the number of shards that the rows were divided into; each rank has one, unless the ranks of an
            elastic fit share a fixed number.
        batch_size: rows of a full batch of a shard.
    """

    step: int
    num_proc: int
    batch_size: int


@dataclass(frozen=True)
class EpochPosition(EpochPart):
    """The position of a run within an epoch: the current part, and the parts before it.

    Attributes:
        division: digest of the division of the rows into batches; a run can resume here only if it is unchanged.
        sums: the epoch's metrics so far: (sum over the rows of all ranks, rows) by name.
        rank_states: the state of each rank, such as the states of its random number generators.
        metrics: the state of each rank's metrics that are not in ``sums``; empty if there are none.
        division_proc: the number of ranks that the rows in the Store were divided for; 0 is ``num_proc``.
        earlier: the earlier parts of the epoch; each part began with the rows that remained after the part before.
        sizes: the numbers of ranks that have trained the epoch so far; empty in checkpoints of older versions.
        wants_end: whether a callback has requested the end of the training after this epoch.
    """

    division: str
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    rank_states: tuple[bytes, ...] = ()
    metrics: tuple[bytes, ...] = ()
    division_proc: int = 0
    earlier: tuple[EpochPart, ...] = ()
    sizes: tuple[int, ...] = ()
    wants_end: bool = False

    @property
    def parts(self) -> tuple[EpochPart, ...]:
        """All parts of the epoch up to this position."""
        return (*self.earlier, EpochPart(self.step, self.num_proc, self.batch_size))

    @property
    def steps_done(self) -> int:
        """The steps of the epoch in all of its parts."""
        return sum(part.step for part in self.parts)


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at the end of an epoch or within one.

    Attributes:
        epoch: the last epoch, complete or partial.
        seed: the run's seed.
        history: all complete epochs.
        state: the result of ``Trainer.state()``.
        within: the position in ``epoch``; None at its end.
        model: the facts that another model must match to resume from this checkpoint.
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
        """The epoch to resume with."""
        return self.epoch + 1 if self.within is None else self.epoch


def division_digest(manifest: Manifest, order: Sequence[object]) -> str:
    """Return a digest that identifies the division of a dataset's rows into batches.

    Args:
        manifest: the rows.
        order: JSON values that determine the order of the rows, besides seed, ranks and batch size.
    """
    content = [manifest.schema.names(), manifest.train.block_rows(), list(order)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def save(fence: Fence, checkpoint: Checkpoint, keep: int = 1, other_epochs: Collection[int] = ()) -> str:
    """Publish a checkpoint, then delete the run's earlier checkpoints beyond the limit; return the new path.

    Args:
        fence: the run, and the right to publish in it.
        checkpoint: the checkpoint to publish.
        keep: how many epoch ends to keep, including this one.
        other_epochs: more epochs whose end is kept.

    Raises:
        StoreError: writing to the Store failed, or another fit has taken the run over.
    """
    store, run_id, within = fence.store, fence.run_id, checkpoint.within
    path = publish(fence, checkpoint)
    fence.check()  # if another fit has taken over the run, it may resume from a checkpoint that is deleted below
    last_end = checkpoint.epoch if within is None else checkpoint.epoch - 1
    kept_epochs = {*other_epochs, *range(last_end - keep + 1, last_end + 1)}
    existing = store.list(layout.checkpoints_folder(run_id))
    owned_paths = set(owned_checkpoints(store, run_id, existing))
    # Such a state is outdated if rank 0 of an elastic fit was lost after it had saved the end of the run.
    final_paths = [path for path in existing if layout.final_epoch(path) is not None or layout.is_ended_path(path)]
    own_position = layout.checkpoint_position(path)
    for other in [*_checkpoints(existing), *final_paths]:
        position = layout.checkpoint_position(other)
        is_kept = (
            other in owned_paths and position is not None and position[1] == float("inf") and position[0] in kept_epochs
        )
        # An earlier rank 0 may have saved the same position before it was lost.
        is_kept = is_kept and position != own_position
        if other != path and not is_kept and layout.token_of(other) <= fence.token:
            store.delete(other)
    return path


def publish(fence: Fence, checkpoint: Checkpoint) -> str:
    """Publish a checkpoint and return its path.

    Raises:
        StoreError: writing to the Store failed, or another fit has taken the run over.
    """
    fence.check()
    step = None if checkpoint.within is None else checkpoint.within.steps_done
    path = layout.checkpoint_path(fence.run_id, checkpoint.epoch, step, fence.token)
    fence.store.publish(path, _content(checkpoint))
    return path


def save_final(fence: Fence, checkpoint: Checkpoint) -> None:
    """Publish the state that callbacks left behind at the end of the training; no fit resumes from it."""
    fence.check()
    run_id, token = fence.run_id, fence.token
    ended = layout.ended_path(run_id, token)
    path = ended if checkpoint.ended else layout.final_path(run_id, checkpoint.epoch, token)
    fence.store.publish(path, _content(checkpoint))


def epoch_end_path(store: Store, run_id: str, epoch: int) -> str:
    """Return the path of the checkpoint at the end of an epoch.

    Raises:
        StoreError: the checkpoint does not exist.
    """
    for path in _checkpoints(_paths(store, run_id)):
        if layout.checkpoint_position(path) == (epoch, float("inf")):
            return path
    path = layout.checkpoint_path(run_id, epoch)
    raise StoreError(
        f"{store.url}/{path}, the checkpoint of the best epoch of run {run_id!r}, no longer exists. Choose another "
        "run_id and train again."
    )


def kept_epochs(store: Store, run_id: str) -> frozenset[int]:
    """Return the epochs of a run with a checkpoint at their end."""
    positions = map(layout.checkpoint_position, _checkpoints(_paths(store, run_id)))
    return frozenset(position[0] for position in positions if position is not None and position[1] == float("inf"))


def final(store: Store, run_id: str, epoch: int) -> str | None:
    """Return the path of the state that callbacks left behind after this last epoch, or None if it is unchanged."""
    return next((path for path in _paths(store, run_id) if layout.final_epoch(path) == epoch), None)


def latest(store: Store, run_id: str) -> str | None:
    """Return the path of a run's last checkpoint, or None if it has none."""
    paths = _paths(store, run_id)
    if ends := [path for path in paths if layout.is_ended_path(path)]:
        return ends[-1]
    return max(_checkpoints(paths), key=layout.checkpoint_position, default=None)  # type: ignore[arg-type]  # never None here


def load(store: Store, path: str) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        StoreError: the file cannot be read, or is not a checkpoint of this version.
    """
    with store.open(path, "rb") as file:
        header, _, rest = file.read().partition(b"\n")
    try:
        return _from_json(json.loads(header), rest)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{store.url}/{path} is not a checkpoint that this version can read ({error}). Choose another run_id, or "
            "delete the file to train from the start."
        ) from error


def _paths(store: Store, run_id: str) -> list[str]:
    return owned_checkpoints(store, run_id, store.list(layout.checkpoints_folder(run_id)))


def _checkpoints(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if layout.checkpoint_position(path) is not None]


def _content(checkpoint: Checkpoint) -> bytes:
    within = checkpoint.within
    rank_states, metrics = ((), ()) if within is None else (within.rank_states, within.metrics)
    header: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "epoch": checkpoint.epoch,
        "seed": checkpoint.seed,
        "history": [record.to_json() for record in checkpoint.history],
        "model": None if checkpoint.model is None else checkpoint.model.to_json(),
        "ended": checkpoint.ended,
        "within": None,
        "rank_states": [len(state) for state in rank_states],
        "metrics": [len(state) for state in metrics],
    }
    if within is not None:
        names = ("step", "num_proc", "batch_size", "division", "sums", "division_proc", "sizes", "wants_end")
        earlier = [asdict(part) for part in within.earlier]
        header["within"] = {**{name: getattr(within, name) for name in names}, "earlier": earlier}
    return b"".join([json.dumps(header).encode(), b"\n", *rank_states, *metrics, checkpoint.state])


def _from_json(content: dict[str, Any], rest: bytes) -> Checkpoint:
    if (content["format"], content["format_version"]) != (_FORMAT, _FORMAT_VERSION):
        raise ValueError(f"format {content['format']!r} version {content['format_version']!r}")
    history = tuple(record_from_json(record) for record in content["history"])
    state_sizes = [*content["rank_states"], *content.get("metrics", ())]
    ends = list(accumulate(state_sizes))
    states = [rest[end - size : end] for size, end in zip(state_sizes, ends, strict=True)]
    ranks = len(content["rank_states"])
    within = None
    if (position := content["within"]) is not None:
        sums = {name: (float(total), float(rows)) for name, (total, rows) in position["sums"].items()}
        earlier = tuple(EpochPart(**part) for part in position.get("earlier", ()))
        sizes = tuple(position.get("sizes", ()))
        within = EpochPosition(
            **{**position, "sums": sums, "earlier": earlier, "sizes": sizes},
            rank_states=tuple(states[:ranks]),
            metrics=tuple(states[ranks:]),
        )
    facts = content.get("model")
    return Checkpoint(
        epoch=int(content["epoch"]),
        seed=int(content["seed"]),
        history=history,
        state=rest[sum(state_sizes) :],
        within=within,
        model=None if facts is None else facts_from_json(facts),
        ended=bool(content.get("ended", False)),
    )
