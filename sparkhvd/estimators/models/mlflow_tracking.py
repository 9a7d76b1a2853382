"""Log a fit to the active MLflow run: parameters, metrics by epoch, and the model."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.training.worker import find_plugin

if TYPE_CHECKING:
    import pyarrow as pa
    from mlflow.entities import RunInfo
    from mlflow.models import ModelSignature
    from mlflow.types import DataType, TensorSpec
    from mlflow.types.schema import Array

    from sparkhvd.data.schema.data_schema import ColumnSpec
    from sparkhvd.estimators.models import pyfunc
    from sparkhvd.estimators.models.model import TrainedModel
    from sparkhvd.estimators.reports import EpochRecord

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_TEXT_LIMIT = 500  # MLflow rejects longer parameters
_METRIC_PREFIXES = (("", "train"), ("val_", "validation"))
_TAG = "sparkhvd.run_id"  # marks an MLflow run that holds a fit
_SPEED = "rows_per_second"
_AUTOLOG_TAG = "estimator_class"  # set by MLflow's automatic logging of Spark ML
# The codes of MLflow's errors that concern the server and not a value.
_SERVER_FAILURES = frozenset({"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"})
_PARENT_TAG = "mlflow.parentRunId"  # defined by MLflow


def active_run() -> str | None:
    """Return the id of the MLflow run that is active in this thread."""
    mlflow = sys.modules.get("mlflow")  # a run can only be active once mlflow is imported
    run = None if mlflow is None else mlflow.active_run()
    return None if run is None else str(run.info.run_id)


def cross_validation_part() -> str | None:
    """Return the part of a ``CrossValidator`` that calls this function, such as ``fold 1 of 3``; None outside of one.

    Spark keeps the part only in local variables. If a Spark version names them differently, MLflow chooses the names of
    the runs.
    """
    frame = _frame_of_tuning()
    if frame is None or not isinstance(fold := frame.f_locals.get("i"), int):
        return None
    return "all rows" if "bestIndex" in frame.f_locals else f"fold {fold + 1} of {frame.f_locals.get('nFolds')}"


def is_in_tuning() -> bool:
    """Return whether a ``CrossValidator`` or ``TrainValidationSplit`` calls this function."""
    return _frame_of_tuning() is not None


def _frame_of_tuning() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (there is no public way to inspect callers)
    while frame is not None and not (
        frame.f_code.co_name == "_fit" and frame.f_globals.get("__name__") == "pyspark.ml.tuning"
    ):
        frame = frame.f_back
    return frame


@dataclass(frozen=True)
class SearchPart:
    """The part of a search that a fit trains, such as a fold of a ``CrossValidator``.

    Attributes:
        name: the name of its MLflow run.
        params: parameters to log in addition to those of the fit; they take precedence.
        is_resumed: whether a later fit of the same run continues its MLflow run.
    """

    name: str | None = None
    params: Mapping[str, object] = field(default_factory=dict)
    is_resumed: bool = False


def track(
    model: TrainedModel,
    params: Mapping[str, object],
    parent: str | None = None,
    part: SearchPart = SearchPart(),
) -> None:
    """Log a fit to the active MLflow run, if there is one.

    Later fits in the same run, such as the fits of a CrossValidator, get nested runs of their own. If the server cannot
    be reached, a warning is logged and the fit still returns its model.

    Args:
        model: the trained model.
        params: the parameters of its training.
        parent: the run of another thread that this fit belongs to; used if this thread has no run.
        part: the part of a search that this fit trains.
    """
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or (parent is None and active_run() is None):
        return
    run_id = str(params.get("run_id") or "")
    texts = {name: _param_text(name, value) for name, value in {**params, **part.params}.items() if value is not None}
    with _failures_logged(), ExitStack() as stack:
        if active_run() is not None:
            stack.enter_context(_active_or_nested_run(mlflow, texts, part.name))
        elif (parent_info := mlflow.get_run(parent).info).status == "RUNNING":
            earlier = _earlier_run(mlflow, parent_info, run_id) if part.is_resumed else None
            tags = {_PARENT_TAG: parent_info.run_id}
            new = partial(mlflow.start_run, experiment_id=parent_info.experiment_id, tags=tags, run_name=part.name)
            stack.enter_context(new() if earlier is None else mlflow.start_run(run_id=earlier))
        else:
            return
        run = mlflow.get_run(mlflow.active_run().info.run_id)
        mlflow.set_tag(_TAG, run_id)
        new_texts = {name: text for name, text in texts.items() if name not in run.data.params}
        # Without the tag, the user has logged the metrics of the run.
        earlier_fit = run.info.run_id if _TAG in run.data.tags else None
        for write in (
            partial(_log_accepted, mlflow.log_params, new_texts, "parameters"),
            partial(_log_history, mlflow, model.trained.history, earlier_fit),
            partial(log_model, model, step=_epoch_of_model(model.trained.history, params)),
        ):
            with _failures_logged():
                write()


def _earlier_run(mlflow: ModuleType, parent: RunInfo, run_id: str) -> str | None:
    """Return the MLflow run of an earlier fit of a run within the same parent; None if there is none."""
    condition = f"tags.`{_PARENT_TAG}` = '{parent.run_id}'"
    quotes = [quote for quote in ("'", '"') if quote not in run_id]
    if quotes:  # the syntax of conditions has no way to escape them
        condition += f" and tags.`{_TAG}` = {quotes[0]}{run_id}{quotes[0]}"
    found = mlflow.search_runs([parent.experiment_id], condition, output_format="list")
    return next((str(run.info.run_id) for run in found if run.data.tags.get(_TAG) == run_id), None)


def _active_or_nested_run(
    mlflow: ModuleType, texts: Mapping[str, str], name: str | None
) -> AbstractContextManager[object]:
    """Return the active run, or a nested run if the active one holds a fit or other values of the parameters.

    ``mlflow.autolog()`` has written this fit's parameters to the active run, in a form of its own.
    """
    logged = mlflow.get_run(mlflow.active_run().info.run_id).data
    is_autologged = logged.tags.get(_AUTOLOG_TAG, "").startswith("sparkhvd.")
    differs = not is_autologged and any(logged.params.get(name, value) != value for name, value in texts.items())
    if _TAG in logged.tags or differs:
        nested: AbstractContextManager[object] = mlflow.start_run(nested=True, run_name=name)
        return nested
    return nullcontext()


@contextmanager
def _failures_logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - MLflow and its servers may raise anything
        logger.warning("The training could not be written to MLflow: %s: %s", type(error).__name__, error)


def _log_history(mlflow: ModuleType, history: Iterable[EpochRecord], earlier_fit: str | None) -> None:
    """Log the metrics by epoch, except those that ``earlier_fit``, the MLflow run of a resumed fit, already has."""
    refused: set[str] = set()
    metrics = [] if earlier_fit is None else mlflow.MlflowClient().get_metric_history(earlier_fit, _SPEED)
    logged = {metric.step for metric in metrics}
    for record in history:
        if record.epoch in logged:
            continue
        values = {
            f"{prefix}{name}": v for prefix, part in _METRIC_PREFIXES for name, v in getattr(record, part).items()
        }
        values[_SPEED] = record.rows_per_second
        accepted = {name: value for name, value in values.items() if name not in refused}
        refused |= _log_accepted(partial(mlflow.log_metrics, step=record.epoch), accepted, "metrics")


def _log_accepted(log: Callable[[Mapping[str, Any]], object], values: Mapping[str, Any], what: str) -> set[str]:
    """Log values; return the names of those that MLflow refuses, after a warning about them.

    Args:
        log: logs values by name, all or none of them.
        values: the values.
        what: what they are, for the warning.
    """
    try:
        log(values)
    except Exception as error:
        if isinstance(error, OSError) or getattr(error, "error_code", "") in _SERVER_FAILURES:
            raise
        refusals = {name: refusal for name, value in values.items() if (refusal := _refusal(log, name, value))}
        if len(refusals) == len(values):
            raise
        logger.warning(
            "MLflow refuses the %s %s, and the others are logged: %s",
            what,
            ", ".join(map(repr, refusals)),
            next(iter(refusals.values()), error),
        )
        return set(refusals)
    return set()


def _refusal(log: Callable[[Mapping[str, Any]], object], name: str, value: object) -> str:
    """Log one value; return the reason if MLflow refuses it, else an empty text."""
    try:
        log({name: value})
    except Exception as error:  # noqa: BLE001 - MLflow and its servers may raise anything
        return str(error) or type(error).__name__
    return ""


def _epoch_of_model(history: Sequence[EpochRecord], params: Mapping[str, object]) -> int:
    """Return the epoch of the returned model: the best by ``checkpoints``, or else the last; ignores callbacks."""
    policy = params.get("checkpoints")
    best = policy.best_epoch(history) if isinstance(policy, Checkpoints) else None
    return history[-1 if best is None else best].epoch if history else 0


def log_model(model: TrainedModel, name: str = "model", step: int = 0) -> None:
    """Log a model to the active MLflow run; ``mlflow.pyfunc.load_model`` opens it without Spark.

    Args:
        model: the model.
        name: its name in MLflow.
        step: the epoch of the run's metrics that MLflow 3 assigns to the model.
    """
    import mlflow.pyfunc  # noqa: PLC0415  (optional)

    from sparkhvd.estimators.models import pyfunc  # noqa: PLC0415  (it needs pyarrow)

    with tempfile.TemporaryDirectory(prefix="sparkhvd-mlflow-") as folder:
        data = Path(folder, "sparkhvd")
        data.mkdir()
        pyfunc.write_folder(model, data)
        signature = _signature(pyfunc.load(data))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*An input example was not provided")  # there are no rows to log
            has_step = "step" in inspect.signature(mlflow.pyfunc.log_model).parameters
            mlflow.pyfunc.log_model(
                name=name,
                **({"step": step} if has_step else {}),
                loader_module="sparkhvd.estimators.models.pyfunc",
                data_path=str(data),
                pip_requirements=requirements(model.plugin),
                signature=signature,
            )


def _signature(model: pyfunc.PandasModel) -> ModelSignature:
    """Return the model's input and output columns.

    Numeric columns are declared as ``AnyType``, because ``transform`` accepts numbers of any type, but MLflow would
    reject integers for a float column. A struct field may also come from a column of dicts.
    """
    from mlflow.models import ModelSignature  # noqa: PLC0415  (optional)
    from mlflow.types import ColSpec, DataType, Schema  # noqa: PLC0415
    from mlflow.types.schema import AnyType  # noqa: PLC0415

    from sparkhvd.estimators.models.pyfunc import table_columns  # noqa: PLC0415

    def input_type(column: ColumnSpec) -> DataType | AnyType:
        return DataType.string if column.dtype == "str" and column.kind == "scalar" else AnyType()  # type: ignore[no-untyped-call]

    inputs: list[ColSpec | TensorSpec] = [
        ColSpec(input_type(column), name, required="." not in name) for name, column in model.features
    ]
    # MLflow drops columns that the signature lacks. AnyType columns are optional.
    structs = dict.fromkeys(name.partition(".")[0] for name, _ in model.features if "." in name)
    inputs += [ColSpec(AnyType(), name, required=False) for name in structs]  # type: ignore[no-untyped-call]
    outputs: list[ColSpec | TensorSpec] = [
        ColSpec(_output_type(title_type), name)
        for column, arrow in zip(model.outputs, model.types, strict=True)
        for name, title_type in table_columns(column, arrow)
    ]
    return ModelSignature(Schema(inputs), Schema(outputs))


def _output_type(arrow: pa.DataType) -> DataType | Array:
    """Return the MLflow type of an output column."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)
    from mlflow.types import DataType  # noqa: PLC0415
    from mlflow.types.schema import Array  # noqa: PLC0415

    if pa.types.is_list(arrow):
        return Array(_output_type(arrow.value_type))
    names = {"double": "double", "float": "float", "bool": "boolean", "int64": "long", "string": "string"}
    return DataType[names.get(str(arrow), "integer")]


def requirements(plugin: str) -> list[str]:
    """Return the requirements for opening a model of this plug-in: the versions installed here, without Spark."""
    packages = ("sparkhvd", "pandas", *find_plugin(plugin).packages())
    installed = [import_module(name) for name in packages if find_spec(name) is not None]
    # A version such as 2.9.0+cpu names a build that package indexes may not have.
    return [f"{module.__name__}=={module.__version__.partition('+')[0]}" for module in installed]


def _param_text(name: str, value: object) -> str:
    """Return a parameter as text: the class name of a network, and only the names of environment variables."""
    if name == "backend_env" and isinstance(value, Mapping):
        return ", ".join(sorted(value))
    text = _text_without_addresses(value)
    return text if len(text) <= _TEXT_LIMIT else f"{text[: _TEXT_LIMIT - 3]}..."


def _text_without_addresses(value: object) -> str:
    """Return a value as text, with names in place of memory addresses."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text_without_addresses, value))}]"
    if (url := getattr(value, "url", None)) is not None:
        return str(url)
    if hasattr(value, "parameters"):
        return type(value).__name__
    text = str(value)
    return getattr(value, "__qualname__", type(value).__name__) if _ADDRESS.search(text) else text
