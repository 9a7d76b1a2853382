"""A trained model without Spark: a folder that gives predictions for pandas tables.

``write_folder`` makes one of a Transformer; MLflow loads it by ``_load_pyfunc``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkhvd.data.schema.data_schema import ColumnSpec
from sparkhvd.errors import SchemaError
from sparkhvd.estimators.models.feature_matching import pandas_column_names
from sparkhvd.estimators.models.outputs import OutputColumn, encode_output, spark_type
from sparkhvd.estimators.models.pandas_columns import feature_array
from sparkhvd.estimators.plugin import Inference, Predicted, Predictor
from sparkhvd.estimators.training.worker import find_plugin

if TYPE_CHECKING:
    import pandas as pd

    from sparkhvd.estimators.models.model import TrainedModel

_COLUMNS, _TYPES, _FUNCTION, _MODEL = "columns.json", "outputs.arrow", "prediction_fn.pkl", "model"


def write_folder(model: TrainedModel, folder: Path) -> None:
    """Write what ``load`` reads into an empty folder."""
    from sparkhvd.estimators.models.model import pickle_function  # noqa: PLC0415  (that module needs pyspark)

    (folder / _MODEL).mkdir()
    for file in model.trained.files:
        with (folder / _MODEL / file.path.rpartition("/")[2]).open("wb") as target:
            file.copy_to(target, model.trained.store)
    features, outputs = model.trained.schema.of("feature"), model.output_columns()
    content = {
        "plugin": model.plugin,
        "features": [asdict(column) for column in features],
        "columns": pandas_column_names(model.getOrDefault("feature_columns"), features),
        "outputs": [asdict(column) for column in outputs],
        "batch_size": model.getOrDefault("inference_batch_size"),
    }
    (folder / _COLUMNS).write_text(json.dumps(content))
    types = pa.schema([(column.name, _arrow_type(column)) for column in outputs])
    (folder / _TYPES).write_bytes(types.serialize().to_pybytes())
    (folder / _FUNCTION).write_bytes(pickle_function(model.getOrDefault("prediction_fn")))


def load(folder: Path) -> PandasModel:
    """The model of ``write_folder``. Runs the code that was saved with it: open only what you trust."""
    content = json.loads((folder / _COLUMNS).read_text())
    function = (folder / _FUNCTION).read_bytes()
    inference = Inference(function=cloudpickle.loads(function) if function else None)
    features = [ColumnSpec(**_tuples(column)) for column in content["features"]]
    return PandasModel(
        find_plugin(content["plugin"]).predictor(folder / _MODEL, inference),
        tuple(zip(content["columns"], features, strict=True)),
        tuple(OutputColumn(**_tuples(column)) for column in content["outputs"]),
        tuple(pa.ipc.read_schema(pa.py_buffer((folder / _TYPES).read_bytes())).types),
        content["batch_size"],
    )


def _load_pyfunc(path: str) -> PandasModel:
    """The entry that MLflow calls."""
    return load(Path(path))


@dataclass(frozen=True)
class PandasModel:
    """A trained model that takes and gives pandas tables.

    Attributes:
        predictor: the framework's model.
        features: the columns as the table has them (``column.field`` is also found in a column of dicts or Rows), and
            as the model knows them.
        outputs: the columns that it gives.
        types: their types in Arrow.
        batch_size: rows that are predicted at once.
    """

    predictor: Predictor
    features: tuple[tuple[str, ColumnSpec], ...]
    outputs: tuple[OutputColumn, ...]
    types: tuple[pa.DataType, ...]
    batch_size: int

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:  # noqa: ARG002
        """What ``transform`` gives: a column per output, one per field of a struct; vectors are arrays of numpy's.

        What a prediction function gives by names is there by them, also where no ``output_types`` name them.

        Raises:
            SchemaError: a column is missing.
            DataError: a column holds NULL, and the training had nothing to put there (``fill``).
        """
        import pandas as pd  # noqa: PLC0415

        arrays = {column.name: feature_array(_found(model_input, name), column) for name, column in self.features}
        found: dict[str, list[Any]] = {}
        for start in range(0, max(1, len(model_input)), self.batch_size):
            piece = {name: array[start : start + self.batch_size] for name, array in arrays.items()}
            for output, column, kind in zip(self.predictor.predict(piece), self.outputs, self.types, strict=True):
                for title, values in _columns(output, column, kind).items():
                    found.setdefault(title, []).append(values)
        joined = {title: np.concatenate(parts) for title, parts in found.items()}
        return pd.DataFrame({title: _series(array) for title, array in joined.items()}, index=model_input.index)


def _found(table: pd.DataFrame, name: str) -> pd.Series[Any]:
    """A column, or the field of a column of dicts or Rows.

    Raises:
        SchemaError: there is none.
    """
    if name in table:
        return table[name]
    for place in (place for place, letter in enumerate(name) if letter == "."):
        if (top := name[:place]) in table:
            return table[top].map(lambda value, field=name[place + 1 :], top=top: _field(value, field, top))
    raise SchemaError(f"There is no column {name!r}; the table has {list(table.columns)}.")


def _field(value: Any, field: str, top: str) -> Any:
    """The value of a field, which may lie in a struct inside; NULL of a struct that is NULL."""
    if not hasattr(value, "keys") and not hasattr(value, "asDict"):
        return None
    fields = value if hasattr(value, "keys") else value.asDict()
    if field in fields:
        return fields[field]
    for place in (place for place, letter in enumerate(field) if letter == "."):
        if field[:place] in fields:
            return _field(fields[field[:place]], field[place + 1 :], top)
    raise SchemaError(f"Column {top!r} has no field {field!r}; it has {list(fields)}.")


def _tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(each) if isinstance(each, list) else each for name, each in content.items()}


def _arrow_type(column: OutputColumn) -> pa.DataType:
    """The type of a column; those that no one asked for are known without Spark."""
    known = {"double": pa.float64(), "float": pa.float32(), "array<double>": pa.list_(pa.float64())}
    if column.type in known:
        return known[column.type]
    from pyspark.sql.pandas.types import to_arrow_type  # noqa: PLC0415  (where a model is written, not where it opens)

    return to_arrow_type(spark_type(column))


def _columns(output: Predicted, column: OutputColumn, kind: pa.DataType) -> dict[str, npt.NDArray[Any]]:
    """An output of some rows, as one array by name; several of a struct."""
    if isinstance(output, Mapping) and not pa.types.is_struct(kind):
        arrays = {f"{column.name}.{field}": np.asarray(values) for field, values in output.items()}
        return {
            title: array.reshape(len(array)) if array.size == len(array) else array for title, array in arrays.items()
        }
    found = encode_output(output, column, kind)
    if pa.types.is_struct(kind):
        return {f"{column.name}.{kind.field(i).name}": _numpy(found.field(i)) for i in range(kind.num_fields)}
    return {column.name: _numpy(found)}


def table_columns(column: OutputColumn, kind: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """The columns of a table that an output becomes, with their types."""
    if pa.types.is_struct(kind):
        return [(f"{column.name}.{kind.field(i).name}", kind.field(i).type) for i in range(kind.num_fields)]
    return [(column.name, kind)]


def _numpy(found: pa.Array) -> npt.NDArray[Any]:
    """Rows of numbers as one block."""
    sizes, element = [len(found)], found
    while pa.types.is_list(element.type):
        element = element.flatten()
        sizes.append(len(element) // max(1, math.prod(sizes)))
    values: npt.NDArray[Any] = element.to_numpy(zero_copy_only=False)
    return values.reshape(sizes)


def _series(array: npt.NDArray[Any]) -> Any:
    return array if array.ndim == 1 else list(array)
