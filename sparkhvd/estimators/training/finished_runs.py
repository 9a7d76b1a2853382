"""The results of finished runs with ``resume="auto"``: a fit of the same run returns its result without any ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparkhvd._util.counts import counted
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.errors import StoreError
from sparkhvd.estimators.training import checkpoint
from sparkhvd.estimators.training.job_files import StoredFile
from sparkhvd.estimators.training.logs.history import record_from_json
from sparkhvd.estimators.training.worker import TrainResult
from sparkhvd.store import Store, layout

logger = logging.getLogger(__name__)


def save(store: Store, run_id: str, epochs: int, result: TrainResult) -> None:
    """Save the result of a fit of ``epochs`` epochs, and the path of its last checkpoint; log a failure."""
    content = {
        "epochs": epochs,
        "files": {file.path: file.sha256 for file in result.files},
        "schema": [asdict(column) for column in result.schema.columns],
        "shapes": [list(shape) for shape in result.shapes],
        "history": [record.to_json() for record in result.history],
    }
    try:
        content["checkpoint"] = checkpoint.latest(store, run_id)
        with store.open(layout.result_path(run_id), "wb") as file:
            file.write(json.dumps(content).encode())
    except StoreError as error:  # the model is trained and stored
        logger.warning("The result of run %s cannot be saved, so a later fit needs ranks again: %s", run_id, str(error))


def find(store: Store, run_id: str, epochs: int) -> TrainResult | None:
    """Return the result of an earlier fit of the run with the same number of epochs; None if missing or out of date.

    Args:
        store: the Store of the run.
        run_id: an id that determines everything about the model except the number of epochs.
        epochs: the number of epochs to train for.
    """
    content = _content(store, run_id)
    if content is None or content["epochs"] != epochs or content["checkpoint"] != checkpoint.latest(store, run_id):
        return None
    files = tuple(StoredFile(path, digest) for path, digest in content["files"].items())
    if not all(store.exists(file.path) for file in files):
        return None
    schema = DataSchema(tuple(ColumnSpec(**_tuples(column)) for column in content["schema"]))
    history = tuple(record_from_json(record) for record in content["history"])
    logger.info("run %s has already finished after %s; its model is returned", run_id, counted(len(history), "epoch"))
    return TrainResult(history, files, None, schema, [tuple(shape) for shape in content["shapes"]])


def _content(store: Store, run_id: str) -> dict[str, Any] | None:
    path = layout.result_path(run_id)
    if not store.exists(path):
        return None
    try:
        with store.open(path, "rb") as file:
            content: dict[str, Any] = json.loads(file.read())
    except (StoreError, ValueError) as error:
        logger.warning("The result of run %s cannot be read, so its ranks compute it again: %s", run_id, str(error))
        return None
    return content


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    """Restore the tuples that JSON turned into lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
