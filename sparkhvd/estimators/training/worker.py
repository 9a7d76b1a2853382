"""The training of one rank: the one function that every estimator runs remotely."""

from __future__ import annotations

import multiprocessing
import tempfile
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Literal, cast

import cloudpickle

from sparkhvd.comm import objects, session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.config import given_rows, scratch_folder
from sparkhvd.data.external.petastorm_reader import PetastormSource
from sparkhvd.data.loaders.transformation import transformed
from sparkhvd.data.loaders.user_loaders import DataContext, DataModule, LoaderSource
from sparkhvd.data.prepare.direct_rows import GivenRows, checked
from sparkhvd.data.prepare.stats import label_ranges, with_extreme_labels
from sparkhvd.data.read.batches import Arrays, BatchSource, first_row
from sparkhvd.data.read.readers import ParquetSource, Reading, RowSource
from sparkhvd.data.read.resume import RestOfEpoch
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import LabelRanges, Manifest, SplitName
from sparkhvd.data.schema.selection import Selection
from sparkhvd.errors import DataError, ParamError, SparkHvdError
from sparkhvd.estimators.plugin import FrameworkPlugin, TrainSpec
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.runs.run_lease import Holder, claim_fence
from sparkhvd.estimators.training import checkpoint, job_files
from sparkhvd.estimators.training.hooks import RunHooks
from sparkhvd.estimators.training.job_files import InMemoryFiles
from sparkhvd.estimators.training.progress import ReportingSource
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

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
        start_method: of multiprocessing, in the ranks.
        transformation: a pickled function that makes other columns of those that are read; empty for none.
        data_module: a pickled ``DataModule`` class that gives the batches; empty for none.
        progress: whether somebody watches a bar on the driver.
        holder: the fit that holds the run; None where the Store keeps no runs.
    """

    plugin: str
    store: Store | None
    rows: StoredRows | Selection
    run_id: str
    payload: job_files.Payload
    spec: TrainSpec
    start_method: str | None = None
    transformation: bytes = b""
    data_module: bytes = b""
    progress: bool = False
    holder: Holder | None = None


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
    files: tuple[job_files.StoredFile, ...]
    kept: InMemoryFiles | None
    schema: DataSchema
    shapes: list[tuple[int, ...]]


@dataclass(frozen=True)
class RejectedRows:
    """What every rank gives back when the rows cannot be trained on; the driver raises it."""

    error: SparkHvdError


@dataclass(frozen=True)
class RankRows:
    """The rows of a job as one rank has them.

    Attributes:
        schema: the columns, with all shapes.
        train: the rows to train on.
        validation: the rows to validate with.
        shapes: see ``TrainResult``.
        labels: see ``TrainSpec``.
        division: see ``checkpoint.division_digest``; empty where rows were dealt out before.
        opened: to be closed after the training.
        sample: a real row, where only ranks have the rows.
    """

    schema: DataSchema
    train: BatchSource
    validation: BatchSource | None
    shapes: list[tuple[int, ...]]
    labels: LabelRanges
    division: str = ""
    opened: ExitStack = field(default_factory=ExitStack)
    sample: Arrays | None = None


def find_plugin(name: str) -> FrameworkPlugin:
    """The plug-in at ``module:name``."""
    module, _, attribute = name.partition(":")
    return cast("FrameworkPlugin", getattr(import_module(module), attribute))


def train_worker(job: TrainJob) -> TrainResult | RejectedRows | None:
    """Train as this process's rank; collective.

    Returns:
        On rank 0 the history and the files of the trained model, else None; on all ranks why the rows were refused.
    """
    if job.start_method is not None:
        multiprocessing.set_start_method(job.start_method, force=True)
    session.init()
    communicator = session.current()
    job = _with_transformation(job)
    payload = job.payload.read(job.store)
    try:
        rows = _rows(job, payload, communicator)
    except (DataError, ParamError) as error:
        if isinstance(job.rows, StoredRows):
            raise
        return RejectedRows(error)  # it is the same on all ranks
    if job.spec.normalization.pairs and isinstance(rows.train, RowSource) and rows.train.plan.has_single_row():
        return RejectedRows(job.spec.normalization.refuse_single_rows(job.spec.batch_size, communicator.world.size))
    labels = () if job.transformation else rows.labels
    spec = replace(job.spec, schema=rows.schema, labels=labels, sample=rows.sample or job.spec.sample)
    trainer = find_plugin(job.plugin).trainer(payload, spec, communicator.world)
    fence = None
    if job.store is not None and job.holder is not None and communicator.world.rank == 0:
        fence = claim_fence(job.store, job.run_id, job.holder)
    token = 0 if fence is None else fence.token
    hooks = RunHooks(job.store, job.run_id, spec, communicator, rows.division, token)
    if hooks.resumed is not None:
        trainer.restore(hooks.resumed.state)
    train = _continued(job, rows, hooks, communicator.world)
    shown = job.progress and communicator.world.rank == 0
    with rows.opened:
        trainer.fit(ReportingSource(train, spec.epochs) if shown else train, rows.validation, hooks)
    if communicator.world.rank != 0:
        return None
    hooks.restore_best(trainer)
    if fence is not None:
        fence.check()
    with tempfile.TemporaryDirectory(prefix="sparkhvd-export-", dir=scratch_folder()) as folder:
        trainer.export(Path(folder))
        written, kept = _brought_home(job, Path(folder))
    return TrainResult(tuple(hooks.history), written, kept, rows.schema, rows.shapes)


def _with_transformation(job: TrainJob) -> TrainJob:
    """The job with its function in the readers' hands; pickled, it could not be part of the job's own pickle."""
    if not job.transformation:
        return job
    function = cloudpickle.loads(job.transformation)
    reading = replace(job.spec.reading, transformation=function)
    val_reading = replace(job.spec.val_reading, transformation=function)
    return replace(job, spec=replace(job.spec, reading=reading, val_reading=val_reading))


def _brought_home(
    job: TrainJob, folder: Path
) -> tuple[tuple[job_files.StoredFile, ...], job_files.InMemoryFiles | None]:
    if job.store is None:
        return job_files.read_folder(folder)
    # A folder of its own, because a continued run has one already and files are never replaced.
    target = f"{layout.model_folder(job.run_id)}/{uuid.uuid4().hex[:16]}"
    return job_files.write_folder(job.store, target, folder), None


@dataclass(frozen=True)
class _Part:
    """How one split is read."""

    split: SplitName
    batch_size: int
    shuffle: bool
    steps: int | None
    reading: Reading
    pair_last_row: bool = False


def _parts(spec: TrainSpec) -> tuple[_Part, _Part]:
    # What a transformation makes of the columns is the schema that the model is trained on.
    reading, val_reading = replace(spec.reading, made=spec.schema), replace(spec.val_reading, made=spec.schema)
    return (
        _Part(
            "train", spec.batch_size, spec.shuffle, spec.train_steps_per_epoch, reading, bool(spec.normalization.pairs)
        ),
        _Part("validation", spec.val_batch_size, False, spec.validation_steps_per_epoch, val_reading),
    )


def _rows(job: TrainJob, payload: bytes, communicator: Communicator) -> RankRows:
    if isinstance(job.rows, Selection):
        return _given_rows(job, job.rows, payload, communicator)
    if job.data_module:
        return _module_rows(job.rows, job.spec, cloudpickle.loads(job.data_module), communicator)
    return _stored_rows(job.rows, job.spec, communicator.world)


def _module_rows(stored: StoredRows, spec: TrainSpec, kind: type[DataModule], communicator: Communicator) -> RankRows:
    manifest, world = stored.manifest, communicator.world
    held_out = () if manifest.validation is None else manifest.validation.files
    context = DataContext(
        store=stored.store,
        train_files=tuple(f"{manifest.folder}/{file.path}" for file in manifest.train.files),
        val_files=tuple(f"{manifest.folder}/{file.path}" for file in held_out),
        schema=manifest.schema,
        rank=world.rank,
        size=world.size,
        batch_size=spec.batch_size,
        val_batch_size=spec.val_batch_size,
        shuffle=spec.shuffle,
        seed=spec.seed,
    )
    opened = ExitStack()
    module = opened.enter_context(kind(context))
    train = LoaderSource(module.train_data(), manifest.schema, "train", communicator)
    loader = module.val_data() if held_out else None
    validation = None if loader is None else LoaderSource(loader, manifest.schema, "validation", communicator)
    return RankRows(
        spec.schema,
        train,
        validation,
        [],
        (),
        checkpoint.division_digest(manifest, ("data module", spec.shuffle)),
        opened,
    )


def _stored_rows(stored: StoredRows, spec: TrainSpec, world: World) -> RankRows:
    manifest = stored.manifest
    train, held_out = _parts(spec)
    validation = None if manifest.validation is None else _stored_part(stored, held_out, spec.seed, world)
    source = _stored_part(stored, train, spec.seed, world)
    # The driver has found out what a transformation makes of the columns.
    division = checkpoint.division_digest(manifest, _order(source, spec))
    return RankRows(spec.schema, source, validation, [], manifest.labels, division)


def _order(source: BatchSource, spec: TrainSpec) -> tuple[object, ...]:
    """What decides which rows come when, see ``checkpoint.division_digest``."""
    if not isinstance(source, ParquetSource):
        return ("petastorm", spec.shuffle)
    return ("native", *source.plan.order())


def _stored_part(stored: StoredRows, part: _Part, seed: int, world: World) -> BatchSource:
    store, manifest = stored.store, stored.manifest
    if stored.reader == "petastorm":
        return PetastormSource(store, manifest, part.split, world, part.batch_size, seed=seed, shuffle=part.shuffle)
    return ParquetSource(
        store,
        manifest,
        part.split,
        world,
        part.batch_size,
        seed=seed,
        shuffle=part.shuffle,
        steps_per_epoch=part.steps,
        reading=part.reading,
        pair_last_row=part.pair_last_row,
    )


def _continued(job: TrainJob, rows: RankRows, hooks: RunHooks, world: World) -> BatchSource:
    """The training rows; where the run was interrupted within an epoch by other ranks, first the rest of that one.

    Raises:
        DataError: the rows are not those that the interrupted run had.
    """
    within, train = hooks.within, rows.train
    if within is None or hooks.resumed is None:
        return train
    if within.division != rows.division or not isinstance(job.rows, StoredRows):
        raise DataError(
            f"Run {job.run_id!r} was interrupted in epoch {hooks.resumed.epoch + 1} after step {within.step}, on rows "
            "that were divided in another way than those of now, so the next row is not known. Fit on the same rows "
            "with the same random_seed, shuffle, reader, inmemory_cache_all and local_cache, or choose another run_id "
            "to train anew."
        )
    if (within.num_proc, within.batch_size) == (world.size, job.spec.batch_size):
        return train
    if not isinstance(train, ParquetSource):
        raise DataError(
            f"Run {job.run_id!r} was interrupted with {within.num_proc} ranks and batch_size={within.batch_size}; "
            "petastorm's reader and data modules go on with the same numbers only. Take these, or train anew."
        )
    stored, seed, part = job.rows, job.spec.seed, replace(_parts(job.spec)[0], batch_size=within.batch_size)

    def old(rank: int) -> ParquetSource:
        return cast("ParquetSource", _stored_part(stored, part, seed, World(rank=rank, size=within.num_proc)))

    rest = RestOfEpoch(train, hooks.resumed.epoch, within.step, old, old(0).plan, world)
    hooks.repartition_first_epoch(rest.steps_left())
    return rest


def _given_rows(job: TrainJob, selection: Selection, payload: bytes, communicator: Communicator) -> RankRows:
    world = communicator.world
    given = GivenRows(given_rows(), selection, world.rank)
    gathered = objects.allgather_object(communicator, given.facts(), name="facts of the rows")
    facts = [one for of_rank in gathered for one in of_rank]
    schema = checked(facts, selection, world.size)
    first = next(one.place[0] for one in facts if one.split == "train")
    ranges = label_ranges(schema, facts)
    found = _tried(job, payload, schema, given, ranges) if world.rank == first else None
    tried = objects.broadcast_object(communicator, found, first, name="shapes of the outputs")
    if isinstance(tried, SparkHvdError):
        raise tried
    trained_on, shapes, sample = cast("tuple[DataSchema, list[tuple[int, ...]], Arrays]", tried)

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
            reading=part.reading,
            pair_last_row=part.pair_last_row,
        )

    train, validation = _parts(replace(job.spec, schema=trained_on))
    held_out = None if selection.validation is None else source(validation)
    return RankRows(trained_on, source(train), held_out, shapes, ranges, sample=sample)


def _tried(
    job: TrainJob, payload: bytes, schema: DataSchema, given: GivenRows, ranges: LabelRanges
) -> tuple[DataSchema, list[tuple[int, ...]], Arrays] | SparkHvdError:
    """Return the columns that the model gets, the shapes of its outputs and a row; or why it takes no such rows."""
    rows, function = given.head(schema, SAMPLE_ROWS), job.spec.reading.transformation
    try:
        if function is not None:
            schema, rows = transformed(schema, function, rows)
        else:
            rows = with_extreme_labels(rows, ranges)
        return schema, find_plugin(job.plugin).try_out(payload, schema, rows), first_row(rows)
    except (DataError, ParamError) as error:
        return error
