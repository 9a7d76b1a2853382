"""Refuse parameters that contradict each other or lack a prerequisite, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from pyspark.ml import base

from sparkhvd._util.counts import counted
from sparkhvd.data.loaders.user_loaders import loads_rows
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.backend import check_backend, is_elastic
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.params import EstimatorParams

_PREPARATION_PARAMS = {
    "compress_sparse_cols": "compress_sparse",
    "partitions_per_process": "partitions_per_process",
    "keep_data": "keep_seconds",
}
CREATE_STORE = "Pass store=sparkhvd.Store.create('file:///a/folder/that/all/executors/share')"
_SAVE_RUNS = "Create the Store with save_runs=True"
_DIRECT = "this fit sends rows straight from Spark (data='direct', the default without a Store)"


def check(plan: FitPlan) -> None:
    """Refuse parameters that contradict each other.

    Raises:
        ParamError: the message names both parameters and the remedy.
    """
    check_backend(plan, plan.data)
    row_cache(plan)
    if plan.data != "files":  # a label of files may be a struct, whose fields are not known yet
        check_outputs(plan)
    if plan.store is None or not plan.store.save_runs:
        _refuse_store_params(plan)
    if plan.resume is not None and plan.run_id is not None:
        raise ParamError(
            f"resume='auto' and run_id={plan.run_id!r} contradict each other: resume='auto' finds the run by its "
            "content. Leave one of them out."
        )
    if is_elastic(plan):
        _refuse_elastic(plan)
    if plan.data == "direct":
        _refuse_prepared_row_params(plan)
    if plan.reader == "petastorm":
        _refuse_native_reader_params(plan, "reader='petastorm'", "reader")
    if loads_rows(plan.data_module):
        _refuse_native_reader_params(plan, "data_module", "data_module")


def check_outputs(plan: FitPlan) -> None:
    """Refuse ``output_cols`` and ``output_types`` that do not have one entry per label.

    Raises:
        ParamError: the message names both numbers.
    """
    for name in ("output_cols", "output_types"):
        entries, labels = getattr(plan, name), plan.label_cols
        if entries and labels and len(entries) != len(labels):
            raise ParamError(
                f"{name} has {counted(len(entries), 'entry', 'entries')} {list(entries)}, but label_cols has "
                f"{counted(len(labels), 'column')} {list(labels)}. Pass one entry per label column."
            )


def check_monitored_metrics(monitors: Mapping[str, str], *, held_out: bool) -> None:
    """Refuse to monitor a validation metric without validation rows.

    Args:
        monitors: the monitored metrics by parameter.
        held_out: whether there are validation rows.

    Raises:
        ParamError: the message names the parameter and the metric.
    """
    if held_out:
        return
    for name, monitor in monitors.items():
        if monitor.startswith("val_"):
            raise ParamError(
                f"{name} monitors {monitor!r}, but this fit has no validation rows. Set validation=, or train on files "
                "that have validation rows."
            )


def check_fit_on_parquet(plan: FitPlan) -> None:
    """Refuse parameters that control how rows are prepared or sent, because ``fit_on_parquet`` reads existing files.

    Raises:
        ParamError: the message names the parameter, and where to set it.
    """
    if plan.data == "direct":
        raise ParamError(
            "data='direct' sends rows straight from Spark, but fit_on_parquet reads files. Leave data out."
        )
    for name, instead in _PREPARATION_PARAMS.items():
        if (value := getattr(plan, name)) != EstimatorParams.declarations[name].default:
            raise ParamError(
                f"{name}={value!r} controls how fit prepares rows, but fit_on_parquet reads prepared rows. "
                f"Leave it out, or pass {instead} to prepare_data."
            )


def check_single_fit(run_id: str | None) -> None:
    """Refuse a ``run_id`` that several fits would share, because these fits may use different rows.

    ``fit(df, [params, ...])`` and Spark ML's tuning run several fits, also through Pipelines. Spark ML does not pass
    this fact to the estimator, so this function looks for Spark ML's iterator on the call stack.

    Raises:
        ParamError: this is one of several fits and has a run_id.
    """
    iterator = getattr(base, "_FitMultipleIterator", None)  # private, so another pyspark version may lack it
    if run_id is None or iterator is None:
        return
    iterator_code = inspect.unwrap(iterator.__next__).__code__
    caller = inspect.currentframe()
    while caller is not None:
        if caller.f_code is iterator_code:
            raise ParamError(
                f"run_id={run_id!r} would make several fits share one run, in which each resumes from the checkpoints "
                "of the fit before it. Leave run_id out, so that every fit gets a run of its own, or call fit(df, "
                "params) once per parameter map."
            )
        caller = caller.f_back


def _refuse_elastic(plan: FitPlan) -> None:
    """Refuse elastic training without a Store, or with a reader that cannot divide the rest of an epoch again."""
    if plan.store is None or not plan.store.save_runs:
        raise ParamError(
            "Elastic training (min_num_proc, max_num_proc) keeps its rows and checkpoints in a Store. Pass a Store "
            "that saves runs, or leave both parameters out."
        )
    reader = "data='direct'" if plan.data == "direct" else "reader='petastorm'" if plan.reader == "petastorm" else ""
    reader = "data_module" if loads_rows(plan.data_module) else reader
    if reader:
        raise ParamError(
            f"{reader} cannot divide the rest of an epoch again when the ranks of an elastic training change. Leave it "
            "out, or leave min_num_proc and max_num_proc out."
        )


def _refuse_prepared_row_params(plan: FitPlan) -> None:
    if plan.reader != "native":
        raise ParamError(
            f"reader={plan.reader!r} reads prepared rows, but {_DIRECT}. Pass a Store and data='store', or leave "
            "reader out."
        )
    if loads_rows(plan.data_module):
        raise ParamError(
            f"data_module loads prepared rows, but {_DIRECT}. Pass a Store and data='store', or leave data_module out."
        )
    if plan.compress_sparse_cols:
        raise ParamError(
            f"compress_sparse_cols=True compresses prepared rows, but {_DIRECT}. Pass a Store and data='store', or "
            "leave compress_sparse_cols out."
        )
    if plan.checkpoints.every_steps is not None:
        raise ParamError(
            f"checkpoints=Checkpoints(every_steps={plan.checkpoints.every_steps}) resumes within an epoch, which "
            f"needs the same rows on every rank, but {_DIRECT}, which partitions them again. Pass a Store and "
            "data='store', or leave every_steps out."
        )


def _refuse_native_reader_params(plan: FitPlan, replacement: str, itself: str) -> None:
    defaults = {"reader": "native"}
    # A function that creates a LightningDataModule does not replace the readers.
    values = {**plan.params, **({} if loads_rows(plan.data_module) else {"data_module": None})}
    for name in (
        "train_steps_per_epoch",
        "validation_steps_per_epoch",
        "transformation_fn",
        "inmemory_cache_all",
        "local_cache",
        "reader",
        "data_module",
    ):
        if name != itself and values[name] not in {None, False, defaults.get(name)}:
            raise ParamError(f"{name} needs the native reader, but {replacement} replaces it. Leave one of them out.")


def _refuse_store_params(plan: FitPlan) -> None:
    if plan.store is None:
        reason, remedy = "the estimator has no Store", CREATE_STORE
    else:
        reason, remedy = "the estimator's Store keeps no runs (save_runs=False)", _SAVE_RUNS
    if plan.data == "store" and plan.store is None:
        raise ParamError(f"data='store' sends the rows through a Store, but {reason}. {remedy}, or set data='auto'.")
    if plan.run_id is not None:
        raise ParamError(
            f"run_id={plan.run_id!r} names a run that a later fit resumes from checkpoints in a Store, but "
            f"{reason}, so only the trained model is kept. {remedy}, or leave run_id out."
        )
    if plan.resume is not None:
        raise ParamError(f"resume='auto' finds its run in a Store, but {reason}. {remedy}, or leave resume out.")
    if plan.checkpoints.every_steps is not None or plan.checkpoints.keep != 1:
        raise ParamError(
            f"checkpoints={plan.checkpoints} keeps states of the run in a Store, but {reason}. {remedy}, or leave "
            "every_steps and keep out."
        )


def row_cache(plan: FitPlan) -> str | None:
    """Return where ranks cache their rows after the first epoch: ``memory``, ``disk`` or None.

    Raises:
        ParamError: both caches are set, or the rows do not come from a Store.
    """
    caches = [name for name in ("inmemory_cache_all", "local_cache") if getattr(plan, name)]
    if len(caches) > 1:
        raise ParamError("inmemory_cache_all and local_cache both cache the same rows. Set only one of them.")
    if caches and plan.data == "direct":
        raise ParamError(
            f"{caches[0]}=True caches rows that are read from a Store, but {_DIRECT} onto the executors' disks. Leave "
            "it out, or pass a Store and data='store'."
        )
    return {"inmemory_cache_all": "memory", "local_cache": "disk"}[caches[0]] if caches else None
