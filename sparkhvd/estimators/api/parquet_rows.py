"""Find the rows that ``fit_on_parquet`` trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sparkhvd.data.external.locate import Access
from sparkhvd.data.external.parquet_files import ColumnRequest, ExistingFiles, open_existing, selected
from sparkhvd.data.prepare.prepared_data import PreparedData, hold, open_here
from sparkhvd.data.prepare.stats import too_few_rows
from sparkhvd.data.reuse.dataset_names import id_of
from sparkhvd.data.schema.manifest import Manifest
from sparkhvd.data.schema.spark_types import numbers_only
from sparkhvd.errors import DataError, ParamError, SchemaError
from sparkhvd.estimators.params.params import READERS
from sparkhvd.estimators.runs.run_plan import RunPlan
from sparkhvd.store import Store


@contextmanager
def existing_rows(
    plan: RunPlan,
    dataset: PreparedData | str | None,
    path: str | None,
    validation_path: str | None,
    *,
    access: Access,
    any_type: bool,
) -> Iterator[ExistingFiles]:
    """Open the rows that ``fit_on_parquet`` trains on, with the columns of the estimator's parameters.

    The context protects prepared rows from removal. ``access`` opens existing Parquet files. With ``any_type``, columns
    need not be numeric.

    Raises:
        DataError: the dataset does not exist, or has too few rows.
        SchemaError: a column is missing or unusable.
        ParamError: the reader is unknown, or there is no Store to find rows in.
    """
    if plan.reader not in READERS:
        raise ParamError(f"reader={plan.reader!r} must be one of {', '.join(map(repr, READERS))}.")
    prepared = None if dataset is None and path is not None else _find_prepared(plan, dataset)
    if prepared is None:
        with _files(plan, path, validation_path, access, any_type) as files:
            _refuse_dense_columns(files.manifest, plan)
            yield files
        return
    store, dataset_id = prepared
    with hold(store, id_of(store, dataset_id)) as data:
        yield ExistingFiles(store, _select_trained_columns(data.manifest, plan, any_type))


def _find_prepared(plan: RunPlan, dataset: PreparedData | str | None) -> tuple[Store, str] | None:
    """Return the Store and the id or name of the dataset; None if none is passed and none is open in this process."""
    if isinstance(dataset, PreparedData):
        return dataset.store, dataset.dataset_id
    store = _own_store(plan)
    if dataset is not None:
        return store, dataset
    weights = [] if plan.sample_weight_col is None else [plan.sample_weight_col]
    manifest = open_here(store, [*plan.feature_cols, *plan.label_cols, *weights])
    return None if manifest is None else (store, manifest.dataset_id)


def _own_store(plan: RunPlan) -> Store:
    if plan.store is None:
        raise ParamError(
            "fit_on_parquet cannot find any rows: the estimator has no Store. Set store= to the Store of the prepared "
            "rows, or pass path= with the Parquet files."
        )
    return plan.store


def _select_trained_columns(manifest: Manifest, plan: RunPlan, any_type: bool) -> Manifest:
    """Return the manifest of a prepared dataset, reduced to the columns of this fit, after checking them."""
    requested_columns = ColumnRequest(plan.feature_cols, plan.label_cols, plan.sample_weight_col, plan.fill)
    manifest = selected(manifest, requested_columns)
    _refuse_dense_columns(manifest, plan)
    _refuse_other_split(manifest, plan.validation)
    for column in () if any_type else manifest.schema.columns:
        numbers_only(column)
    if manifest.train.rows < plan.num_proc:
        raise DataError(too_few_rows(manifest.train.rows, plan.num_proc))
    return manifest


def _refuse_dense_columns(manifest: Manifest, plan: RunPlan) -> None:
    for name in plan.sparse_cols or ():
        if not all(manifest.schema[field].sparse for field in manifest.schema.fields_of(name)):
            raise SchemaError(
                f"sparse_cols names {name!r}, but these rows hold that column as a dense array. Preparation decides "
                f"whether a column is sparse: pass prepare_data(sparse_cols=[{name!r}]), or remove it from sparse_cols."
            )


def _refuse_other_split(manifest: Manifest, validation: float | str | None) -> None:
    if validation not in {None, manifest.validated_by}:
        split = "without validation" if manifest.validated_by is None else f"with validation={manifest.validated_by!r}"
        raise DataError(
            f"validation={validation!r} cannot split prepared rows; these were prepared {split}. Leave validation "
            "out, or prepare the data with prepare_data(validation=...)."
        )


def _files(
    plan: RunPlan, path: str | None, validation_path: str | None, access: Access, any_type: bool
) -> ExistingFiles:
    """Open existing Parquet files."""
    features, labels = plan.feature_cols, plan.label_cols
    if path is None:
        store = _own_store(plan)
        path, validation_path = store.train_path, store.val_path
        if path is None:
            raise DataError(
                f"No dataset with the columns {[*features, *labels]} is open in {store.url}. Call fit_on_parquet "
                "inside 'with prepare_data(...)' with the same Store, pass path=, or set store= to a Store with "
                "train_path."
            )
    if plan.validation is not None and validation_path is None:
        raise DataError(
            f"validation={plan.validation!r} cannot split existing Parquet files. Pass validation_path (or set "
            "the Store's val_path), or prepare the data with prepare_data(validation=...)."
        )
    return open_existing(
        path,
        validation_path,
        feature_cols=features,
        label_cols=labels,
        weight_col=plan.sample_weight_col,
        fill=plan.fill,
        num_proc=plan.num_proc,
        access=access,
        transformed=any_type,
    )
