"""A training in the MLflow run that is active: parameters, metrics by epoch, and the model."""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import pyarrow as pa
    from mlflow.models import ModelSignature

    from sparkhvd.data.schema.data_schema import ColumnSpec
    from sparkhvd.estimators.models import pyfunc
    from sparkhvd.estimators.models.model import TrainedModel
    from sparkhvd.estimators.reports import EpochRecord

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_TEXT_LIMIT = 500  # MLflow refuses parameters that are longer
_PART_SIGNS = (("", "train"), ("val_", "validation"))
_TAG = "sparkhvd.run_id"  # marks an MLflow run that holds a training
_PARENT_TAG = "mlflow.parentRunId"  # MLflow's own


def active_run() -> str | None:
    """The id of the MLflow run that is active in this thread."""
    mlflow = sys.modules.get("mlflow")  # who has an active run has imported it
    found = None if mlflow is None else mlflow.active_run()
    return None if found is None else str(found.info.run_id)


def cross_validation_part() -> str | None:
    """Which part of a ``CrossValidator`` the call comes from, such as ``fold 1 of 3``; None outside of one.

    Spark says it nowhere but in the variables of its loop; where these are others, the runs have MLflow's names.
    """
    frame = sys._getframe(1)  # noqa: SLF001  (the way to look at callers)
    while frame is not None and not (
        frame.f_code.co_name == "_fit" and frame.f_globals.get("__name__") == "pyspark.ml.tuning"
    ):
        frame = frame.f_back  # type: ignore[assignment]  # the last one has none
    if frame is None or not isinstance(fold := frame.f_locals.get("i"), int):
        return None
    return "all rows" if "bestIndex" in frame.f_locals else f"fold {fold + 1} of {frame.f_locals.get('nFolds')}"


def track(model: TrainedModel, params: Mapping[str, Any], parent: str | None = None, name: str | None = None) -> None:
    """Write a training to the active MLflow run; nothing happens without one.

    Every further training in one run (the fits of a CrossValidator) gets a run of its own inside it. A server that
    cannot be reached costs a warning, not the model.

    Args:
        model: what was trained.
        params: with what.
        parent: the run of another thread that this training is part of, where this thread has none.
        name: of a run that is made for this training; None leaves it to MLflow.
    """
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or (parent is None and active_run() is None):
        return
    shown = {name: _shown(name, value) for name, value in params.items() if value is not None}
    with _warned(), ExitStack() as opened:
        if active_run() is not None:
            opened.enter_context(_run_for(mlflow, shown, name))
        elif (found := mlflow.get_run(parent).info).status == "RUNNING":
            tags = {_PARENT_TAG: found.run_id}
            opened.enter_context(mlflow.start_run(experiment_id=found.experiment_id, tags=tags, run_name=name))
        else:
            return
        mlflow.set_tag(_TAG, params.get("run_id") or "")
        for write in (
            partial(mlflow.log_params, shown),
            partial(_log_history, mlflow, model.trained.history),
            partial(log_model, model),
        ):
            with _warned():
                write()


def _run_for(mlflow: Any, shown: Mapping[str, str], name: str | None) -> AbstractContextManager[object]:
    """The active run, or one inside it where that holds a training or other values of the parameters already."""
    known = mlflow.get_run(mlflow.active_run().info.run_id).data
    differs = any(known.params.get(name, value) != value for name, value in shown.items())
    if _TAG in known.tags or differs:
        return cast("AbstractContextManager[object]", mlflow.start_run(nested=True, run_name=name))
    return nullcontext()


@contextmanager
def _warned() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what MLflow and its servers raise is theirs
        logger.warning("The training could not be written to MLflow: %s: %s", type(error).__name__, error)


def _log_history(mlflow: Any, history: Iterable[EpochRecord]) -> None:
    for record in history:
        values = {f"{sign}{name}": v for sign, part in _PART_SIGNS for name, v in getattr(record, part).items()}
        mlflow.log_metrics({**values, "rows_per_second": record.rows_per_second}, step=record.epoch)


def log_model(model: TrainedModel, name: str = "model") -> None:
    """Write a model to the active MLflow run, as one that ``mlflow.pyfunc.load_model`` opens without Spark."""
    import mlflow.pyfunc  # noqa: PLC0415  (optional)

    from sparkhvd.estimators.models import pyfunc  # noqa: PLC0415  (it needs pyarrow)

    with tempfile.TemporaryDirectory(prefix="sparkhvd-mlflow-") as folder:
        data = Path(folder, "sparkhvd")
        data.mkdir()
        pyfunc.write_folder(model, data)
        signature = _signature(pyfunc.load(data))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*An input example was not provided")  # there are no rows to show
            mlflow.pyfunc.log_model(
                name=name,
                loader_module="sparkhvd.estimators.models.pyfunc",
                data_path=str(data),
                pip_requirements=requirements(model.plugin),
                signature=signature,
            )


def _signature(model: pyfunc.PandasModel) -> ModelSignature:
    """The columns that the model takes and gives.

    A column of numbers takes numbers of any type, as ``transform`` does; MLflow would refuse whole numbers for a column
    of real ones. The field of a struct may also come in a column of dicts.
    """
    from mlflow.models import ModelSignature  # noqa: PLC0415  (optional)
    from mlflow.types import ColSpec, DataType, Schema  # noqa: PLC0415
    from mlflow.types.schema import AnyType  # noqa: PLC0415

    from sparkhvd.estimators.models.pyfunc import table_columns  # noqa: PLC0415

    def kind(column: ColumnSpec) -> Any:
        return DataType.string if column.dtype == "str" and column.kind == "scalar" else AnyType()  # type: ignore[no-untyped-call]

    inputs: list[Any] = [ColSpec(kind(column), name, required="." not in name) for name, column in model.features]
    outputs: list[Any] = [
        ColSpec(_output_type(of), name)
        for column, arrow in zip(model.outputs, model.types, strict=True)
        for name, of in table_columns(column, arrow)
    ]
    return ModelSignature(Schema(inputs), Schema(outputs))


def _output_type(arrow: pa.DataType) -> Any:
    """MLflow's type of an output column."""
    import pyarrow as pa  # noqa: PLC0415  (heavy)
    from mlflow.types import DataType  # noqa: PLC0415
    from mlflow.types.schema import Array  # noqa: PLC0415

    if pa.types.is_list(arrow):
        return Array(_output_type(arrow.value_type))
    names = {"double": "double", "float": "float", "bool": "boolean", "int64": "long", "string": "string"}
    return DataType[names.get(str(arrow), "integer")]


def requirements(plugin: str) -> list[str]:
    """What an environment needs to open a model of this plug-in: what is installed here, without Spark."""
    framework = plugin.split(".")[2]
    lightnings = ["lightning", "pytorch_lightning"]  # whichever is there; a module may be of either
    modules = {"torch": ["torch"], "lightning": ["torch", *lightnings]}.get(framework)
    if modules is None:
        import keras  # noqa: PLC0415  (a model of it is here)

        modules = ["keras", keras.config.backend()]
    found = [import_module(name) for name in ("sparkhvd", "pandas", *modules) if find_spec(name) is not None]
    # A version such as 2.9.0+cpu names a build that an index need not have.
    return [f"{module.__name__}=={module.__version__.partition('+')[0]}" for module in found]


def _shown(name: str, value: Any) -> str:
    """A parameter as text; of a network, what it is rather than all its layers, and of an environment the names."""
    if name == "backend_env":
        return ", ".join(sorted(value))
    text = _text(value)
    return text if len(text) <= _TEXT_LIMIT else f"{text[: _TEXT_LIMIT - 3]}..."


def _text(value: Any) -> str:
    """A value without addresses in memory."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if (url := getattr(value, "url", None)) is not None:
        return str(url)
    if hasattr(value, "parameters"):
        return type(value).__name__
    text = str(value)
    return getattr(value, "__qualname__", type(value).__name__) if _ADDRESS.search(text) else text
