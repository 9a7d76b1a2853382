"""The function that every estimator runs on each rank."""

from __future__ import annotations

import multiprocessing
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

import cloudpickle

from sparkhvd._util.counts import counted
from sparkhvd._util.framework_imports import keep_triton_from_tensorflow
from sparkhvd.comm import objects, session
from sparkhvd.comm.communicator import Communicator
from sparkhvd.comm.elastic import loop as elastic
from sparkhvd.config import given_rows, scratch_folder
from sparkhvd.data.external.petastorm_reader import PetastormSource
from sparkhvd.data.loaders.transformation import transformed
from sparkhvd.data.loaders.user_loaders import DataContext, DataModule, LoaderSource
from sparkhvd.data.prepare.direct_rows import TaskRows, checked
from sparkhvd.data.prepare.stats import label_ranges, with_extreme_labels
from sparkhvd.data.read.batches import Arrays, BatchSource, first_row
from sparkhvd.data.read.plan import Plan
from sparkhvd.data.read.readers import ParquetSource, ReadOptions, RowSource
from sparkhvd.data.read.regroup import RegroupedSource, Shard
from sparkhvd.data.read.resume import EpochRemainder
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import LabelRanges, Manifest, SplitName
from sparkhvd.data.schema.selection import Selection
from sparkhvd.errors import DataError, ParamError, SparkHvdError
from sparkhvd.estimators.plugin import FrameworkPlugin, TrainSpec
from sparkhvd.estimators.reports import EpochRecord
from sparkhvd.estimators.runs.run_lease import Holder, claim_fence
from sparkhvd.estimators.training import checkpoint, job_files
from sparkhvd.estimators.training.checkpoint import EpochPart
from sparkhvd.estimators.training.commits import Commits
from sparkhvd.estimators.training.epoch_callback import CallbackAddress, CallbackClient
from sparkhvd.estimators.training.hooks import RunHooks
from sparkhvd.estimators.training.job_files import InMemoryFiles
from sparkhvd.estimators.training.logs.progress import ReportingSource
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store
from sparkhvd.world import World

# The number of rows on which a model is tried before the training.
SAMPLE_ROWS = 2


ReaderName = Literal["native", "petastorm"]


@dataclass(frozen=True)
class StoredRows:
    """Rows in a Store, which may differ from the run's, and the reader for them."""

    store: Store
    manifest: Manifest
    reader: ReaderName = "native"


@dataclass(frozen=True)
class TrainJob:
    """Everything that a rank needs to train.

    Attributes:
        plugin: ``module:name`` of the framework's plug-in.
        store: the Store of the run; None keeps only the trained model, which is returned with the result.
        rows: the rows in a Store, or the columns selected from the rows that the Spark task received.
        run_id: the id of the run, which names its folder.
        payload: the result of ``FrameworkPlugin.pack``.
        spec: how to train.
        start_method: the start method of multiprocessing in the ranks.
        transformation: a pickled function that transforms the columns that are read; empty for none.
        any_columns: whether the transformation may omit columns and return additional ones.
        data_module: a pickled ``DataModule`` class that provides the batches; empty for none.
        progress: whether the driver shows a progress bar.
        holder: the fit that holds the run; None if the Store keeps no runs.
        division_proc: the number of ranks that the rows in the Store were divided for; 0 is the current number.
        callback: the address at which rank 0 reaches ``epoch_callback`` on the driver; None without a callback.
    """

    plugin: str
    store: Store | None
    rows: StoredRows | Selection
    run_id: str
    payload: job_files.Payload
    spec: TrainSpec
    start_method: str | None = None
    transformation: bytes = b""
    any_columns: bool = False
    data_module: bytes = b""
    progress: bool = False
    holder: Holder | None = None
    division_proc: int = 0
    callback: CallbackAddress | None = None


@dataclass(frozen=True)
class TrainResult:
    """The result of the training, returned by rank 0.

    Attributes:
        history: one record per epoch.
        files: the files of the trained model.
        kept: the content of ``files`` if there is no Store.
        schema: the columns that the model was trained on, with all shapes.
        shapes: the shape of one row of every output; empty if the driver knows them.
    """

    history: tuple[EpochRecord, ...]
    files: tuple[job_files.StoredFile, ...]
    kept: InMemoryFiles | None
    schema: DataSchema
    shapes: list[tuple[int, ...]]


@dataclass(frozen=True)
class RejectedRows:
    """The error that every rank returns if the rows cannot be trained on; the driver raises it."""

    error: SparkHvdError


@dataclass(frozen=True)
class RankRows:
    """The rows of a job as one rank reads them.

    Attributes:
        schema: the columns, with all shapes.
        train: the rows to train on.
        validation: the rows to validate on.
        shapes: see ``TrainResult``.
        labels: see ``TrainSpec``.
        division: see ``checkpoint.division_digest``; empty if Spark partitioned the rows over the ranks.
        opened: resources to close after the training.
        sample: a real row, if only the ranks have rows.
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
    """Return the plug-in at ``module:name``; this imports its framework."""
    keep_triton_from_tensorflow()
    plugin: FrameworkPlugin = resolve_name(name)
    return plugin


def train_worker(job: TrainJob) -> TrainResult | RejectedRows | None:
    """Train as this process's rank; collective.

    Returns:
        The history and the files of the trained model on rank 0, and None on the others; or, on all ranks, the error if
        the rows cannot be trained on.
    """
    _start(job)
    return _train(_with_transformation(job))


def train_elastic_worker(job: TrainJob) -> TrainResult | RejectedRows | None:
    """Train like ``train_worker`` while ranks join and leave; after a change, all resume from the last commit."""
    _start(job)
    commits, job = Commits(), _with_transformation(job)
    return elastic.run(lambda commits: _train(job, commits))(commits)


def _start(job: TrainJob) -> None:
    if job.start_method is not None:
        multiprocessing.set_start_method(job.start_method, force=True)
    session.init()


@contextmanager
def _refuse_successful_exit() -> Iterator[None]:
    """Turn ``sys.exit()`` in user code into an error, because the job would take it as a successful end of the rank."""
    try:
        yield
    except SystemExit as error:
        if error.code is not None and error.code != 0:  # the job reports this code or text
            raise
        raise ParamError(
            "User code called sys.exit() during the training, which leaves no model. To end the training early, set "
            "run.stop (PyTorch), model.stop_training (Keras) or trainer.should_stop (Lightning) in a callback."
        ) from error


@_refuse_successful_exit()
def _train(job: TrainJob, commits: Commits | None = None) -> TrainResult | RejectedRows | None:
    communicator = session.current()
    payload = job.payload.read(job.store)
    try:
        rows = _rows(job, payload, communicator)
    except (DataError, ParamError) as error:
        if isinstance(job.rows, StoredRows):
            raise
        return RejectedRows(error)  # the same error on all ranks
    plan = _plan(rows.train)
    if job.spec.batch_dependence.need_two_rows and plan is not None and plan.has_single_row():
        return RejectedRows(job.spec.batch_dependence.single_row_error(job.spec.batch_size, plan.size))
    labels = () if job.transformation else rows.labels
    spec = replace(job.spec, schema=rows.schema, labels=labels, sample=rows.sample or job.spec.sample)
    trainer = find_plugin(job.plugin).trainer(payload, spec, communicator.world)
    fence = None
    if job.store is not None and job.holder is not None and communicator.world.rank == 0:
        fence = claim_fence(job.store, job.run_id, job.holder)
    token = 0 if fence is None else fence.token
    callback = None if job.callback is None or communicator.world.rank != 0 else CallbackClient(job.callback)
    hooks = RunHooks(
        job.store,
        job.run_id,
        spec,
        communicator,
        rows.division,
        token,
        division_proc=job.division_proc,
        commits=commits,
        callback=callback,
    )
    if hooks.resume.checkpoint is not None:
        trainer.restore(hooks.resume.checkpoint.state)
    train = _resume_source(job, rows, hooks, communicator.world)
    reports_progress = job.progress and communicator.world.rank == 0
    with rows.opened, nullcontext() if callback is None else callback:
        trainer.fit(ReportingSource(train, spec.epochs) if reports_progress else train, rows.validation, hooks)
    if communicator.world.rank != 0:
        return None
    hooks.restore_best(trainer)
    if fence is not None:
        fence.check()
    with tempfile.TemporaryDirectory(prefix="sparkhvd-export-", dir=scratch_folder()) as folder:
        with job_files.naming_full_disk(folder), communicator.alone("the model is saved"):
            trainer.export(Path(folder))
        written, kept = _save_model(job, Path(folder))
    return TrainResult(tuple(hooks.history), written, kept, rows.schema, rows.shapes)


def _with_transformation(job: TrainJob) -> TrainJob:
    """Return the job with its unpickled transformation in the options of both readers.

    The job carries the transformation as bytes, because the function is pickled by value, separately from the job.
    """
    if not job.transformation:
        return job
    function = cloudpickle.loads(job.transformation)
    reading = replace(job.spec.reading, transformation=function)
    val_reading = replace(job.spec.val_reading, transformation=function)
    return replace(job, spec=replace(job.spec, reading=reading, val_reading=val_reading))


def _save_model(job: TrainJob, folder: Path) -> tuple[tuple[job_files.StoredFile, ...], job_files.InMemoryFiles | None]:
    if job.store is None:
        return job_files.read_folder(folder)
    # A resumed run already has a folder of files, which are never replaced, so this fit needs a new one.
    target = f"{layout.model_folder(job.run_id)}/{uuid.uuid4().hex[:16]}"
    return job_files.write_folder(job.store, target, folder), None


@dataclass(frozen=True)
class _SplitReading:
    """How to read one split."""

    split: SplitName
    batch_size: int
    shuffle: bool
    steps: int | None
    reading: ReadOptions
    pair_last_row: bool = False
    shards: int | None = None  # see ``TrainSpec``


def _split_readings(spec: TrainSpec) -> tuple[_SplitReading, _SplitReading]:
    # The model is trained on the schema that a transformation returns.
    reading, val_reading = replace(spec.reading, made=spec.schema), replace(spec.val_reading, made=spec.schema)
    return (
        _SplitReading(
            "train",
            spec.batch_size,
            spec.shuffle,
            spec.train_steps_per_epoch,
            reading,
            spec.batch_dependence.avoids_single_rows,
            spec.shards,
        ),
        _SplitReading(
            "validation",
            spec.val_batch_size,
            False,
            spec.validation_steps_per_epoch,
            val_reading,
            shards=spec.shards,  # otherwise fewer ranks would validate on fewer rows in the same number of steps
        ),
    )


def _rows(job: TrainJob, payload: bytes, communicator: Communicator) -> RankRows:
    if isinstance(job.rows, Selection):
        return _direct_rows(job, job.rows, payload, communicator)
    if job.data_module:
        return _module_rows(job.rows, job.spec, cloudpickle.loads(job.data_module), communicator)
    return _stored_rows(job.rows, job.spec, communicator.world)


def _module_rows(
    stored: StoredRows, spec: TrainSpec, module_class: type[DataModule], communicator: Communicator
) -> RankRows:
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
    module = opened.enter_context(module_class(context))
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
    train, held_out = _split_readings(spec)
    validation = None if manifest.validation is None else _stored_source(stored, held_out, spec.seed, world)
    source = _stored_source(stored, train, spec.seed, world)
    # The driver has tried the transformation, so spec.schema is the schema of its result.
    division = checkpoint.division_digest(manifest, _order(source, spec))
    return RankRows(spec.schema, source, validation, [], manifest.labels, division)


def _order(source: BatchSource, spec: TrainSpec) -> tuple[object, ...]:
    """Return the values that determine the order of the rows, see ``checkpoint.division_digest``."""
    plan = _plan(source)
    return ("petastorm", spec.shuffle) if plan is None else ("native", *plan.order())


def _plan(source: BatchSource) -> Plan | None:
    """Return the plan that divides the rows; None if another library divides them."""
    source = source.first_shard if isinstance(source, RegroupedSource) else source
    return source.plan if isinstance(source, RowSource) else None


def _regrouped(open_shard: Callable[[World], Shard], part: _SplitReading, world: World, epoch: int = 0) -> Shard:
    """Return a rank's rows: its own shard, or a part of the shards if there are more or fewer shards than ranks.

    Args:
        open_shard: opens the shard of a rank.
        part: the rows.
        world: the rank.
        epoch: the epoch to resume.
    """
    shards = part.shards or world.size
    if shards == world.size:
        return open_shard(world)
    return RegroupedSource(
        lambda shard: open_shard(World(rank=shard, size=shards)),
        shards,
        world,
        epoch,
        avoid_single_rows=part.pair_last_row,
    )


def _stored_source(stored: StoredRows, part: _SplitReading, seed: int, world: World) -> BatchSource:
    store, manifest = stored.store, stored.manifest
    if stored.reader == "petastorm":
        return PetastormSource(store, manifest, part.split, world, part.batch_size, seed=seed, shuffle=part.shuffle)
    return _regrouped(partial(_parquet_source, stored, part, seed), part, world)


def _parquet_source(stored: StoredRows, part: _SplitReading, seed: int, world: World) -> ParquetSource:
    return ParquetSource(
        stored.store,
        stored.manifest,
        part.split,
        world,
        part.batch_size,
        seed=seed,
        shuffle=part.shuffle,
        steps_per_epoch=part.steps,
        reading=part.reading,
        pair_last_row=part.pair_last_row,
    )


def _resume_source(job: TrainJob, rows: RankRows, hooks: RunHooks, world: World) -> BatchSource:
    """Return the training rows, from the position where the run was interrupted.

    If the number of shards or the batch size has changed, the first epoch is the repartitioned rest of the interrupted
    epoch.

    Raises:
        DataError: the rows differ from those of the interrupted run.
    """
    within, train, epoch = hooks.resume.within, rows.train, hooks.resume.first_epoch
    if within is None:
        return train
    if within.division != rows.division or not isinstance(job.rows, StoredRows):
        raise DataError(
            f"Run {job.run_id!r} was interrupted in epoch {epoch + 1} after step {within.step}, and its "
            "rows were divided into batches differently, so the next batch is unknown. Fit on the same rows with the "
            "same random_seed, shuffle, reader, inmemory_cache_all and local_cache, or choose another run_id to train "
            "from the start."
        )
    part = _split_readings(job.spec)[0]
    shards = part.shards or world.size
    if not within.earlier and (within.num_proc, within.batch_size) == (shards, part.batch_size):
        return train
    if _plan(train) is None:
        raise DataError(
            f"Run {job.run_id!r} was interrupted with {counted(within.num_proc, 'rank')} and "
            f"batch_size={within.batch_size}; petastorm's reader and data modules can only resume with the same "
            "numbers. Use these numbers, or choose another run_id to train from the start."
        )
    open_whole = partial(_parquet_source, job.rows, seed=job.spec.seed)
    open_rest = partial(_remainder, open_whole, part, within.parts, epoch)
    rest = _regrouped(open_rest, part, world, epoch)
    hooks.repartition_first_epoch(rest.division_of(epoch).steps())
    return rest


def _remainder(
    open_whole: Callable[..., ParquetSource],
    part: _SplitReading,
    done: tuple[EpochPart, ...],
    epoch: int,
    world: World,
) -> EpochRemainder:
    """Return the rows that remain of an epoch after the parts in ``done``; each part began with the rest before it."""
    *before, last = done
    reading = replace(part, batch_size=last.batch_size)

    def open_old(rank: int) -> ParquetSource | EpochRemainder:
        old = World(rank=rank, size=last.num_proc)
        if before:
            return _remainder(open_whole, reading, tuple(before), epoch, old)
        return open_whole(reading, world=old)

    return EpochRemainder(
        open_whole(part, world=world), epoch, last.step, open_old, open_old(0).division_of(epoch), world
    )


def _direct_rows(job: TrainJob, selection: Selection, payload: bytes, communicator: Communicator) -> RankRows:
    world = communicator.world
    local_rows = TaskRows(given_rows(), selection, world.rank)
    gathered = objects.allgather_object(communicator, local_rows.facts(), name="facts of the rows")
    facts = [file_facts for rank_facts in gathered for file_facts in rank_facts]
    schema = checked(facts, selection, world.size)
    first_rank = next(file_facts.position[0] for file_facts in facts if file_facts.split == "train")
    ranges = label_ranges(schema, facts)
    local_trial = _try_model(job, payload, schema, local_rows, ranges) if world.rank == first_rank else None
    trial = objects.broadcast_object(communicator, local_trial, first_rank, name="shapes of the outputs")
    if isinstance(trial, SparkHvdError):
        raise trial
    if trial is None:
        raise AssertionError("the rank with the first row must have tried the model")
    trained_on, shapes, sample = trial

    def source(part: _SplitReading) -> BatchSource:
        return local_rows.source(
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

    train, validation = _split_readings(replace(job.spec, schema=trained_on))
    held_out = None if selection.validation is None else source(validation)
    return RankRows(trained_on, source(train), held_out, shapes, ranges, sample=sample)


def _try_model(
    job: TrainJob, payload: bytes, schema: DataSchema, local_rows: TaskRows, ranges: LabelRanges
) -> tuple[DataSchema, list[tuple[int, ...]], Arrays] | SparkHvdError:
    """Return the model's input columns, the shapes of its outputs and a row; or the error about these rows."""
    rows, function = local_rows.head(schema, SAMPLE_ROWS), job.spec.reading.transformation
    try:
        if function is not None:
            schema, rows = transformed(schema, function, rows, any_columns=job.any_columns)
        else:
            rows = with_extreme_labels(rows, ranges)
        return schema, find_plugin(job.plugin).try_out(payload, schema, rows), first_row(rows)
    except (DataError, ParamError) as error:
        return error
