from __future__ import annotations

import logging
import traceback

import pytest
from pyspark.sql.types import DoubleType, StructField, StructType

import sparkhvd
from sparkhvd._util.short_tracebacks import brief_errors
from sparkhvd.errors import ParamError, SchemaError


def _frames(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_interrupt_is_raised_without_inner_frames_and_without_a_handled_error():
    def waits() -> None:
        try:
            int("x")
        except ValueError:
            raise KeyboardInterrupt  # noqa: B904 - like Ctrl-C

    with pytest.raises(KeyboardInterrupt) as caught:
        brief_errors(waits)()
    assert _frames(caught.value) == [
        "test_an_interrupt_is_raised_without_inner_frames_and_without_a_handled_error",
        "call",
    ]
    assert "ValueError" not in "".join(traceback.format_exception(caught.value))


def test_an_error_about_an_argument_keeps_its_cause_and_the_log_has_the_whole_traceback(caplog):
    def checks() -> None:
        try:
            int("x")
        except ValueError as error:
            raise ParamError("must be a number") from error

    with (
        caplog.at_level(logging.DEBUG, "sparkhvd._util.short_tracebacks"),
        pytest.raises(ParamError, match="a number") as caught,
    ):
        brief_errors(checks)()
    assert "checks" not in _frames(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in checks" in caplog.text


def test_any_other_error_keeps_all_frames():
    def fails() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError) as caught:
        brief_errors(fails)()
    assert _frames(caught.value)[-1] == "fails"


def test_a_misspelled_column_is_an_error_of_a_few_lines():
    torch = pytest.importorskip("torch")
    rows = StructType([StructField("age", DoubleType())])
    with pytest.raises(SchemaError, match="Did you mean 'age'") as caught:
        sparkhvd.TorchModel.from_model(torch.nn.Linear(1, 1), rows, feature_cols=["agee"])
    assert len(_frames(caught.value)) == 2
