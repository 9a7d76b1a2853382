"""A training in the MLflow run that is active: parameters, metrics by epoch, and the model."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkhvd.estimators.model import TrainedModel

logger = logging.getLogger(__name__)

_TEXT_LIMIT = 500  # MLflow refuses parameters that are longer
_PART_SIGNS = (("", "train"), ("val_", "validation"))


def track(model: TrainedModel, params: Mapping[str, Any]) -> None:
    """Write a training to the active MLflow run; nothing happens without one.

    A server that cannot be reached costs a warning, not the model.
    """
    mlflow = sys.modules.get("mlflow")  # who has an active run has imported it
    if mlflow is None or mlflow.active_run() is None:
        return
    try:
        mlflow.log_params({name: _shown(value) for name, value in params.items() if value is not None})
        for record in model.trained.history:
            values = {f"{sign}{name}": v for sign, part in _PART_SIGNS for name, v in getattr(record, part).items()}
            mlflow.log_metrics({**values, "rows_per_second": record.rows_per_second}, step=record.epoch)
        log_model(model)
    except Exception as error:  # noqa: BLE001 - what MLflow and its servers raise is theirs
        logger.warning("The training could not be written to MLflow: %s: %s", type(error).__name__, error)


def log_model(model: TrainedModel, name: str = "model") -> None:
    """Write a model to the active MLflow run, as one that ``mlflow.pyfunc.load_model`` opens without Spark."""
    import mlflow.pyfunc  # noqa: PLC0415  (optional)

    from sparkhvd.estimators.native import write_folder  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="sparkhvd-mlflow-") as folder:
        data = Path(folder, "sparkhvd")
        data.mkdir()
        write_folder(model, data)
        mlflow.pyfunc.log_model(
            name=name,
            loader_module="sparkhvd.estimators.native",
            data_path=str(data),
            pip_requirements=["sparkhvd"],
        )


def _shown(value: Any) -> str:
    """A parameter as text; of a network, what it is rather than all its layers."""
    text = getattr(value, "url", None) or (type(value).__name__ if hasattr(value, "parameters") else str(value))
    return text if len(text) <= _TEXT_LIMIT else f"{text[: _TEXT_LIMIT - 3]}..."
