"""``prepare_data``: writes the rows of a DataFrame to a Store, protects them while in use, and reuses them if possible.

The rows are removed when the last user releases them, with two exceptions. Rows with a fingerprint
(``data.reuse.fingerprint``) stay for ``keep_seconds`` after their last use, and a preparation of the same rows reuses
them, in this session or a later one, on this driver or another. Rows with a name also stay for ``keep_seconds``,
whatever their source, and later jobs find them by their name. Every preparation removes rows whose retention time is
over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparkhvd._util.counts import counted
from sparkhvd._util.processes.file_lock import exclusive_on_machine
from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.compat.spark import is_case_sensitive
from sparkhvd.data.prepare.prepare import WriteOptions, prepare, refuse_streaming
from sparkhvd.data.prepare.stats import too_few_rows
from sparkhvd.data.prepare.store_check import check_store
from sparkhvd.data.reuse import leases
from sparkhvd.data.reuse.dataset_names import difference, measures, notes_of
from sparkhvd.data.reuse.fingerprint import Fingerprint, fingerprint, living_caches
from sparkhvd.data.schema.data_schema import DataSchema, Fill, Role
from sparkhvd.data.schema.manifest import Manifest, load
from sparkhvd.data.schema.selection import Selection, check_roles, no_such_column, select
from sparkhvd.data.spark.settings import with_spark_credentials
from sparkhvd.deadline import Deadline
from sparkhvd.errors import ConfigError, DataError, SchemaError, SparkHvdError, StoreError
from sparkhvd.store import layout, store_at
from sparkhvd.store.protocol import Store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

KEEP_SECONDS = 24 * 3600.0
# How long to wait for a process that prepares the same rows. If it takes longer, all waiting processes start their own
# preparation at once.
_TURN_SECONDS = 24 * 3600.0


class PreparedData(leases.Held):
    """A dataset in a Store. It stays there until ``close`` or the end of ``with``, and ``keep_seconds`` longer if set.

    Attributes:
        store: the Store of the dataset.
        manifest: the files and columns of the dataset.
        reused: whether an earlier preparation wrote the rows.
    """

    def __init__(self, store: Store, manifest: Manifest, lease: leases.Lease, *, reused: bool) -> None:
        self.store = store
        self.manifest = manifest
        self.reused = reused
        self.hold: leases.Hold | None = leases.Hold(lease)

    @property
    def dataset_id(self) -> str:
        """Return the id of the dataset in its Store."""
        return self.manifest.dataset_id

    @property
    def schema(self) -> DataSchema:
        """Return the columns, with all shapes known."""
        return self.manifest.schema

    @property
    def train_rows(self) -> int:
        """Return the number of rows to train on."""
        return self.manifest.train.rows

    @property
    def validation_rows(self) -> int:
        """Return the number of rows that are held out."""
        return 0 if self.manifest.validation is None else self.manifest.validation.rows

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the hold, which stays with the process that prepared the dataset."""
        return {**self.__dict__, "hold": None}

    def __repr__(self) -> str:
        held_out = f", {self.validation_rows} held out" if self.manifest.validation is not None else ""
        return f"<PreparedData {self.dataset_id}: {counted(self.train_rows, 'row')} to train on{held_out}>"


@brief_errors
def prepare_data(  # noqa: PLR0917  (Horovod's order)
    num_processes: int,
    store: Store | str,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str] | None = None,
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
    *,
    seed: int = 0,
    sparse_cols: Sequence[str] = (),
    fill: Mapping[str, Fill] | None = None,
    row_group_bytes: int | None = None,
    keep_seconds: float = KEEP_SECONDS,
    name: str | None = None,
) -> PreparedData:
    """Write the columns of a DataFrame to a Store, once, for any number of fits.

    One Spark job evaluates the DataFrame once, whatever ``validation`` is, without a shuffle. The result is a context
    manager; without ``with``, call its ``close()``.

    Args:
        num_processes: the number of ranks that will train; there must be at least as many training rows.
        store: the Store that receives the rows, or its URL.
        df: the rows.
        label_columns: columns to predict.
        feature_columns: columns to learn from; None means all others.
        validation: rows to hold out: a fraction in [0, 1), decided by a hash of each row's feature and label values and
            ``seed``, or the name of a column that is true or 1 for them.
        sample_weight_col: a column with one number per row, its weight.
        compress_sparse: whether to store dense vectors, like sparse ones, by their entries that are not 0.
        partitions_per_process: row groups per rank, each of at least 1 MiB. More row groups shuffle better; fewer are
            read faster.
        verbose: above 0, log the number of rows.
        seed: the seed of a split by fraction.
        sparse_cols: vector columns that the readers deliver as their entries instead of as dense arrays.
        fill: by column, the value that the readers put in place of NULL; without it, NULL is an error.
        row_group_bytes: the size of a row group; None chooses it by ``partitions_per_process``.
        keep_seconds: how long the rows stay after their last use if they have a name or can be recognized; 0 keeps
            and reuses nothing.
        name: a name for the rows, which keeps them whatever their source. A later job finds them with
            ``fit_on_parquet(dataset_idx=name)``, or with ``prepare_data`` and the same name, columns and split;
            ``prepare_data`` then evaluates nothing. Other rows need another name.

    Raises:
        SchemaError: a column is missing or cannot be used, which is raised before any Spark job; or its arrays have
            different lengths.
        ConfigError: a number is too small, or ``name`` is not a string.
        DataError: the rows cannot be trained on (see ``prepare``), or the name belongs to other rows.
        StoreError: the Store is not shared, which is raised before the rows are evaluated; or it could not be read or
            written.

    Examples:
        >>> with prepare_data(2, store, df, ["label"], ["features"], validation=0.1):  # doctest: +SKIP
        ...     model = estimator.fit_on_parquet()
    """
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"name must be a string or None, got {type(name).__name__} {name!r}.")
    store = store_at("store", store)
    writing = WriteOptions(num_processes, seed, partitions_per_process, row_group_bytes, compress_sparse)
    if not label_columns:
        raise SchemaError("No label column is selected; label_columns is empty.")
    selection = select(
        df.schema,
        feature_cols=feature_columns,
        label_cols=label_columns,
        weight_col=sample_weight_col,
        validation=validation,
        sparse_cols=sparse_cols,
        fill=fill,
        transformed=True,
        case_sensitive=is_case_sensitive(df.sparkSession),
    )
    data = acquire(
        df,
        selection,
        store,
        writing,
        keep_seconds=keep_seconds,
        before_writing=check_store,
        name=name,
        report=logger.warning,
    )
    if verbose > 0:
        logger.info("%r in %s%s", data, store.url, " (prepared before)" if data.reused else "")
    return data


def acquire(
    df: DataFrame,
    selection: Selection,
    store: Store,
    writing: WriteOptions,
    *,
    keep_seconds: float,
    before_writing: Callable[[SparkSession, Store], None] | None = None,
    name: str | None = None,
    report: Callable[..., None] = logger.info,
) -> PreparedData:
    """Return the prepared rows of a DataFrame, from an earlier preparation if possible.

    ``before_writing`` is called before rows are written. ``report``, a logger's method, receives the reason if the rows
    cannot be kept.

    Raises:
        ConfigError: ``keep_seconds`` is negative, or 0 for rows with a name.
        DataError: the name belongs to other rows.
        SparkHvdError: see ``prepare``.
    """
    if keep_seconds < 0:
        raise ConfigError(f"keep_seconds is {keep_seconds}; it must be at least 0.")
    if name is not None and not keep_seconds:
        raise ConfigError(
            f"name={name!r} keeps the rows, but keep_seconds=0 removes them after this use; leave one of them out."
        )
    refuse_streaming(df)
    store = with_spark_credentials(store, df.sparkSession)
    _remove_expired(store, df.sparkSession)
    reasons: list[str] = []
    identify = partial(_fingerprint_of, df, selection, writing, reasons.append)
    known = identify() if keep_seconds > 0 else None

    def prepare_anew(keep_seconds: float) -> PreparedData:
        if before_writing is not None:
            before_writing(df.sparkSession, store)
        return _write_new(
            df, selection, store, writing=writing, name=name, identify=identify, known=known, keep_seconds=keep_seconds
        )

    if known is None and name is None:
        if reasons:
            report(
                "The prepared rows are removed after this use, and no later job can reuse them: %s. "
                "prepare_data(name=...) keeps them.",
                reasons[0],
            )
        return prepare_anew(keep_seconds=0.0)
    what = f"named {name!r}" if known is None or name is not None else known.text
    with exclusive_on_machine(f"preparing the rows {what} in {store.url}", Deadline.after(_TURN_SECONDS)):
        if name is not None:
            prepared = _find_by_name(store, name, keep_seconds)
            if prepared is not None:
                _refuse_other_rows(prepared, selection, writing, known)
        else:
            assert known is not None  # noqa: S101  (see above)
            prepared = _find_by_fingerprint(store, known, keep_seconds)
        prepared = prepared or prepare_anew(keep_seconds=keep_seconds)
    if prepared.train_rows < writing.num_proc:
        with prepared:
            raise DataError(too_few_rows(prepared.train_rows, writing.num_proc))
    return prepared


def _write_new(
    df: DataFrame,
    selection: Selection,
    store: Store,
    *,
    writing: WriteOptions,
    name: str | None,
    identify: Callable[[], Fingerprint | None],
    known: Fingerprint | None,
    keep_seconds: float,
) -> PreparedData:
    dataset_id = layout.new_dataset_id()
    if name is not None and known is not None and known.caches:
        known = None  # rows with a name outlive the caches that they come from
    caches = () if known is None else known.caches
    lease = leases.take(store, dataset_id, keep_seconds, caches)
    try:
        manifest = prepare(
            df,
            selection,
            store,
            writing=writing,
            dataset_id=dataset_id,
            name=name,
            fingerprint=known,
            identify=identify,
        )
        if name is not None:
            store.publish(layout.name_path(name, dataset_id), b"")
            _refuse_simultaneous(store, manifest, name, selection, writing)
        elif manifest.fingerprint is not None:
            store.publish(layout.fingerprint_path(manifest.fingerprint, dataset_id), b"")
    except BaseException:
        leases.release_and_log(replace(lease, keep_seconds=0.0))
        raise
    if manifest.fingerprint is None and name is None:
        lease = replace(lease, keep_seconds=0.0)
    return PreparedData(store, manifest, lease, reused=False)


def _find_by_name(store: Store, name: str, keep_seconds: float) -> PreparedData | None:
    for note, dataset_id in notes_of(store, name):
        prepared = _reuse(store, note, dataset_id, keep_seconds)
        if prepared is not None:
            logger.info("Reusing dataset %s, which has the name %r", dataset_id, name)
            return prepared
    return None


def _refuse_other_rows(
    prepared: PreparedData, selection: Selection, writing: WriteOptions, known: Fingerprint | None
) -> None:
    """Refuse rows with the requested name that differ from the requested rows."""
    differs = difference(prepared.manifest, selection, writing.seed, known)
    if differs is not None:
        with prepared:
            raise DataError(
                f"The name {prepared.manifest.name!r} already belongs to other rows in {prepared.store.url} (dataset "
                f"{prepared.dataset_id}): {differs} differ. Choose another name, or remove the rows that have it "
                "(sparkhvd.data.clean)."
            )


def _refuse_simultaneous(store: Store, own: Manifest, name: str, selection: Selection, writing: WriteOptions) -> None:
    """Refuse a name that another machine has given to other rows since this preparation began.

    Of several preparations that end at the same time, at least one sees the others, because each publishes its note
    before it looks for other notes.
    """
    known = None if own.fingerprint is None else Fingerprint(own.fingerprint)
    for _, dataset_id in notes_of(store, name):
        other = None if dataset_id == own.dataset_id else _load_if_complete(store, dataset_id)
        if other is None:
            continue
        differs = difference(other, selection, writing.seed, known)
        if differs is None and measures(other) != measures(own):
            differs = "their numbers of rows, shapes or labels"
        if differs is not None:
            raise DataError(
                f"The name {name!r} was given to other rows in {store.url} (dataset {dataset_id}) while these were "
                f"prepared: {differs} differ. Choose another name, or prepare the rows of this name in one job only."
            )


def hold(store: Store, dataset_id: str) -> PreparedData:
    """Open a prepared dataset for one use; it cannot be removed before ``close``.

    Raises:
        StoreError: there is no such dataset, or it cannot be held.
        DataError: its manifest is damaged.
    """
    lease = leases.borrow(store, dataset_id)
    with _withdrawn_on_error(lease):
        return PreparedData(store, load(store, layout.manifest_path(dataset_id)), lease, reused=True)


def open_here(store: Store, columns: Collection[str]) -> Manifest | None:
    """Return the latest dataset of a Store that this process holds and that has all of these columns."""
    for dataset_id in leases.held_here(store):
        path = layout.manifest_path(dataset_id)
        if not store.exists(path):  # it is being prepared
            continue
        manifest = load(store, path)
        if all(manifest.schema.fields_of(name) for name in columns):
            return manifest
    return None


def with_columns(
    manifest: Manifest, feature_cols: Sequence[str], label_cols: Sequence[str], weight_col: str | None = None
) -> Manifest:
    """Return the manifest with these columns only, in the roles of the arguments.

    Raises:
        SchemaError: a column does not exist, has two uses, or cannot be the weight.
    """
    wanted: list[tuple[str, Role]] = [(name, "feature") for name in feature_cols]
    wanted += [(name, "label") for name in label_cols]
    wanted += [] if weight_col is None else [(weight_col, "weight")]
    columns = []
    for name, role in wanted:
        fields = manifest.schema.fields_of(name)
        if not fields:
            raise no_such_column(name, role, manifest.schema.names(), f"The dataset {manifest.dataset_id} has")
        columns += [replace(manifest.schema[field], role=role) for field in fields]
    schema = DataSchema(tuple(columns))
    check_roles(schema)
    return replace(manifest, schema=schema)


def clean(store: Store | str) -> list[str]:
    """Remove all prepared rows that are not in use, including those that are kept for reuse.

    It also removes files that a task of a failed preparation wrote after its other files had been removed.

    Returns:
        The ids of the datasets that were removed.
    """
    return leases.remove_all_unused(store_at("store", store))


def _fingerprint_of(
    df: DataFrame, selection: Selection, writing: WriteOptions, report: Callable[[str], None]
) -> Fingerprint | None:
    by_fraction = isinstance(selection.validation, float)
    requested_size = () if writing.row_group_bytes is None else (writing.row_group_bytes,)
    seed = writing.seed if by_fraction else None
    return fingerprint(df, selection, writing.compress, seed, *requested_size, report=report)


def _find_by_fingerprint(store: Store, known: Fingerprint, keep_seconds: float) -> PreparedData | None:
    for note in reversed(store.list(layout.fingerprint_folder(known.text))):
        prepared = _reuse(store, note, note.rpartition("/")[2], keep_seconds, known)
        if prepared is not None:
            logger.info("Reusing dataset %s, which already holds these rows", prepared.dataset_id)
            return prepared
    return None


def _reuse(
    store: Store, note: str, dataset_id: str, keep_seconds: float, known: Fingerprint | None = None
) -> PreparedData | None:
    """Open the dataset that a note leads to; remove the note and the dataset if it is incomplete or has other rows."""
    lease = leases.take(store, dataset_id, keep_seconds, () if known is None else known.caches)
    with _withdrawn_on_error(lease):
        manifest = _load_if_complete(store, dataset_id)
        if manifest is not None and (known is None or manifest.fingerprint == known.text):
            return PreparedData(store, manifest, lease, reused=True)
        store.delete(note)
    leases.release_and_log(replace(lease, keep_seconds=0.0))
    return None


@contextmanager
def _withdrawn_on_error(lease: leases.Lease) -> Iterator[None]:
    """Withdraw a lease if the code inside ``with`` raises."""
    try:
        yield
    except BaseException:
        try:
            lease.withdraw()
        except SparkHvdError as error:  # it must not hide the original error
            logger.warning("Could not release dataset %s in %s: %s", lease.dataset_id, lease.store.url, error)
        raise


def _load_if_complete(store: Store, dataset_id: str) -> Manifest | None:
    """Return the manifest if all of its files exist."""
    path = layout.manifest_path(dataset_id)
    if not store.exists(path):
        return None
    try:
        manifest = load(store, path)
    except (StoreError, DataError) as error:
        logger.warning("Preparing the data again: %s", error)
        return None
    existing = set(store.list(layout.dataset_rows_folder(dataset_id)))
    splits = [manifest.train, *([] if manifest.validation is None else [manifest.validation])]
    required = {f"{manifest.folder}/{file.path}" for split in splits for file in split.files}
    return manifest if required <= existing else None


def _remove_expired(store: Store, spark: SparkSession) -> None:
    try:
        removed = leases.remove_expired(store, living_caches(spark))
    except SparkHvdError as error:  # leftovers of other jobs must not prevent training
        logger.warning("Could not remove expired datasets: %s", error)
    else:
        if removed:
            logger.info("Removed %s", counted(len(removed), "expired dataset"))
