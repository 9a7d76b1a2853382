"""A trained model without Spark: a folder with a model that takes and returns pandas DataFrames.

``write_folder`` writes the folder of a Transformer, and MLflow loads it with ``_load_pyfunc``.
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
from sparkhvd.estimators.models.outputs import OutputColumn, encode_output, spark_type, with_rows
from sparkhvd.estimators.models.pandas_columns import feature_array
from sparkhvd.estimators.plugin import Inference, Predicted, Predictor
from sparkhvd.estimators.training.worker import find_plugin

if TYPE_CHECKING:
    import pandas as pd

    from sparkhvd.estimators.models.model import TrainedModel

_COLUMNS, _TYPES, _FUNCTION, _MODEL = "columns.json", "outputs.arrow", "prediction_fn.pkl", "model"


def write_folder(model: TrainedModel, folder: Path) -> None:
    """Write the files for ``load`` to an empty folder."""
    from sparkhvd.estimators.models.model import pickle_function  # noqa: PLC0415  (that module needs pyspark)

    (folder / _MODEL).mkdir()
    for file in model.trained.files:
        with (folder / _MODEL / file.path.rpartition("/")[2]).open("wb") as target:
            file.copy_to(target, model.file_source)
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
    """Return the model that ``write_folder`` wrote. Loading runs code from the folder, so load only trusted folders."""
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
    """Load the model for MLflow, which calls this function by name."""
    return load(Path(path))


@dataclass(frozen=True)
class PandasModel:
    """A trained model that takes and returns pandas DataFrames.

    Attributes:
        predictor: the framework's model.
        features: the name of each feature's column in the DataFrame, and its spec from the training. A name such as
            ``column.field`` may also refer to a field in a column of dicts or Rows.
        outputs: the columns to return.
        types: the Arrow types of the outputs.
        batch_size: rows per prediction.
    """

    predictor: Predictor
    features: tuple[tuple[str, ColumnSpec], ...]
    outputs: tuple[OutputColumn, ...]
    types: tuple[pa.DataType, ...]
    batch_size: int

    def predict(self, model_input: pd.DataFrame, params: Mapping[str, object] | None = None) -> pd.DataFrame:  # noqa: ARG002
        """Return the outputs of ``transform``: a column per output or struct field; vectors are numpy arrays.

        Named values of a prediction function become columns, even if ``output_types`` does not name them.

        Raises:
            SchemaError: a column is missing.
            DataError: a column holds NULL and has no ``fill`` from the training.
        """
        import pandas as pd  # noqa: PLC0415

        arrays = {column.name: feature_array(_column(model_input, name), column) for name, column in self.features}
        parts_by_title: dict[str, list[npt.NDArray[np.generic]]] = {}
        for start in range(0, max(1, len(model_input)), self.batch_size):
            piece = {name: array[start : start + self.batch_size] for name, array in arrays.items()}
            count = min(self.batch_size, len(model_input) - start)
            for output, column, arrow_type in zip(self.predictor.predict(piece), self.outputs, self.types, strict=True):
                for title, values in _output_arrays(with_rows(output, column, count), column, arrow_type).items():
                    parts_by_title.setdefault(title, []).append(values)
        joined = {title: np.concatenate(parts) for title, parts in parts_by_title.items()}
        return pd.DataFrame({title: _series(array) for title, array in joined.items()}, index=model_input.index)


def _column(table: pd.DataFrame, name: str) -> pd.Series[Any]:
    """Return a column, or the field of a column of dicts or Rows.

    Raises:
        SchemaError: the table has neither, or several columns with this name.
    """
    if not table.columns.is_unique and (count := list(table.columns).count(name)) > 1:
        raise SchemaError(f"The table has {count} columns named {name!r}. Keep only one of them.")
    if name in table:
        return table[name]
    for dot in (index for index, letter in enumerate(name) if letter == "."):
        if (top := name[:dot]) in table:
            return table[top].map(lambda value, field=name[dot + 1 :], top=top: _field(value, field, top))
    raise SchemaError(f"There is no column {name!r}; the table has {list(table.columns)}.")


def _field(value: Any, field: str, top: str) -> object:
    """Return the value of a field, which may be in a nested struct; None if the struct is NULL."""
    if not hasattr(value, "keys") and not hasattr(value, "asDict"):
        return None
    fields = value if hasattr(value, "keys") else value.asDict()
    if field in fields:
        return fields[field]
    for dot in (index for index, letter in enumerate(field) if letter == "."):
        if field[:dot] in fields:
            return _field(fields[field[:dot]], field[dot + 1 :], top)
    raise SchemaError(f"Column {top!r} has no field {field!r}; it has {list(fields)}.")


def _tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


def _arrow_type(column: OutputColumn) -> pa.DataType:
    """Return the Arrow type of a column; the default types do not need Spark."""
    known = {"double": pa.float64(), "float": pa.float32(), "array<double>": pa.list_(pa.float64())}
    if column.type in known:
        return known[column.type]
    from pyspark.sql.pandas.types import to_arrow_type  # noqa: PLC0415  (needed to write a model, not to open one)

    return to_arrow_type(spark_type(column))


def _output_arrays(
    output: Predicted, column: OutputColumn, arrow_type: pa.DataType
) -> dict[str, npt.NDArray[np.generic]]:
    """Return an output as arrays by column title; a struct has several arrays."""
    if isinstance(output, Mapping) and not pa.types.is_struct(arrow_type):
        arrays = {f"{column.name}.{field}": np.asarray(values) for field, values in output.items()}
        return {
            title: array.reshape(len(array)) if array.size == len(array) else array for title, array in arrays.items()
        }
    encoded = encode_output(output, column, arrow_type)
    if pa.types.is_struct(arrow_type):
        return {
            f"{column.name}.{arrow_type.field(i).name}": _to_numpy(encoded.field(i))
            for i in range(arrow_type.num_fields)
        }
    return {column.name: _to_numpy(encoded)}


def table_columns(column: OutputColumn, arrow_type: pa.DataType) -> list[tuple[str, pa.DataType]]:
    """Return the titles and types of the table columns that an output becomes."""
    if pa.types.is_struct(arrow_type):
        return [
            (f"{column.name}.{arrow_type.field(i).name}", arrow_type.field(i).type)
            for i in range(arrow_type.num_fields)
        ]
    return [(column.name, arrow_type)]


def _to_numpy(array: pa.Array) -> npt.NDArray[np.generic]:
    """Return nested lists of numbers as one array."""
    sizes, element = [len(array)], array
    while pa.types.is_list(element.type):
        element = element.flatten()
        sizes.append(len(element) // max(1, math.prod(sizes)))
    values: npt.NDArray[np.generic] = element.to_numpy(zero_copy_only=False)
    return values.reshape(sizes)


def _series(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic] | list[npt.NDArray[np.generic]]:
    return array if array.ndim == 1 else list(array)
