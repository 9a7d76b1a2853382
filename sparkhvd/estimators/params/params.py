"""The parameters of every estimator and every model, and the converters that check their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, TypeVar

from sparkhvd._util.counts import is_count
from sparkhvd.data.loaders.user_loaders import DataModule, loads_rows
from sparkhvd.errors import ParamError
from sparkhvd.estimators.params.backend import Backend, backend_or_launcher
from sparkhvd.estimators.params.declarations import Declarations, Declared, Identity, declared
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.params.named_inputs import named_inputs
from sparkhvd.estimators.params.policies import Checkpoints, EarlyStopping
from sparkhvd.store import Store, store_at

T = TypeVar("T")

DATA_PATHS = ("auto", "direct", "store")
READERS = ("native", "petastorm")
START_METHODS = ("fork", "spawn", "forkserver")
COMPRESSIONS = ("none", "fp16", "bf16")

# Horovod's parameters that sparkhvd does not have, with the reason for the error message.
RETIRED = {
    "shuffle_buffer_size": "rows are shuffled within windows of 64 MB or 1,048,576 rows; shuffle=False keeps their "
    "order.",
    "shuffling_buffer_size": "rows are shuffled within windows of 64 MB or 1,048,576 rows; shuffle=False keeps their "
    "order.",
    "reader_pool_type": "rows are always decoded by threads, which need no second process; train_reader_num_workers "
    "sets their number.",
    "transformation_edit_fields": "columns have the types and shapes that transformation_fn returns.",
    "transformation_removed_fields": "columns that transformation_fn does not return are removed.",
    "continuous_cols": "it was for NVTabular's loaders; list the columns in feature_cols.",
    "categorical_cols": "it was for NVTabular's loaders; list the columns in feature_cols; integers stay integers.",
    "tensorflow_dataset_prefetch_buffer_size": "every rank prefetches up to 256 MB of decoded rows.",
}


def positive_integer(name: str, value: object) -> int:
    """Convert to a whole number of at least 1."""
    if not is_count(value, 1):
        raise ParamError(f"{name}={value!r} must be a whole number of at least 1.")
    return int(value)


def non_negative_integer(name: str, value: object) -> int:
    """Convert to a whole number of at least 0."""
    if not is_count(value, 0):
        raise ParamError(f"{name}={value!r} must be a whole number of at least 0.")
    return int(value)


def flag(name: str, value: object) -> bool:
    """Accept True or False."""
    if not isinstance(value, bool):
        raise ParamError(f"{name}={value!r} must be True or False.")
    return value


def flag_or_arguments(name: str, value: object) -> bool | dict[str, object]:
    """Accept True, False, or a dict of arguments by name."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    if not isinstance(value, bool):
        raise ParamError(f"{name}={value!r} must be True, False, or a dict of arguments by name.")
    return value


def one_of(*choices: str) -> Callable[[str, object], str]:
    """Return a converter that accepts one of ``choices``."""

    def convert(name: str, value: object) -> str:
        if value not in choices:
            raise ParamError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
        return str(value)

    return convert


def instance_of(expected_class: type[T], example: str) -> Callable[[str, object], T]:
    """Return a converter that accepts instances of ``expected_class``, of which ``example`` is one."""

    def convert(name: str, value: object) -> T:
        if not isinstance(value, expected_class):
            article = "an" if expected_class.__name__[0] in "AEIOU" else "a"
            raise ParamError(f"{name}={value!r} must be {article} {expected_class.__name__}, such as {example}.")
        return value

    return convert


def callable_object(name: str, value: object) -> Callable[..., object]:
    """Accept a callable."""
    if not callable(value):
        raise ParamError(f"{name}={value!r} must be a function.")
    return value


def data_module_class(name: str, value: object) -> type[DataModule]:
    """Accept a subclass of ``DataModule``."""
    if loads_rows(value):
        return value
    raise ParamError(f"{name}={value!r} must be a subclass of sparkhvd.data.DataModule: the class, not an instance.")


def positive_number(name: str, value: object) -> float:
    """Convert to a float above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ParamError(f"{name}={value!r} must be a number above 0.")
    return float(value)


class Environment(dict[str, str | None]):
    """Environment variables of ranks; their values may be secrets, so ``repr`` shows the names only.

    ``explainParams`` and MLflow's automatic logging show the text of every parameter.
    """

    def __repr__(self) -> str:
        return f"{{{', '.join(sorted(self))}: values not shown}}"


def environment(name: str, value: Any) -> Environment:
    """Accept a dict of environment variables; the value None removes a variable."""
    valid = isinstance(value, Mapping) and all(
        isinstance(key, str) and (item is None or isinstance(item, str)) for key, item in value.items()
    )
    if not valid:  # the message omits the value, which may be a secret
        raise ParamError(
            f"{name} must be a dict from environment variable names to strings, or to None to remove a variable."
        )
    return Environment(value)


def text(name: str, value: object) -> str:
    """Accept a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ParamError(f"{name}={value!r} must be a non-empty string.")
    return value


def names(name: str, value: object) -> tuple[str, ...]:
    """Convert to a tuple of distinct column names."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        example = [value] if isinstance(value, str) else ["age", "price"]
        raise ParamError(f"{name}={value!r} must be a list of column names, such as {example!r}.")
    if len(set(value)) != len(value):
        duplicate = next(column for column in value if value.count(column) > 1)
        raise ParamError(
            f"{name}={list(value)!r} names the column {duplicate!r} more than once. List each column once."
        )
    return tuple(value)


def numbers(name: str, value: object) -> tuple[float, ...]:
    """Convert to a tuple of floats."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, Real) for item in value):
        raise ParamError(f"{name}={value!r} must be a list of numbers, such as [0.5, 1.0].")
    return tuple(float(item) for item in value)


def hours(name: str, value: object) -> float:
    """Convert to a number of hours, at least 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= 0:
        raise ParamError(f"{name}={value!r} must be a number of hours, at least 0.")
    return float(value)


def fills(name: str, value: object) -> dict[str, object]:
    """Accept a dict of values by column name."""
    if not isinstance(value, Mapping) or not all(isinstance(column, str) for column in value):
        raise ParamError(f"{name}={value!r} must be a dict from column names to values, such as {{'age': 0.0}}.")
    return dict(value)


def shapes(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Convert to one shape per column: the shape of one row. A leading -1 may stand for the number of rows."""
    try:
        converted = tuple(tuple(int(size) for size in shape) for shape in value)
    except (TypeError, ValueError):
        raise ParamError(f"{name}={value!r} must be a list with one shape per column, such as [[1, 8, 8]].") from None
    for shape in converted:
        if any(size < 1 for size in shape[1:]) or (shape and shape[0] != -1 and shape[0] < 1):
            raise ParamError(
                f"{name} has the shape {list(shape)}, but sizes must be at least 1. Only the first may be -1, for the "
                "rows."
            )
    return converted


def validation_choice(name: str, value: object) -> float | str:
    """Accept a fraction of the rows (0 <= x < 1), or the name of the column that marks the validation rows."""
    if isinstance(value, str) and value:
        return value
    if isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < 1:
        return float(value)
    raise ParamError(
        f"{name}={value!r} must be a number within 0 <= x < 1 (the fraction of the rows to hold out) or the name "
        "of a column that is true or 1 for the validation rows."
    )


def objects(name: str, value: object) -> list[object]:
    """Accept a list of objects."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ParamError(f"{name}={value!r} must be a list.")
    return list(value)


def objects_or_named(name: str, value: object) -> list[object] | dict[object, object]:
    """Accept a list of objects, or a dict of objects by name."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ParamError(f"{name}={value!r} must be a list, or a dict by name.")
    return list(value)


def compression_or_name(name: str, value: object) -> object:
    """Accept the name of a compression, or a compressor."""
    if isinstance(value, str):
        return one_of(*COMPRESSIONS)(name, value)
    if not all(callable(getattr(value, method, None)) for method in ("compress", "decompress")):
        raise ParamError(
            f"{name}={value!r} must be one of {', '.join(map(repr, COMPRESSIONS))}, or an object with compress and "
            "decompress, such as hvd.Compression.fp16."
        )
    return value


def output_type_names(name: str, value: object) -> tuple[str, ...]:
    """Convert to one type name per output: a keyword of ``models.outputs``, or the name of a Spark data type."""
    types = [value] if isinstance(value, str) or hasattr(value, "simpleString") else value
    if not isinstance(types, Sequence) or not types:
        raise ParamError(f"{name}={value!r} must be a list with one type per output column, such as ['vector'].")
    type_names = [
        output_type.simpleString() if hasattr(output_type, "simpleString") else output_type for output_type in types
    ]
    if not all(isinstance(output_type, str) and output_type for output_type in type_names):
        raise ParamError(f"{name}={value!r} must list type names such as 'array<float>', or Spark data types.")
    return tuple(type_names)


class EstimatorParams(Declarations):
    """The parameters of every estimator."""

    retired = RETIRED

    num_proc: Declared[int | None] = declared(
        "Number of ranks (training processes); None means all slots of the cluster.", positive_integer, default=None
    )
    min_num_proc: Declared[int | None] = declared(
        "Smallest number of ranks to train with. This or max_num_proc makes the training elastic: it continues when "
        "ranks are lost or added. Needs a Store.",
        positive_integer,
        default=None,
    )
    max_num_proc: Declared[int | None] = declared(
        "Largest number of ranks of an elastic fit; None means num_proc, or else min_num_proc.",
        positive_integer,
        default=None,
    )
    elastic_timeout: Declared[float | None] = declared(
        "Seconds that an elastic fit waits for enough ranks after a loss; None means 600.",
        positive_number,
        default=None,
        identity=Identity.NEVER,
    )
    reset_limit: Declared[int | None] = declared(
        "Number of times that the ranks of an elastic fit may change; None sets no limit.",
        non_negative_integer,
        default=None,
        identity=Identity.NEVER,
    )
    backend: Declared[Backend | str] = declared(
        "The backend that starts the ranks: 'barrier' (Spark tasks), 'mpi' (Open MPI in Spark tasks), 'local' "
        "(processes on the driver's machine), 'ray' (actors of a Ray cluster), or an object with run and "
        "num_processes, such as SparkBackend.",
        backend_or_launcher,
        default="auto",
    )
    backend_env: Declared[Mapping[str, str | None] | None] = declared(
        "Environment variables of the ranks; the value None removes a variable.", environment, default=None
    )
    use_gpu: Declared[bool] = declared(
        "Whether a rank trains on its GPU if it has one; False trains on the CPU.",
        flag,
        default=True,
        identity=Identity.NEVER,
    )
    mp_start_method: Declared[str | None] = declared(
        "How Python's multiprocessing starts processes on the ranks; None keeps Python's default.",
        one_of(*START_METHODS),
        default=None,
        identity=Identity.NEVER,
    )
    store: Declared[Store | None] = declared(
        "The Store that keeps prepared data, checkpoints and the trained model; None trains without a Store.",
        store_at,
        default=None,
        identity=Identity.NEVER,
    )
    data: Declared[str] = declared(
        "How rows reach the ranks: through the Store ('store'), straight from Spark ('direct'), or through the Store "
        "if one is set ('auto').",
        one_of(*DATA_PATHS),
        default="auto",
    )
    feature_cols: Declared[Sequence[str] | None] = declared(
        "Columns that the model reads, in the order of its inputs.", names, default=None
    )
    inputs: Declared[Mapping[str, object] | None] = declared(
        "The columns of every input, by the model's own names, optionally with shape and dtype. feature_cols may then "
        "be left out.",
        named_inputs,
        default=None,
    )
    label_cols: Declared[Sequence[str] | None] = declared(
        "Columns that the model learns to predict, in the order of its outputs.", names, default=None
    )
    sample_weight_col: Declared[str | None] = declared(
        "Column with the weight of every row. The loss of a step is the mean over its rows of weight times loss.",
        text,
        default=None,
    )
    validation: Declared[float | str | None] = declared(
        "Validation rows: a fraction (0 <= x < 1, drawn with random_seed), or a column that is true or 1 for them.",
        validation_choice,
        default=None,
    )
    sparse_cols: Declared[Sequence[str] | None] = declared(
        "Vector columns that reach the model as sparse tensors, one input per column; others are dense.",
        names,
        default=None,
    )
    compress_sparse_cols: Declared[bool] = declared(
        "Whether prepared rows contain only the nonzero entries of dense vectors, as they do for sparse vectors.",
        flag,
        default=False,
    )
    transformation_fn: Declared[Callable[..., object] | None] = declared(
        "Function that transforms a batch before training: it gets a dict of numpy arrays by column and returns "
        "another dict with as many rows. Reader threads of the ranks call it.",
        callable_object,
        default=None,
    )
    data_module: Declared[Callable[..., object] | None] = declared(
        "A subclass of sparkhvd.data.DataModule that loads the prepared rows on every rank, instead of the readers.",
        data_module_class,
        default=None,
    )
    reader: Declared[str] = declared(
        "Reader of the prepared rows: 'native', or 'petastorm' if that is installed on the executors.",
        one_of(*READERS),
        default="native",
    )
    train_reader_num_workers: Declared[int] = declared(
        "Threads of a rank that decode training rows.",
        positive_integer,
        default=2,
        aliases=("TrainReaderNumWorker",),
        identity=Identity.NEVER,
    )
    val_reader_num_workers: Declared[int] = declared(
        "Threads of a rank that decode validation rows.",
        positive_integer,
        default=2,
        aliases=("ValReaderNumWorker",),
        identity=Identity.NEVER,
    )
    fill: Declared[Mapping[str, object] | None] = declared(
        "Values that replace NULL, by column. NULL in any other column raises an error.", fills, default=None
    )
    partitions_per_process: Declared[int] = declared(
        "Minimum number of row groups of prepared data per rank.", positive_integer, default=10
    )
    keep_data: Declared[float] = declared(
        "Hours that prepared rows stay in the Store after their last use, for fits on the same rows; 0 keeps none.",
        hours,
        default=24.0,
        identity=Identity.NEVER,
    )
    batch_size: Declared[int] = declared(
        "Rows per rank and step; the global batch is this times the number of ranks.", positive_integer, default=32
    )
    elastic_batch: Declared[Literal["global", "rank"]] = declared(
        "Which batch keeps its size when the ranks of an elastic fit change: 'global' divides batch_size times "
        "num_proc rows among them, so that a change affects only the speed; 'rank' keeps batch_size rows per rank.",
        one_of("global", "rank"),
        default="global",
    )
    val_batch_size: Declared[int | None] = declared(
        "Rows per rank and validation step; None means batch_size.", positive_integer, default=None
    )
    epochs: Declared[int] = declared(
        "Number of passes over all training rows.", positive_integer, default=1, identity=Identity.IN_PARAM_MAPS
    )
    train_steps_per_epoch: Declared[int | None] = declared(
        "Training steps per epoch; None means enough steps to use every row once.",
        positive_integer,
        default=None,
    )
    validation_steps_per_epoch: Declared[int | None] = declared(
        "Validation steps per epoch; None means enough steps to use every validation row once.",
        positive_integer,
        default=None,
    )
    shuffle: Declared[bool] = declared(
        "Whether each epoch reads the training rows in a different order; False keeps their order.", flag, default=True
    )
    inmemory_cache_all: Declared[bool] = declared(
        "Whether a rank caches its part of the prepared rows in memory after the first epoch.",
        flag,
        default=False,
        aliases=("InMemoryCacheAll",),
    )
    local_cache: Declared[bool] = declared(
        "Whether a rank caches its part of the prepared rows on the executor's local disk, in memory-mapped files, for "
        "a Store that is slow to read.",
        flag,
        default=False,
    )
    random_seed: Declared[int | None] = declared(
        "Seed of the shuffling, the validation split and the framework; None draws a random seed.",
        non_negative_integer,
        default=None,
    )
    scale_lr: Declared[bool] = declared(
        "Whether to multiply the learning rate by the number of ranks. False does not change it.",
        flag,
        default=False,
    )
    gradient_compression: Declared[object] = declared(
        "Compression of the gradients between ranks: 'fp16', 'bf16', or a Compressor of hvd.Compression.",
        compression_or_name,
        default=None,
    )
    terminate_on_nan: Declared[bool] = declared(
        "Whether a NaN or infinite loss ends the training with an error.", flag, default=False
    )
    log_every_n_steps: Declared[int | None] = declared(
        "Training steps between log lines within an epoch, and between entries of Lightning's loggers; None logs "
        "epochs only (and Lightning's loggers every 50 steps).",
        positive_integer,
        default=None,
        identity=Identity.NEVER,
    )
    early_stopping: Declared[EarlyStopping | None] = declared(
        "The rule that may end the training before its last epoch; all ranks reach the same decision.",
        instance_of(EarlyStopping, "EarlyStopping('val_loss', patience=3)"),
        default=None,
    )
    epoch_callback: Declared[Callable[[int, Mapping[str, float]], object] | None] = declared(
        "Function that the driver calls after every epoch with its number, from 0, and its metrics by name, such as "
        "'val_loss'; the training ends after the epoch if it returns True.",
        callable_object,
        default=None,
    )
    checkpoints: Declared[Checkpoints] = declared(
        "Which states of the run the Store keeps, and which epoch's model fit returns.",
        instance_of(Checkpoints, "Checkpoints(every_steps=500, best='val_loss')"),
        default=Checkpoints(),
    )
    run_id: Declared[str | None] = declared(
        "Name of the run; fit resumes a run that has checkpoints in the Store. None starts a new run.",
        text,
        default=None,
        identity=Identity.NEVER,
    )
    resume: Declared[str | None] = declared(
        "'auto' resumes the run that an earlier fit with the same rows, parameters and model left in the Store, also "
        "if that run is finished.",
        one_of("auto"),
        default=None,
        identity=Identity.NEVER,
    )
    output_cols: Declared[Sequence[str] | None] = declared(
        "output_cols of the trained model: columns that its transform adds, one per label.",
        names,
        default=None,
        identity=Identity.NEVER,
    )
    output_types: Declared[Sequence[str] | None] = declared(
        "output_types of the trained model: the type of every output, such as 'label' or 'vector'; one per label.",
        output_type_names,
        default=None,
        identity=Identity.NEVER,
    )
    verbose: Declared[int] = declared(
        "1 shows a line per epoch, 0 is silent.", non_negative_integer, default=1, identity=Identity.NEVER
    )

    def _plan(self, **overrides: object) -> FitPlan:
        """Return the parameters, with ``overrides`` by name, as a plan that has not been checked as a whole."""
        return FitPlan.of({**self.values(), **overrides})


class ModelParams(Declarations):
    """The parameters of every trained model."""

    feature_columns: Declared[Sequence[str] | None] = declared(
        "Columns to predict from, in the order of the model's inputs.", names, default=None
    )
    label_columns: Declared[Sequence[str] | None] = declared(
        "Columns that the model learned to predict.", names, default=None, aliases=("LabelColoumns",)
    )
    output_cols: Declared[Sequence[str] | None] = declared(
        "Columns that transform adds, one per output; by default <label>__output.", names, default=None
    )
    output_types: Declared[Sequence[str] | None] = declared(
        "The type of every output: 'auto', 'vector', 'array', 'scalar', 'label', or a Spark data type such as "
        "'array<float>' or 'struct<no float, yes float>'.",
        output_type_names,
        default=None,
    )
    prediction_fn: Declared[Callable[..., object] | None] = declared(
        "Function of (model, *inputs), or of (model, inputs) for Keras, that replaces the call of the model and "
        "returns the outputs.",
        callable_object,
        default=None,
    )
    run_id: Declared[str | None] = declared("The run that trained the model.", text, default=None)
    inference_batch_size: Declared[int] = declared("Rows per prediction batch.", positive_integer, default=1024)
