"""The training of one rank: the one function that every estimator runs remotely."""

from __future__ import annotations

import logging
import tempfile
import uuid
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from sparkhvd.comm import objects, session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.data.manifest import Manifest, SplitName
from sparkhvd.data.readers import ParquetSource
from sparkhvd.estimators import checkpoint, files
from sparkhvd.estimators.history import EpochRecord, averaged
from sparkhvd.estimators.plugin import EpochReport, FrameworkPlugin, Trainer, TrainSpec
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainJob:
    """What a rank needs to train.

    Attributes:
        plugin: ``module:name`` of the framework's plug-in.
        store: where the run is kept.
        rows: the Store of the rows.
        manifest: what the rows consist of.
        run_id: names the run's folder.
        payload: what ``FrameworkPlugin.pack`` gave.
        spec: how to train.
    """

    plugin: str
    store: Store
    rows: Store
    manifest: Manifest
    run_id: str
    payload: files.Payload
    spec: TrainSpec


@dataclass(frozen=True)
class TrainResult:
    """What rank 0 gives back."""

    history: tuple[EpochRecord, ...]
    files: tuple[files.StoredFile, ...]


def find_plugin(name: str) -> FrameworkPlugin:
    """The plug-in at ``module:name``."""
    module, _, attribute = name.partition(":")
    return cast("FrameworkPlugin", getattr(import_module(module), attribute))


def train_worker(job: TrainJob) -> TrainResult | None:
    """Train as this process's rank; collective.

    Returns:
        On rank 0 the history and the files of the trained model, else None.
    """
    session.init()
    communicator = session.current()
    trainer = find_plugin(job.plugin).trainer(job.payload.read(job.store), job.spec, communicator.world)
    hooks = EpochHooks(job, communicator)
    if hooks.resumed is not None:
        trainer.restore(hooks.resumed.state)
    train = _source(job, "train", communicator)
    validation = _source(job, "validation", communicator) if job.manifest.validation is not None else None
    trainer.fit(train, validation, hooks)
    if communicator.world.rank != 0:
        return None
    with tempfile.TemporaryDirectory(prefix="sparkhvd-export-") as folder:
        trainer.export(Path(folder))
        # A folder of its own, because a continued run has one already and files are never replaced.
        target = f"{layout.model_folder(job.run_id)}/{uuid.uuid4().hex[:16]}"
        return TrainResult(tuple(hooks.history), files.write_folder(job.store, target, Path(folder)))


class EpochHooks:
    """What happens around every epoch, whatever the framework: averages, the line, the checkpoint.

    Construction is collective: rank 0 looks for a checkpoint of the run, and all ranks continue from that one.
    """

    def __init__(self, job: TrainJob, communicator: Communicator) -> None:
        self._job = job
        self._communicator = communicator
        found = checkpoint.latest(job.store, job.run_id) if communicator.world.rank == 0 else None
        path = objects.broadcast_object(communicator, found, 0, name="checkpoint to resume")
        self.resumed = None if path is None else checkpoint.load(job.store, path)
        self.history: list[EpochRecord] = [] if self.resumed is None else list(self.resumed.history)
        if self.resumed is not None and communicator.world.rank == 0:
            _say_where_it_continues(job, self.first_epoch)

    @property
    def first_epoch(self) -> int:
        return 0 if self.resumed is None else self.resumed.epoch + 1

    def on_epoch_end(self, report: EpochReport, trainer: Trainer) -> bool:
        record = averaged(report, self._communicator)
        self.history.append(record)
        if self._communicator.world.rank == 0:
            logger.info("%s", record.line(self._job.spec.epochs))
            content = checkpoint.Checkpoint(record.epoch, self._job.spec.seed, tuple(self.history), trainer.state())
            checkpoint.save(self._job.store, self._job.run_id, content)
        return True


def _say_where_it_continues(job: TrainJob, epochs_done: int) -> None:
    if epochs_done < job.spec.epochs:
        logger.info("run %s continues after epoch %d", job.run_id, epochs_done)
    else:
        logger.warning(
            "Run %s has been trained for %d epochs already and epochs=%d, so nothing is left to train; its model is "
            "returned. Raise epochs, or choose another run_id to train anew.",
            job.run_id,
            epochs_done,
            job.spec.epochs,
        )


def _source(job: TrainJob, split: SplitName, communicator: Communicator) -> ParquetSource:
    training = split == "train"
    spec = job.spec
    return ParquetSource(
        job.rows,
        job.manifest,
        split,
        communicator.world,
        spec.batch_size if training else spec.val_batch_size,
        seed=spec.seed,
        shuffle=spec.shuffle and training,
        steps_per_epoch=spec.train_steps_per_epoch if training else spec.validation_steps_per_epoch,
    )
