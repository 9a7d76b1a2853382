"""A trained model without Spark: a folder that gives predictions for pandas tables.

``write_folder`` makes one of a Transformer; MLflow loads it by ``_load_pyfunc``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from sparkhvd.data.schema import ColumnSpec
from sparkhvd.errors import SchemaError
from sparkhvd.estimators.plugin import Inference, Predictor
from sparkhvd.estimators.worker import find_plugin

if TYPE_CHECKING:
    import pandas as pd

    from sparkhvd.estimators.model import TrainedModel

_COLUMNS, _FUNCTION, _MODEL = "columns.json", "prediction_fn.pkl", "model"


def write_folder(model: TrainedModel, folder: Path) -> None:
    """Write what ``load`` reads into an empty folder."""
    from sparkhvd.estimators.model import pickled_function  # noqa: PLC0415  (that module needs pyspark)

    (folder / _MODEL).mkdir()
    for file in model.trained.files:
        with (folder / _MODEL / file.path.rpartition("/")[2]).open("wb") as target:
            file.copy_to(target, model.trained.store)
    features = model.trained.schema.of("feature")
    chosen = model.getOrDefault("feature_columns")
    content = {
        "plugin": model.plugin,
        "features": [asdict(column) for column in features],
        "columns": list(chosen) if len(chosen) == len(features) else [column.name for column in features],
        "outputs": model.output_names,
    }
    (folder / _COLUMNS).write_text(json.dumps(content))
    (folder / _FUNCTION).write_bytes(pickled_function(model.getOrDefault("prediction_fn")))


def load(folder: Path) -> PandasModel:
    """The model of ``write_folder``. Runs the code that was saved with it: open only what you trust."""
    content = json.loads((folder / _COLUMNS).read_text())
    function = (folder / _FUNCTION).read_bytes()
    inference = Inference(function=cloudpickle.loads(function) if function else None)
    features = [_column(column) for column in content["features"]]
    return PandasModel(
        find_plugin(content["plugin"]).predictor(folder / _MODEL, inference),
        tuple(zip(content["columns"], features, strict=True)),
        tuple(content["outputs"]),
    )


def _load_pyfunc(path: str) -> PandasModel:
    """The entry that MLflow calls."""
    return load(Path(path))


@dataclass(frozen=True)
class PandasModel:
    """A trained model that takes and gives pandas tables.

    Attributes:
        predictor: the framework's model.
        features: the columns as the table has them, and as the model knows them.
        outputs: the columns that it gives.
    """

    predictor: Predictor
    features: tuple[tuple[str, ColumnSpec], ...]
    outputs: tuple[str, ...]

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:  # noqa: ARG002
        """One column per output: numbers for one value per row, else arrays.

        Raises:
            SchemaError: a column is missing.
        """
        import pandas as pd  # noqa: PLC0415

        missing = [name for name, _ in self.features if name not in model_input]
        if missing:
            raise SchemaError(f"There is no column {missing[0]!r}; the table has {list(model_input.columns)}.")
        arrays = {column.name: _array(model_input[name], column) for name, column in self.features}
        found = {}
        for name, output in zip(self.outputs, self.predictor.predict(arrays), strict=True):
            parts = (
                {f"{name}.{field}": v for field, v in output.items()} if isinstance(output, Mapping) else {name: output}
            )
            found.update({title: _series(values) for title, values in parts.items()})
        return pd.DataFrame(found, index=model_input.index)


def _column(content: dict[str, Any]) -> ColumnSpec:
    tuples: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in content.items()}
    return ColumnSpec(**tuples)


def _array(series: pd.Series[Any], column: ColumnSpec) -> npt.NDArray[np.generic]:
    known = replace(column, shape=column.shape or ())
    rows = [np.asarray(getattr(value, "toArray", lambda value=value: value)()) for value in series]
    stacked = np.stack(rows) if rows else np.empty((0, *(known.shape or ())))
    return stacked.astype(column.dtype).reshape(len(series), *(known.shape or ()))


def _series(values: Any) -> Any:
    array = np.asarray(values)
    return array.reshape(len(array)) if array.size == len(array) else list(array)
