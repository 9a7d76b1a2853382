"""The output of ``estimator.describe(df)``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparkhvd._util.counts import counted
from sparkhvd.data.read.batches import Arrays
from sparkhvd.data.schema.data_schema import ColumnSpec, DataSchema
from sparkhvd.estimators.params.fit_plan import FitPlan
from sparkhvd.estimators.plugin import Predicted
from sparkhvd.estimators.training.worker import find_plugin

_SHOWN_VALUES = 4


def description(estimator_name: str, plugin_name: str, plan: FitPlan, schema: DataSchema, sample: Arrays) -> str:
    """Return the mapping of columns to inputs and outputs, and a table of the sample and the model's outputs, as text.

    Raises:
        SparkHvdError: the rows cannot be trained on.
    """
    plugin = find_plugin(plugin_name)
    rows = {name: array.copy() for name, array in sample.items()}  # Arrow's memory is read-only
    plugin.check(plan.params, schema, rows)
    with tempfile.TemporaryDirectory(prefix="sparkhvd-describe-") as folder:
        plugin.export(plan.params, schema, Path(folder))
        outputs = plugin.predictor(Path(folder)).predict(rows)
    mapping = [f"  {part.strip()}" for part in plugin.mapping(plan.params, schema).split(";")]
    columns = [(_column_title(column), list(rows[column.name])) for column in schema.columns]
    columns += [(f"output {index}: {_output_type(output)}", list(output)) for index, output in enumerate(outputs)]
    count = len(columns[0][1])
    title = f"{counted(count, 'row')} and the model's outputs before training:"
    return "\n".join([estimator_name, *mapping, title, *_table(columns), ""])


def _column_title(column: ColumnSpec) -> str:
    return f"{column.role} {column.name}: {column.dtype}{list(column.shape) if column.shape else ''}"


def _output_type(output: Predicted) -> str:
    values = np.asarray(output)
    return f"{values.dtype}{list(values.shape[1:]) if values.ndim > 1 else ''}"


def _table(columns: Sequence[tuple[str, Sequence[object]]]) -> list[str]:
    cells = [[title, *(_preview(value) for value in values)] for title, values in columns]
    widths = [max(map(len, column)) for column in cells]
    lines = zip(*cells, strict=True)
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]


def _preview(value: object) -> str:
    """Return the first values of a row as text; for a sparse row, the first stored values."""
    flat = np.asarray(value).reshape(-1)
    if flat.dtype.names:
        flat = flat["values"].reshape(-1)
    shown = " ".join(f"{number:.4g}" if flat.dtype.kind in "fiu" else str(number) for number in flat[:_SHOWN_VALUES])
    return shown + (" ..." if len(flat) > _SHOWN_VALUES else "")
