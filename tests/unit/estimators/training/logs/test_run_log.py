"""The reports of a fit: history, event files, progress."""

from __future__ import annotations

import io
import json
import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from sparkhvd.data.read.prefetch import StopSignal
from sparkhvd.errors import ParamError
from sparkhvd.estimators.reports import EpochRecord, EpochReport, StepTimes
from sparkhvd.estimators.training.logs import run_log
from sparkhvd.estimators.training.logs.history import History, average_over_ranks, to_history
from sparkhvd.estimators.training.logs.progress import ProgressOutput, ReportingSource
from sparkhvd.estimators.training.logs.tensorboard_events import crc32c
from sparkhvd.store import Store
from tests.unit.estimators.arrays import ArraySource

RECORDS = [
    EpochRecord(0, {"loss": 2.0, "right": 0.5}, {"loss": 2.5, "right": 0.4}, 100.0, 0.01, {"data_wait": 0.2}),
    EpochRecord(1, {"loss": 1.0, "right": 0.7}, {"loss": 1.5, "right": 0.6}, 200.0, 0.02, {"data_wait": 0.1}),
]


@pytest.fixture(autouse=True)
def _tensorboard_without_tensorflow(monkeypatch):
    """Keep TensorBoard from importing TensorFlow to read files."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("notf"))


def test_the_history_is_a_table_with_a_row_per_epoch():
    table = to_history(RECORDS).to_pandas()
    assert table.index.tolist() == [0, 1]
    assert table.columns.tolist() == [
        *("loss", "right", "val_loss", "val_right", "rows_per_second", "step_seconds", "data_wait")
    ]
    assert table["val_right"].tolist() == [0.4, 0.6]


def test_the_line_of_an_epoch_shows_the_shares_of_a_step(alone):
    report = EpochReport(0, {"loss": (6.0, 3)}, times=StepTimes(0.1, 0.3, 0.1), steps=5)
    record = average_over_ranks(report, alone)
    assert record.line(1) == "epoch 1/1  loss 2  6 rows/s  step 100.0 ms = data 20% + compute 60% + communication 20%"
    unknown = replace(record, train={"g": 1.0}, rows_per_second=0.0, shares={})
    assert unknown.line(1) == "epoch 1/1  g 1  step 100.0 ms"
    assert to_history([record]).to_pandas()["compute"].tolist() == [pytest.approx(0.6)]


def test_the_history_is_plotted_with_training_and_validation_in_one_chart():
    figure = to_history(RECORDS).plot()
    assert [chart.get_title() for chart in figure.axes] == ["loss", "right"]
    train, validation = figure.axes[0].get_lines()
    assert (train.get_label(), train.get_ydata().tolist()) == ("train", [2.0, 1.0])
    assert (validation.get_label(), validation.get_ydata().tolist()) == ("validation", [2.5, 1.5])
    with pytest.raises(ParamError, match="has no history"):
        History().plot()


def test_metrics_are_plotted_that_only_the_validation_or_later_epochs_have():
    records = [EpochRecord(0, {}, {"right": 0.4}), EpochRecord(1, {"loss": 1.0}, {"right": 0.6})]
    figure = to_history(records).plot()
    assert [chart.get_title() for chart in figure.axes] == ["loss", "right"]
    assert [line.get_label() for chart in figure.axes for line in chart.get_lines()] == ["train", "validation"]
    with pytest.raises(ParamError, match="The history has no loss and no metrics"):
        to_history([EpochRecord(0, {})]).plot()


def test_the_plot_shows_the_ranks_of_an_elastic_fit_if_their_number_has_changed():
    sizes = [(3,), (3, 1), (2,)]
    records = [EpochRecord(epoch, {"loss": 1.0}, sizes=one) for epoch, one in enumerate(sizes)]
    figure = to_history(records).plot()
    assert [chart.get_title() for chart in figure.axes] == ["loss", "ranks"]
    (line,) = figure.axes[1].get_lines()
    assert line.get_xdata().tolist() == [0.0, 1.0, 1.5, 2.0, 3.0]
    assert line.get_ydata().tolist() == [3, 3, 1, 2, 2]
    assert [chart.get_title() for chart in to_history(records[:1]).plot().axes] == ["loss"]


def test_tensorboard_reads_the_event_files_of_a_run(tmp_path):
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"
    store = Store.create(str(tmp_path))
    run_log.write(store, "a run", RECORDS[:1])
    run_log.write(store, "a run", RECORDS)
    run_log.write(store, "a run", RECORDS)  # like a resumed run that trains an epoch again
    for part, losses in (("train", [2.0, 1.0]), ("validation", [2.5, 1.5])):
        values = {}
        for file in sorted((tmp_path / "runs" / "a run" / "logs" / part).iterdir()):
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    values.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
        assert values["loss"] == list(enumerate(losses))
        assert ("time/rows_per_second" in values) == (part == "train")
    kept = json.loads((tmp_path / "runs" / "a run" / "history.json").read_text())
    assert kept == [record.to_json() for record in RECORDS]


def test_steps_over_128_and_tags_of_any_length_are_written(tmp_path):
    from sparkhvd.estimators.training.logs.tensorboard_events import event_file  # noqa: PLC0415

    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(event_file(1.5, 100_000, {"x" * 300: math.pi}))
    *_, event = EventFileLoader(str(path)).Load()
    assert (event.wall_time, event.step, event.summary.value[0].tag) == (1.5, 100_000, "x" * 300)


@pytest.mark.parametrize(("value", "shown"), [(1e39, math.inf), (-1e39, -math.inf)])
def test_a_value_too_large_for_an_event_file_is_shown_as_infinite(tmp_path, value, shown):
    from sparkhvd.estimators.training.logs.tensorboard_events import event_file  # noqa: PLC0415

    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(event_file(1.5, 1, {"loss": value}))
    *_, event = EventFileLoader(str(path)).Load()
    assert event.summary.value[0].tensor.float_val[0] == shown


def test_progress_moves_a_bar_and_leaves_the_lines_of_the_ranks(capsys):
    source = ArraySource.__new__(ArraySource)
    source.steps = lambda: 3
    stop, stops = StopSignal(), []
    source.epoch = lambda number, first_step, stop: stops.append(stop) or iter("abc"[first_step:])
    reporting = ReportingSource(source, epochs=2)
    assert [*reporting.epoch(0), *reporting.epoch(1, 1, stop)] == ["a", "b", "c", "b", "c"]
    assert stops == [None, stop]
    reports = capsys.readouterr().out.splitlines()
    assert json.loads(reports[-1][1:]) == {"done": 6, "all": 6}
    shown = io.StringIO()
    output = ProgressOutput("a run", shown)
    output.write("[0]<stdout>:starting\n[1]<stdout>:hello\n")
    output.write(f"[0]<stdout>:{reports[0]}\n[0]<stdout>:epoch 1/2\n")
    output.write(f"[0]<stdout>:{reports[-1]}\n")
    output.close()
    text = shown.getvalue()
    assert text.startswith("[0]<stdout>:starting\n[1]<stdout>:hello\n")
    assert "[0]<stdout>:epoch 1/2\n" in text
    assert "a run: 100%" in text
    assert "\x01" not in text
