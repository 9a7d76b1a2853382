"""The training of one rank: the one function that every estimator runs remotely."""

from __future__ import annotations

import logging
import tempfile
import uuid
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal, cast

from sparkhvd.comm import objects, session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.config import given_rows
from sparkhvd.data.batches import BatchSource
from sparkhvd.data.direct import GivenRows, checked
from sparkhvd.data.manifest import Manifest, SplitName
from sparkhvd.data.petastorm_reader import PetastormSource
from sparkhvd.data.readers import ParquetSource
from sparkhvd.data.schema import DataSchema
from sparkhvd.data.selection import Selection
from sparkhvd.errors import DataError, ParamError, SparkHvdError
from sparkhvd.estimators import checkpoint, files
from sparkhvd.estimators.files import KeptFiles
from sparkhvd.estimators.history import EpochRecord, averaged
from sparkhvd.estimators.plugin import EpochReport, FrameworkPlugin, Trainer, TrainSpec
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

logger = logging.getLogger(__name__)

# Rows to try a model with before the training.
SAMPLE_ROWS = 2


ReaderName = Literal["native", "petastorm"]


@dataclass(frozen=True)
class StoredRows:
    """Rows in a Store, which need not be the one of the run, and what reads them."""

    store: Store
    manifest: Manifest
    reader: ReaderName = "native"


@dataclass(frozen=True)
class TrainJob:
    """What a rank needs to train.

    Attributes:
        plugin: ``module:name`` of the framework's plug-in.
        store: where the run is kept; None keeps nothing but the trained model, which comes back with the result.
        rows: where the rows are, or what was selected of those that the task was given.
        run_id: names the run's folder.
        payload: what ``FrameworkPlugin.pack`` gave.
        spec: how to train.
    """

    plugin: str
    store: Store | None
    rows: StoredRows | Selection
    run_id: str
    payload: files.Payload
    spec: TrainSpec


@dataclass(frozen=True)
class TrainResult:
    """What rank 0 gives back.

    Attributes:
        history: one record per epoch.
        files: the trained model.
        kept: the content of ``files`` where there is no Store.
        schema: the columns that it was trained on, with all shapes.
        shapes: the shape of one row of every output; empty where the driver knows them.
    """

    history: tuple[EpochRecord, ...]
    files: tuple[files.StoredFile, ...]
    kept: KeptFiles | None
    schema: DataSchema
    shapes: list[tuple[int, ...]]


@dataclass(frozen=True)
class Refused:
    """What every rank gives back when the rows cannot be trained on; the driver raises it."""

    error: SparkHvdError


@dataclass(frozen=True)
class Rows:
    """The rows of a job as one rank has them.

    Attributes:
        schema: the columns, with all shapes.
        train: the rows to train on.
        validation: the rows to validate with.
        shapes: see ``TrainResult``.
    """

    schema: DataSchema
    train: BatchSource
    validation: BatchSource | None
    shapes: list[tuple[int, ...]]


def find_plugin(name: str) -> FrameworkPlugin:
    """The plug-in at ``module:name``."""
    module, _, attribute = name.partition(":")
    return cast("FrameworkPlugin", getattr(import_module(module), attribute))


def train_worker(job: TrainJob) -> TrainResult | Refused | None:
    """Train as this process's rank; collective.

    Returns:
        On rank 0 the history and the files of the trained model, else None; on all ranks why the rows were refused.
    """
    session.init()
    communicator = session.current()
    payload = job.payload.read(job.store)
    try:
        rows = _rows(job, payload, communicator)
    except (DataError, ParamError) as error:
        if isinstance(job.rows, StoredRows):
            raise
        return Refused(error)  # it is the same on all ranks
    spec = replace(job.spec, schema=rows.schema)
    trainer = find_plugin(job.plugin).trainer(payload, spec, communicator.world)
    hooks = EpochHooks(job, communicator)
    if hooks.resumed is not None:
        trainer.restore(hooks.resumed.state)
    trainer.fit(rows.train, rows.validation, hooks)
    if communicator.world.rank != 0:
        return None
    with tempfile.TemporaryDirectory(prefix="sparkhvd-export-") as folder:
        trainer.export(Path(folder))
        written, kept = _brought_home(job, Path(folder))
    return TrainResult(tuple(hooks.history), written, kept, rows.schema, rows.shapes)


def _brought_home(job: TrainJob, folder: Path) -> tuple[tuple[files.StoredFile, ...], files.KeptFiles | None]:
    if job.store is None:
        return files.keep_folder(folder)
    # A folder of its own, because a continued run has one already and files are never replaced.
    target = f"{layout.model_folder(job.run_id)}/{uuid.uuid4().hex[:16]}"
    return files.write_folder(job.store, target, folder), None


class EpochHooks:
    """What happens around every epoch, whatever the framework: averages, the line, the checkpoint.

    Construction is collective: rank 0 looks for a checkpoint of the run, and all ranks continue from that one.
    """

    def __init__(self, job: TrainJob, communicator: Communicator) -> None:
        self._job = job
        self._communicator = communicator
        self.resumed = None if job.store is None else _resumed(job.store, job.run_id, communicator)
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
            if self._job.store is not None and self._job.store.save_runs:
                content = checkpoint.Checkpoint(record.epoch, self._job.spec.seed, tuple(self.history), trainer.state())
                checkpoint.save(self._job.store, self._job.run_id, content)
        return True


def _resumed(store: Store, run_id: str, communicator: Communicator) -> checkpoint.Checkpoint | None:
    found = checkpoint.latest(store, run_id) if communicator.world.rank == 0 else None
    path = objects.broadcast_object(communicator, found, 0, name="checkpoint to resume")
    return None if path is None else checkpoint.load(store, path)


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


@dataclass(frozen=True)
class _Part:
    """How one split is read."""

    split: SplitName
    batch_size: int
    shuffle: bool
    steps: int | None


def _parts(spec: TrainSpec) -> tuple[_Part, _Part]:
    return (
        _Part("train", spec.batch_size, spec.shuffle, spec.train_steps_per_epoch),
        _Part("validation", spec.val_batch_size, False, spec.validation_steps_per_epoch),
    )


def _rows(job: TrainJob, payload: bytes, communicator: Communicator) -> Rows:
    if isinstance(job.rows, Selection):
        return _given_rows(job, job.rows, payload, communicator)
    return _stored_rows(job.rows, job.spec, communicator.world)


def _stored_rows(stored: StoredRows, spec: TrainSpec, world: World) -> Rows:
    manifest = stored.manifest

    def source(part: _Part) -> BatchSource:
        if stored.reader == "petastorm":
            return PetastormSource(
                stored.store, manifest, part.split, world, part.batch_size, seed=spec.seed, shuffle=part.shuffle
            )
        return ParquetSource(
            stored.store,
            manifest,
            part.split,
            world,
            part.batch_size,
            seed=spec.seed,
            shuffle=part.shuffle,
            steps_per_epoch=part.steps,
            reading=spec.reading,
        )

    train, validation = _parts(spec)
    return Rows(manifest.schema, source(train), None if manifest.validation is None else source(validation), [])


def _given_rows(job: TrainJob, selection: Selection, payload: bytes, communicator: Communicator) -> Rows:
    world = communicator.world
    given = GivenRows(given_rows(), selection, world.rank)
    gathered = objects.allgather_object(communicator, given.facts(), name="facts of the rows")
    facts = [one for of_rank in gathered for one in of_rank]
    schema = checked(facts, selection, world.size)
    first = next(one.place[0] for one in facts if one.split == "train")
    tried: list[tuple[int, ...]] | ParamError | None = None
    if world.rank == first:
        try:
            tried = find_plugin(job.plugin).try_out(payload, schema, given.head(schema, SAMPLE_ROWS))
        except ParamError as error:
            tried = error
    shapes = objects.broadcast_object(communicator, tried, first, name="shapes of the outputs")
    if isinstance(shapes, ParamError):
        raise shapes

    def source(part: _Part) -> BatchSource:
        return given.source(
            part.split,
            schema,
            facts,
            world,
            part.batch_size,
            seed=job.spec.seed,
            shuffle=part.shuffle,
            steps_per_epoch=part.steps,
            reading=job.spec.reading,
        )

    train, validation = _parts(job.spec)
    return Rows(schema, source(train), None if selection.validation is None else source(validation), shapes or [])
