"""Log a fit to the active MLflow run: parameters, metrics by epoch, and the model."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sparkhvd.estimators.params.policies import Checkpoints
from sparkhvd.estimators.training.worker import find_plugin

if TYPE_CHECKING:
    import pyarrow as pa
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
    frame = sys._getframe(1)  # noqa: SLF001  (there is no public way to inspect callers)
    while frame is not None and not (
        frame.f_code.co_name == "_fit" and frame.f_globals.get("__name__") == "pyspark.ml.tuning"
    ):
        frame = frame.f_back  # type: ignore[assignment]  # None after the outermost frame
    if frame is None or not isinstance(fold := frame.f_locals.get("i"), int):
        return None
    return "all rows" if "bestIndex" in frame.f_locals else f"fold {fold + 1} of {frame.f_locals.get('nFolds')}"


def track(
    model: TrainedModel, params: Mapping[str, object], parent: str | None = None, name: str | None = None
) -> None:
    """Log a fit to the active MLflow run, if there is one.

    Later fits in the same run, such as the fits of a CrossValidator, get nested runs of their own. If the server cannot
    be reached, a warning is logged and the fit still returns its model.

    Args:
        model: the trained model.
        params: the parameters of its training.
        parent: the run of another thread that this fit belongs to; used if this thread has no run.
        name: name of a nested run for this fit; None leaves it to MLflow.
    """
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or (parent is None and active_run() is None):
        return
    texts = {name: _param_text(name, value) for name, value in params.items() if value is not None}
    with _failures_logged(), ExitStack() as run:
        if active_run() is not None:
            run.enter_context(_active_or_nested_run(mlflow, texts, name))
        elif (parent_info := mlflow.get_run(parent).info).status == "RUNNING":
            tags = {_PARENT_TAG: parent_info.run_id}
            run.enter_context(mlflow.start_run(experiment_id=parent_info.experiment_id, tags=tags, run_name=name))
        else:
            return
        mlflow.set_tag(_TAG, params.get("run_id") or "")
        for write in (
            partial(mlflow.log_params, texts),
            partial(_log_history, mlflow, model.trained.history),
            partial(log_model, model, step=_epoch_of_model(model.trained.history, params)),
        ):
            with _failures_logged():
                write()


def _active_or_nested_run(
    mlflow: ModuleType, texts: Mapping[str, str], name: str | None
) -> AbstractContextManager[object]:
    """Return the active run, or a nested run if the active one holds a fit or other values of the parameters."""
    logged = mlflow.get_run(mlflow.active_run().info.run_id).data
    differs = any(logged.params.get(name, value) != value for name, value in texts.items())
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


def _log_history(mlflow: ModuleType, history: Iterable[EpochRecord]) -> None:
    for record in history:
        values = {
            f"{prefix}{name}": v for prefix, part in _METRIC_PREFIXES for name, v in getattr(record, part).items()
        }
        mlflow.log_metrics({**values, "rows_per_second": record.rows_per_second}, step=record.epoch)


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
