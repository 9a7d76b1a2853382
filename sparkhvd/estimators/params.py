"""The parameters that every estimator and every model has, and what they accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from sparkhvd.errors import ParamError
from sparkhvd.estimators.declare import Declarations, Declared, declared
from sparkhvd.store import Store

DATA_WAYS = ("auto", "direct", "store")


def positive_integer(name: str, value: Any) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ParamError(f"{name}={value!r} must be a whole number of at least 1.")
    return int(value)


def integer(name: str, value: Any) -> int:
    """A whole number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ParamError(f"{name}={value!r} must be a whole number of at least 0.")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ParamError(f"{name}={value!r} must be True or False.")
    return value


def text(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ParamError(f"{name}={value!r} must be a string that is not empty.")
    return value


def names(name: str, value: Any) -> tuple[str, ...]:
    """Column names, each once."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise ParamError(f"{name}={value!r} must be a list of column names, such as [{value!r}].")
    if len(set(value)) != len(value):
        raise ParamError(f"{name}={list(value)!r} names a column twice.")
    return tuple(value)


def numbers(name: str, value: Any) -> tuple[float, ...]:
    """A list of numbers."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, Real) for item in value):
        raise ParamError(f"{name}={value!r} must be a list of numbers.")
    return tuple(float(item) for item in value)


def hours(name: str, value: Any) -> float:
    """A number of hours, at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ParamError(f"{name}={value!r} must be a number of hours, at least 0.")
    return float(value)


def fills(name: str, value: Any) -> dict[str, Any]:
    """Values by column name."""
    if not isinstance(value, Mapping) or not all(isinstance(column, str) for column in value):
        raise ParamError(f"{name}={value!r} must be a dict from column names to values, such as {{'age': 0.0}}.")
    return dict(value)


def shapes(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """One shape per column, of one row, with or without a leading -1 for the rows."""
    try:
        found = tuple(tuple(int(size) for size in shape) for shape in value)
    except (TypeError, ValueError):
        raise ParamError(f"{name}={value!r} must be a list with one shape per column, such as [[1, 8, 8]].") from None
    for shape in found:
        if any(size < 1 for size in shape[1:]) or (shape and shape[0] != -1 and shape[0] < 1):
            raise ParamError(
                f"{name}: {list(shape)} must hold sizes of at least 1; only the first may be -1, the rows."
            )
    return found


def validation_choice(name: str, value: Any) -> float | str:
    """A part of the rows (0 <= x < 1), or the name of a column that says which."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, float) and 0 <= value < 1:
        return value
    raise ParamError(
        f"{name}={value!r} must be a float within 0 <= x < 1 (the part of the rows to hold out) or the name of a "
        "column that is true or 1 for the rows to validate with."
    )


def a_store(name: str, value: Any) -> Store:
    """A Store."""
    if not isinstance(value, Store):
        raise ParamError(
            f"{name}={value!r} is not a Store; make one with sparkhvd.Store.create('file:///some/folder')."
        )
    return value


def data_way(name: str, value: Any) -> str:
    """A way of the rows."""
    if value not in DATA_WAYS:
        raise ParamError(f"{name}={value!r} does not exist; there are {', '.join(map(repr, DATA_WAYS))}.")
    return str(value)


class EstimatorParams(Declarations):
    """What every estimator can be told."""

    num_proc: Declared[int | None] = declared(
        "Number of ranks (training processes); None means all slots of the cluster.", positive_integer, default=None
    )
    store: Declared[Store | None] = declared(
        "Where prepared data, checkpoints and the trained model are kept; None trains without them.",
        a_store,
        default=None,
    )
    data: Declared[str] = declared(
        "How rows reach the ranks: through the Store ('store'), straight from Spark ('direct'), or through the Store "
        "where one is given ('auto').",
        data_way,
        default="auto",
    )
    feature_cols: Declared[Sequence[str] | None] = declared(
        "Columns that the model reads, in the order of its inputs.", names, default=None
    )
    label_cols: Declared[Sequence[str] | None] = declared(
        "Columns that the model learns, in the order of its outputs.", names, default=None
    )
    sample_weight_col: Declared[str | None] = declared(
        "Column with the weight of every row. The loss of a step is the mean over its rows of weight times loss.",
        text,
        default=None,
    )
    validation: Declared[float | str | None] = declared(
        "Rows to validate with: a part (0 <= x < 1, chosen by random_seed), or a column that is true for them.",
        validation_choice,
        default=None,
    )
    sparse_cols: Declared[Sequence[str] | None] = declared(
        "Vector columns that reach the model as sparse tensors, one input each; others are dense.", names, default=None
    )
    fill: Declared[Mapping[str, Any] | None] = declared(
        "What to read where a column is NULL, by column; without it NULL is refused.", fills, default=None
    )
    partitions_per_process: Declared[int] = declared(
        "Row groups of prepared data that each rank should find at least.", positive_integer, default=10
    )
    keep_data: Declared[float] = declared(
        "Hours that prepared rows stay in the Store after their last use, for fits on the same rows; 0 keeps none.",
        hours,
        default=24.0,
    )
    batch_size: Declared[int] = declared(
        "Rows per rank and step; the global batch is this times the number of ranks.", positive_integer, default=32
    )
    val_batch_size: Declared[int | None] = declared(
        "Rows per rank and validation step; None means batch_size.", positive_integer, default=None
    )
    epochs: Declared[int] = declared("How often the training goes over all rows.", positive_integer, default=1)
    train_steps_per_epoch: Declared[int | None] = declared(
        "Training steps that count as one epoch; None means as many as use every row once.",
        positive_integer,
        default=None,
    )
    validation_steps_per_epoch: Declared[int | None] = declared(
        "Validation steps per epoch; None means as many as use every validation row once.",
        positive_integer,
        default=None,
    )
    shuffle: Declared[bool] = declared(
        "Whether each epoch goes over the training rows in another order; False keeps theirs.", flag, default=True
    )
    inmemory_cache_all: Declared[bool] = declared(
        "Whether a rank keeps its part of the prepared rows in memory after the first epoch, and reads them there.",
        flag,
        default=False,
    )
    local_cache: Declared[bool] = declared(
        "The same on the executors' local disk, in memory-mapped files: for a Store that is slow to read.",
        flag,
        default=False,
    )
    random_seed: Declared[int | None] = declared(
        "Seed of the shuffling, of the validation split and of the framework; None draws one.", integer, default=None
    )
    scale_lr: Declared[bool] = declared(
        "Whether to multiply the learning rate by the number of ranks. It is never scaled otherwise.",
        flag,
        default=False,
    )
    run_id: Declared[str | None] = declared(
        "Name of the run; one that has checkpoints in the Store is continued. None makes a new one.", text, default=None
    )
    verbose: Declared[int] = declared("1 shows a line per epoch, 0 is silent.", integer, default=1)


class ModelParams(Declarations):
    """What every trained model can be told."""

    feature_columns: Declared[Sequence[str] | None] = declared(
        "Columns to predict from, in the order of the model's inputs.", names, default=None
    )
    label_columns: Declared[Sequence[str] | None] = declared("Columns that the model learned.", names, default=None)
    output_cols: Declared[Sequence[str] | None] = declared(
        "Columns that transform adds, one per output; by default <label>__output.", names, default=None
    )
    run_id: Declared[str | None] = declared("The run that trained the model.", text, default=None)
    batch_size: Declared[int] = declared("Rows that are predicted at once.", positive_integer, default=1024)
