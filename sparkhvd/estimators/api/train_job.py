"""The parts of the job that trains a model on all ranks."""

from __future__ import annotations

from sparkhvd.data.loaders.user_loaders import DataModule, loads_rows
from sparkhvd.data.read.readers import ReadOptions
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.estimators.api.validation import row_cache
from sparkhvd.estimators.params.backend import is_elastic
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.plugin import TrainSpec
from sparkhvd.estimators.runs.run_plan import RunPlan
from sparkhvd.estimators.training.user_errors import pickling


def train_spec(run: RunPlan, schema: DataSchema) -> TrainSpec:
    """Return the instructions for the trainers of all ranks."""
    cache, elastic = row_cache(run), is_elastic(run)
    return TrainSpec(
        schema=schema,
        epochs=run.epochs,
        batch_size=run.batch_size,
        val_batch_size=run.val_batch_size or run.batch_size,
        seed=run.random_seed,
        scale_lr=run.scale_lr,
        backward_passes_per_step=run.own.get("backward_passes_per_step", 1),
        shuffle=run.shuffle,
        train_steps_per_epoch=run.train_steps_per_epoch,
        validation_steps_per_epoch=run.validation_steps_per_epoch,
        reading=ReadOptions(cache=cache, threads=run.train_reader_num_workers),
        val_reading=ReadOptions(cache=cache, threads=run.val_reader_num_workers),
        early_stopping=run.early_stopping,
        checkpoints=run.checkpoints,
        terminate_on_nan=run.terminate_on_nan,
        log_every_n_steps=run.log_every_n_steps,
        use_gpu=run.use_gpu,
        model=run.facts,
        shards=run.num_proc if elastic and run.elastic_batch == "global" else None,
        elastic=elastic,
    )


def row_loader(plan: FitPlan) -> type[DataModule] | None:
    """Return the data module that replaces the readers; None if the readers are used."""
    return plan.data_module if loads_rows(plan.data_module) else None


def pickled(value: object, name: str) -> bytes:
    """Return a pickled parameter for the ranks, or no bytes for None.

    Raises:
        ParamError: the value cannot be pickled.
    """
    if value is None:
        return b""
    with pickling(name):
        return dumps(value)
