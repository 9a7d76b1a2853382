"""The base class of all estimators: ``fit`` trains a model on a DataFrame."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TextIO, cast, overload

from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable

from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.compat.spark import is_case_sensitive
from sparkhvd.data.external.locate import Access
from sparkhvd.data.loaders.transformation import transformed
from sparkhvd.data.prepare.direct_rows import partition_for_ranks
from sparkhvd.data.prepare.prepare import WriteOptions
from sparkhvd.data.prepare.prepared_data import PreparedData, acquire
from sparkhvd.data.prepare.stats import with_extreme_labels
from sparkhvd.data.prepare.store_check import check_store
from sparkhvd.data.read.batches import Arrays, first_row
from sparkhvd.data.read.readers import head
from sparkhvd.data.schema.data_schema import DataSchema
from sparkhvd.data.schema.manifest import Manifest
from sparkhvd.data.schema.selection import Selection, select, with_fields
from sparkhvd.data.spark.settings import with_spark_credentials
from sparkhvd.driver.preflight.preflight import RequestedTasks
from sparkhvd.driver.spark.gang_queue import called_by
from sparkhvd.driver.spark.slots import describe_cluster
from sparkhvd.driver.user_code.pickling import dumps
from sparkhvd.errors import ParamError
from sparkhvd.estimators.api.description import description
from sparkhvd.estimators.api.parquet_rows import existing_rows
from sparkhvd.estimators.api.resuming import last_checkpoint, refuse_longer_run, refuse_other_order
from sparkhvd.estimators.api.train_job import pickled, row_loader, train_spec
from sparkhvd.estimators.api.validation import (
    CREATE_STORE,
    check,
    check_fit_on_parquet,
    check_monitored_metrics,
    check_outputs,
    check_single_fit,
)
from sparkhvd.estimators.models.feature_matching import with_sources
from sparkhvd.estimators.models.mlflow_tracking import (
    SearchPart,
    active_run,
    cross_validation_part,
    is_in_tuning,
    track,
)
from sparkhvd.estimators.models.model import TrainedModel
from sparkhvd.estimators.models.outputs import check_output_names, check_types, default_output_names
from sparkhvd.estimators.models.persistence import FolderReader, FolderWriter, read_estimator, write_estimator
from sparkhvd.estimators.models.trained import ModelArtifacts, output_specs
from sparkhvd.estimators.params.backend import (
    driver_address,
    encrypts,
    is_elastic,
    largest_size,
    requested_tasks,
    reserve_ranks,
    run_ranks,
    session_of,
    shows_output,
    spark_backend,
    warm_by_default,
)
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.named_inputs import columns_of
from sparkhvd.estimators.params.params import EstimatorParams
from sparkhvd.estimators.runs.resume_check import measures_digest
from sparkhvd.estimators.runs.run_identity import record_run, run_id_by_content
from sparkhvd.estimators.runs.run_lease import hold_run
from sparkhvd.estimators.runs.run_plan import RunPlan
from sparkhvd.estimators.training import finished_runs, job_files
from sparkhvd.estimators.training.epoch_callback import CallbackServer, EpochCalls
from sparkhvd.estimators.training.logs.progress import ProgressOutput, is_interactive
from sparkhvd.estimators.training.sample_rows import read_sample, require_spark_dataframe
from sparkhvd.estimators.training.worker import (
    SAMPLE_ROWS,
    ReaderName,
    RejectedRows,
    StoredRows,
    TrainJob,
    TrainResult,
    find_plugin,
    train_elastic_worker,
    train_worker,
)
from sparkhvd.store import Store, layout

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from pyspark.ml.param import Param
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

_DESCRIBED_ROWS = 5
_NEXT_STEP = {
    "model": "pass the model to train",
    "optimizer": "pass the optimizer of the model",
    "loss": "pass the loss to minimize",
    "feature_cols": "pass the names of the columns that the model reads",
    "label_cols": "pass the names of the columns that the model learns",
}


class DistributedEstimator(Estimator[TrainedModel], EstimatorParams, MLWritable, MLReadable[Any]):
    """Fits a model with one training process per rank."""

    plugin: ClassVar[str]
    model_class: ClassVar[type[TrainedModel]]
    preload: ClassVar[tuple[str, ...]]  # modules that waiting ranks import; the framework's first
    required: ClassVar[tuple[str, ...]] = ("feature_cols", "label_cols")
    _mlflow_run: str | None = None
    _search_part: SearchPart = SearchPart()  # the part of a search that this copy trains
    _default_env: Mapping[str, str] = MappingProxyType({})  # variables of the ranks that the backend may override
    _mapped_params: frozenset[str] = frozenset()  # the parameters that a parameter map set on this copy

    @overload
    def fit(
        self, dataset: DataFrame, params: ParamMap | None = ..., *, resume: Literal["auto"] | None = ...
    ) -> TrainedModel: ...
    @overload
    def fit(
        self, dataset: DataFrame, params: list[ParamMap] | tuple[ParamMap], *, resume: Literal["auto"] | None = ...
    ) -> list[TrainedModel]: ...
    @brief_errors
    def fit(
        self,
        dataset: DataFrame,
        params: ParamMap | list[ParamMap] | tuple[ParamMap] | None = None,
        *,
        resume: Literal["auto"] | None = None,
    ) -> TrainedModel | list[TrainedModel]:
        """Train on the rows of a DataFrame.

        Args:
            dataset: the rows.
            params: parameters for this fit only; a list of parameter maps trains one model per map.
            resume: overrides the parameter ``resume`` for this fit; None keeps it.

        Raises:
            SparkHvdError: a parameter or the rows are invalid, or the training failed.
        """
        if resume is None:
            return super().fit(dataset, params)
        copied = self.copy()
        copied.setParams(resume=resume)
        return copied.fit(dataset, params)

    def _fit(self, dataset: DataFrame) -> TrainedModel:
        plan = self._checked_plan_for(dataset)
        check_single_fit(plan.run_id)
        self._check_monitored(plan, held_out=bool(plan.validation))
        selection = self._selection(dataset, plan)
        self._check_schema(plan, selection.schema)
        spark = dataset.sparkSession
        if plan.resume == "auto" and plan.store is not None:
            store, run_id = with_spark_credentials(plan.store, spark), self._run_id_by_content(dataset)
            plan = replace(plan, store=store, run_id=run_id)
            if (result := finished_runs.find(store, run_id, plan.epochs)) is not None:
                EpochCalls(plan.epoch_callback).call(result.history)
                return self._model(plan, result)
        keep_seconds = _keep_seconds(plan)
        with self._run(spark, plan) as run:
            if run.store is None or run.data == "direct":
                return self._fit_direct(dataset, selection, run)
            write_options = _write_options(run, run.division_proc, run.random_seed)
            with acquire(dataset, selection, run.store, write_options, keep_seconds=keep_seconds) as data:
                return self._fit_rows(spark, run, data.store, data.manifest)

    @brief_errors
    def prepare(self, dataset: DataFrame) -> PreparedData:
        """Write the rows that ``fit`` would train on to the Store; any number of ``fit_on_parquet`` calls can use them.

        The result is a context manager; without ``with``, call its ``close()``. ``sparkhvd.prepare_data`` does the same
        without an estimator. The estimator does not need a model, an optimizer or a loss yet.

        Raises:
            SparkHvdError: a parameter or the rows are invalid; ``fit`` raises the same error.
        """
        plan = self._checked_row_plan(**self._overrides_for(dataset))
        self._require(plan, ("feature_cols", "label_cols"))
        if plan.store is None or plan.data == "direct":
            raise ParamError(f"prepare writes rows to a Store, but this estimator has none. {CREATE_STORE}.")
        selection, spark = self._selection(dataset, plan), dataset.sparkSession
        if all(plan.params[name] is not None for name in self.required):
            self._check_schema(plan, selection.schema)
        num_proc = reserve_ranks(plan, spark)
        store = with_spark_credentials(plan.store, spark)
        self._check_store(spark, store, plan)
        seed = secrets.randbelow(2**31) if plan.random_seed is None else plan.random_seed
        write_options = _write_options(plan, largest_size(plan, num_proc), seed)
        return acquire(dataset, selection, store, write_options, keep_seconds=_keep_seconds(plan))

    def as_trial(self, name: str, params: Mapping[str, object]) -> Self:
        """Return a copy that logs to MLflow as a nested run with this name and these additional parameters.

        Fits of copies with the same ``run_id`` share one nested run, and start warm by default.
        """
        copied = self.copy()
        copied._default_env = warm_by_default()  # noqa: SLF001 - of this object's own copy
        copied._search_part = SearchPart(name, params, is_resumed=True)  # noqa: SLF001 - of this object's own copy
        return copied

    def copy(self, extra: Mapping[Param[Any], Any] | None = None) -> Self:
        """Return a copy with these parameters; ``fit(df, params)`` and Spark ML's tuning make a copy for every fit.

        Spark ML runs these fits in other threads, so the copy remembers the calling thread's active MLflow run. In a
        search of Spark ML, the fits start warm by default.
        """
        copied: Self = super().copy(extra)
        copied._mlflow_run = active_run() or self._mlflow_run
        fold = cross_validation_part()
        copied._search_part = self._search_part if fold is None else SearchPart(fold)
        if is_in_tuning():
            copied._default_env = warm_by_default()
        copied._mapped_params = self._mapped_params | {
            param.name for param in map(self._own_param, extra or ()) if param.parent == self.uid
        }
        return copied

    def try_rows(self, dataset: DataFrame, rows: int) -> str:
        """Run a few rows through the model on the driver; return the mapping of the columns and the output shapes.

        Raises:
            ParamError: the model does not accept these rows.
            DataError: the rows cannot be trained on.
        """
        plan, plugin = self._checked_plan_for(dataset), find_plugin(self.plugin)
        self._check_monitored(plan, held_out=bool(plan.validation))
        selection = self._selection(dataset, plan)
        self._check_schema(plan, selection.schema)
        schema, arrays = self._transformed(plan, *read_sample(dataset, selection, rows))
        outputs = plugin.check(plan.params, schema, arrays)
        row_count = len(next(iter(arrays.values())))
        input_shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        output_shapes = ", ".join(str([row_count, *shape]) for shape in outputs)
        return f"{plugin.mapping(plan.params, schema)}; {input_shapes} gave {output_shapes}"

    def requested_tasks(self) -> RequestedTasks:
        """Return the number and resources of the tasks that the ranks will need, for ``sparkhvd.preflight``."""
        return requested_tasks(self._plan())

    @brief_errors
    def describe(self, df: DataFrame) -> None:
        """Print which columns go to which input and output, and the model's outputs for five rows, without training.

        Raises:
            SparkHvdError: the rows cannot be trained on; ``fit`` raises the same error.
        """
        plan = self._checked_plan_for(df)
        schema, sample = self._transformed(plan, *read_sample(df, self._selection(df, plan), _DESCRIBED_ROWS))
        sys.stdout.write(description(type(self).__name__, self.plugin, plan, schema, sample))

    def write(self) -> FolderWriter:
        """Return a writer in Spark ML's format: ``estimator.write().overwrite().save(path)``."""
        return FolderWriter(partial(write_estimator, self))

    @classmethod
    def read(cls) -> FolderReader[Self]:
        """Return a reader of estimators that ``write`` wrote: ``read().load(path)``."""
        return FolderReader(partial(read_estimator, cls))

    @brief_errors
    def fit_on_parquet(  # the first two parameters are Horovod's
        self,
        params: dict[Any, Any] | None = None,
        dataset_idx: PreparedData | str | None = None,
        *,
        path: str | None = None,
        validation_path: str | None = None,
        reader: ReaderName | None = None,
    ) -> TrainedModel:
        """Train on existing Parquet files.

        The rows come from the first of these that applies: ``dataset_idx``; the files at ``path``; a dataset that this
        process holds open in the Store (inside ``with prepare_data(...)``); the files at the Store's ``train_path`` and
        ``val_path``. If several open datasets have the columns, the last opened one is used.

        Args:
            params: parameters for this fit only, as in ``fit``.
            dataset_idx: the result of ``prepare_data``, its ``dataset_id``, or the name passed to ``prepare_data``.
            path: a folder of Parquet files, or one file; written by Spark, pandas, pyarrow or petastorm.
            validation_path: the same for the validation rows.
            reader: overrides the parameter ``reader`` for this fit.

        Raises:
            DataError: the dataset or file does not exist, or its rows cannot be trained on.
            ParamError: a parameter is invalid.
            SchemaError: a column is missing or unusable.
        """
        if params is not None and not isinstance(params, Mapping):
            raise ParamError(
                f"params={params!r} must be a dict of parameters, as in fit. Pass Parquet files as path=, and the "
                "result of prepare_data as dataset_idx=."
            )
        if params:
            return self.copy(params).fit_on_parquet(
                None, dataset_idx, path=path, validation_path=validation_path, reader=reader
            )
        check_fit_on_parquet(self._plan())
        plan = self._checked_plan(data="files", **({} if reader is None else {"reader": reader}))
        if plan.resume is not None:
            raise ParamError(
                "resume='auto' identifies a run by its DataFrame, and fit_on_parquet has none. Pass run_id instead to "
                "resume a run."
            )
        spark = session_of(plan)
        any_type = self._accepts_any_type(plan)
        with self._run(spark, plan) as planned:
            access = Access(planned.store, configure=partial(with_spark_credentials, spark=spark))
            with existing_rows(planned, dataset_idx, path, validation_path, access=access, any_type=any_type) as files:
                schema = files.manifest.schema
                run = replace(planned, label_cols=tuple(column.name for column in schema.of("label")))
                check_outputs(run)
                self._check_monitored(run, held_out=files.manifest.validation is not None)
                self._check_schema(run, schema)
                return self._fit_rows(spark, run, files.store, files.manifest)

    @contextmanager
    def _run(self, spark: SparkSession | None, plan: FitPlan) -> Iterator[RunPlan]:
        """Fill in the values that the plan leaves open (ranks, run and seed), and hold the run within the context."""
        num_proc = reserve_ranks(plan, spark)
        store, run_id, facts = plan.store, plan.run_id or self._new_run_id(), None
        if store is not None:
            store = with_spark_credentials(store, spark)
            if spark is not None:
                self._check_store(spark, store, plan)
            facts = replace(find_plugin(self.plugin).facts(plan.params), measures=measures_digest(plan.params))
        with hold_run(store, run_id) if store is not None and store.save_runs else nullcontext() as lease:
            last = None if store is None or facts is None else last_checkpoint(store, run_id, facts)
            if store is not None and plan.resume == "auto":
                refuse_longer_run(run_id, plan.epochs, last)
                record_run(store, run_id)
            seed = plan.random_seed
            refuse_other_order(run_id, seed, plan.train_steps_per_epoch, last)
            if seed is None:
                seed = secrets.randbelow(2**31) if last is None else last.seed
            resolved = {"num_proc": num_proc, "store": store, "run_id": run_id, "random_seed": seed}
            division_proc = largest_size(plan, num_proc)
            if last is not None and last.within is not None:
                division_proc = last.within.division_proc or last.within.num_proc
            yield RunPlan(**{**vars(plan), **resolved}, division_proc=division_proc, facts=facts, lease=lease)

    def _check_store(self, spark: SparkSession, store: Store, plan: FitPlan) -> None:
        backend = spark_backend(plan)
        seconds = None if backend is None else backend.start_seconds
        check_store(spark, store, lambda: describe_cluster(spark).count(), seconds)

    def _fit_direct(self, dataset: DataFrame, selection: Selection, run: RunPlan) -> TrainedModel:
        """Train on rows that Spark sends straight to the ranks."""
        if run.transformation_fn is None:
            logger.info("run %s: %s", run.run_id, find_plugin(self.plugin).mapping(run.params, selection.schema))
        rows = partition_for_ranks(dataset, selection, num_proc=run.num_proc, seed=run.random_seed)
        result = self._train(dataset.sparkSession, run, selection.schema, selection, direct_rows=rows)
        return self._record_finished_run(run, result)

    def _fit_rows(self, spark: SparkSession | None, run: RunPlan, rows: Store, manifest: Manifest) -> TrainedModel:
        """Train on rows in a Store, which may differ from the Store of the run."""
        plugin = find_plugin(self.plugin)
        schema, sample = manifest.schema, head(rows, manifest, SAMPLE_ROWS)
        if run.transformation_fn is None:
            sample = with_extreme_labels(sample, manifest.labels)
        schema, sample = self._transformed(run, schema, sample)
        shapes = plugin.check(run.params, schema, sample)
        _check_types(run, schema, shapes)
        logger.info("run %s: %s", run.run_id, plugin.mapping(run.params, schema))
        result = self._train(spark, run, schema, StoredRows(rows, manifest, run.reader), sample=sample)
        return self._record_finished_run(run, replace(result, shapes=shapes))

    def _checked_plan_for(self, dataset: DataFrame) -> FitPlan:
        """Return the checked parameters for a DataFrame."""
        return self._checked_plan(**self._overrides_for(dataset))

    def _overrides_for(self, dataset: DataFrame) -> dict[str, object]:
        """Return the parameters that depend on the DataFrame: each field of a struct label is a label of its own."""
        labels = self.values()["label_cols"]
        if labels is None or not hasattr(dataset, "sparkSession"):  # _selection refuses such a dataset
            return {}
        return {
            "label_cols": with_fields(dataset.schema, labels, case_sensitive=is_case_sensitive(dataset.sparkSession))
        }

    def _checked_plan(self, **overrides: object) -> FitPlan:
        plan = self._checked_row_plan(**overrides)
        self._require(plan, self.required)
        return plan

    def _checked_row_plan(self, **overrides: object) -> FitPlan:
        """Return the checked parameters; the model, its optimizer and its loss may be missing."""
        plan = self._plan(**overrides)
        if plan.inputs is not None and self.values()["feature_cols"] is None:
            plan = replace(plan, feature_cols=columns_of(plan.inputs))
        if plan.data == "auto":
            plan = replace(plan, data="direct" if plan.store is None else "store")
        check(plan)
        return plan

    def _require(self, plan: FitPlan, names: Sequence[str]) -> None:
        for name in names:
            value = plan.params[name]
            if value is None or value == ():
                hint = f": {_NEXT_STEP[name]}" if name in _NEXT_STEP else ""
                raise ParamError(f"{type(self).__name__} needs {name}{hint}.")

    def _run_id_by_content(self, dataset: DataFrame) -> str:
        """Return the id of the run that all fits with the same content share."""
        plan = self._checked_plan_for(dataset)
        selection = self._selection(dataset, plan)
        identity = {name: value for name, value in plan.params.items() if self.is_identity(name, self._mapped_params)}
        # If several weights have the same shape, the canonical forms do not show which of them are trained.
        trained = find_plugin(self.plugin).facts(plan.params).groups
        return run_id_by_content(type(self).__name__, dataset, selection, {**identity, "trained": trained})

    def _check_monitored(self, plan: FitPlan, *, held_out: bool) -> None:
        check_monitored_metrics(find_plugin(self.plugin).monitors(plan.params), held_out=held_out)

    def _transformed(self, plan: FitPlan, schema: DataSchema, rows: Arrays) -> tuple[DataSchema, Arrays]:
        """Return the columns and rows that the model is trained on."""
        if plan.transformation_fn is None:
            return schema, rows
        return transformed(schema, plan.transformation_fn, rows, any_columns=self._takes_any_columns(plan))

    def _takes_any_columns(self, plan: FitPlan) -> bool:  # noqa: ARG002
        """Return whether the training takes every column that ``transformation_fn`` returns, not only selected ones."""
        return False

    def _check_schema(self, plan: FitPlan, schema: DataSchema) -> None:
        """Check the model against the columns, unless a transformation will create columns that are not known yet."""
        if plan.transformation_fn is None:
            _check_types(plan, schema, find_plugin(self.plugin).check(plan.params, schema, None))
        else:
            _check_types(plan, None, [])

    def _selection(self, dataset: DataFrame, plan: FitPlan) -> Selection:
        require_spark_dataframe("fit", dataset)
        # Default output names must only differ from the features, because transform may get another DataFrame.
        check_output_names(_output_names(plan), dataset.columns if plan.output_cols else plan.feature_cols)
        return select(
            dataset.schema,
            feature_cols=plan.feature_cols,
            label_cols=plan.label_cols,
            weight_col=plan.sample_weight_col,
            validation=plan.validation,
            sparse_cols=plan.sparse_cols or (),
            fill=plan.fill,
            transformed=self._accepts_any_type(plan),
            case_sensitive=is_case_sensitive(dataset.sparkSession),
        )

    def _accepts_any_type(self, plan: FitPlan) -> bool:
        """Return whether columns may have any type because a transformation or the framework checks them."""
        return plan.transformation_fn is not None or find_plugin(self.plugin).takes_texts

    def _environment(self) -> dict[str, str | None]:
        """Return the environment variables that the framework needs on the ranks."""
        return {}

    def _pickled(self, objects: dict[str, object]) -> bytes:
        """Serialize the parameters that JSON cannot hold; ``cloudpickle.loads`` restores them."""
        return dumps(objects)

    def _imports(self) -> tuple[str, ...]:
        """Return the modules that the ranks import while they wait for each other."""
        return self.preload

    def _new_run_id(self) -> str:
        framework = self.preload[0]
        return f"{framework}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:8]}"

    def _train(
        self,
        spark: SparkSession | None,
        run: RunPlan,
        schema: DataSchema,
        rows: StoredRows | Selection,
        *,
        direct_rows: DataFrame | None = None,
        sample: Arrays | None = None,
    ) -> TrainResult:
        plugin = find_plugin(self.plugin)
        dependence = plugin.batch_dependence(run.params)
        if is_elastic(run) and run.elastic_batch == "rank":
            dependence.check_changing_ranks(run.batch_size)
        for remark in dependence.remarks(run.num_proc, run.batch_size):
            logger.warning("run %s: %s", run.run_id, remark)
        packed = plugin.pack({**run.params, "schema": schema})
        path = f"{layout.run_folder(run.run_id)}/payload-{uuid.uuid4().hex[:16]}"
        job = TrainJob(
            plugin=self.plugin,
            store=run.store,
            rows=rows,
            run_id=run.run_id,
            payload=job_files.to_payload(run.store, path, packed),
            spec=replace(train_spec(run, schema), batch_dependence=dependence, sample=sample and first_row(sample)),
            start_method=run.mp_start_method,
            transformation=pickled(run.transformation_fn, "transformation_fn"),
            any_columns=self._takes_any_columns(run),
            data_module=pickled(row_loader(run), "data_module"),
            progress=run.verbose > 0 and shows_output(run) and is_interactive(),
            holder=None if run.lease is None else run.lease.holder,
            division_proc=run.division_proc,
        )
        try:
            result = self._run_job(spark, run, job, direct_rows)
        finally:
            if run.store is not None:
                job_files.delete_payload(run.store, job.payload)
        if run.lease is not None:
            run.lease.check()
        return result

    def _run_job(
        self, spark: SparkSession | None, run: RunPlan, job: TrainJob, direct_rows: DataFrame | None
    ) -> TrainResult:
        """Train on all ranks, with a progress bar and ``epoch_callback`` on the driver."""
        calls = EpochCalls(run.epoch_callback)
        with ExitStack() as stack:
            progress_output = stack.enter_context(closing(ProgressOutput(run.run_id))) if job.progress else None
            if run.epoch_callback is not None:
                server = CallbackServer(
                    calls,
                    *driver_address(run, spark),
                    encrypt=encrypts(run),
                    during_calls=partial(called_by, threading.get_ident()),
                )
                job = replace(job, callback=stack.enter_context(server).address)
            try:
                results = run_ranks(
                    run,
                    train_elastic_worker if is_elastic(run) else train_worker,
                    (job,),
                    spark=spark,
                    env={**self._environment(), **(run.backend_env or {})},
                    default_env=self._default_env,
                    preload=self._imports(),
                    rows=direct_rows,
                    stdout=cast("TextIO | None", progress_output),
                )
            except Exception:
                if calls.error is not None:  # rank 0 failed because of this error
                    raise calls.error from None
                raise
        # Rank 0 returns the result; every rank returns RejectedRows.
        result: TrainResult | RejectedRows = next(result for result in results if result is not None)
        if isinstance(result, RejectedRows):
            raise result.error
        calls.call(result.history)
        return result

    def _record_finished_run(self, run: RunPlan, result: TrainResult) -> TrainedModel:
        """Save the result if ``resume="auto"`` may find the run again, and return the trained model."""
        if run.store is not None and run.resume == "auto":
            finished_runs.save(run.store, run.run_id, run.epochs, result)
        return self._model(run, result)

    def _model(self, plan: FitPlan, result: TrainResult) -> TrainedModel:
        outputs = output_specs(result.shapes, result.schema.of("label"))
        schema = with_sources(result.schema, plan.feature_cols)
        features: Sequence[str] = plan.feature_cols
        labels: Sequence[str] | None = plan.label_cols
        if plan.transformation_fn is not None and self._takes_any_columns(plan):
            features = list(dict.fromkeys(column.path[0] for column in schema.of("feature")))
            labels = [column.name for column in schema.of("label")] or None
        source = result.kept or plan.store
        if source is None:
            raise AssertionError("without a Store, the result must hold the files")
        model = self.model_class(
            ModelArtifacts(source, result.files, schema, outputs, result.history),
            feature_columns=features,
            label_columns=labels,
            output_cols=plan.output_cols,
            output_types=plan.output_types,
            run_id=plan.run_id,
        )
        track(model, plan.params, self._mlflow_run, self._search_part)
        return model


def _keep_seconds(plan: FitPlan) -> float:
    """Return the number of seconds to keep prepared rows after their last use.

    Without ``random_seed``, each fit selects different validation rows, so no later fit can reuse rows that were split.
    """
    is_split = isinstance(plan.validation, float) and plan.validation > 0
    is_reusable = plan.random_seed is not None or not is_split
    return plan.keep_data * 3600.0 if is_reusable else 0.0


def _write_options(plan: FitPlan, division_proc: int, seed: int) -> WriteOptions:
    return WriteOptions(division_proc, seed, plan.partitions_per_process, compress=plan.compress_sparse_cols)


def _output_names(plan: FitPlan) -> Sequence[str]:
    """Return the columns that ``transform`` of the trained model will add."""
    return plan.output_cols or default_output_names(plan.label_cols)


def _check_types(plan: FitPlan, schema: DataSchema | None, shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse ``output_types`` that ``transform`` cannot produce; checks only the labels and outputs known so far."""
    labels = () if schema is None else schema.of("label")
    # A transformation_fn may have replaced the labels; transform then checks the types.
    if plan.output_types is not None and (labels or schema is None):
        outputs = output_specs(shapes, labels) if shapes else ()
        check_types(_output_names(plan), plan.output_types, outputs, labels)
