"""Horovod's estimators of the distribution ``compat/horovod``."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.scripts import ROOT, results_of, run_script

pytestmark = pytest.mark.spark

_ROWS = [float(number) for number in range(16)]


def run(folder: Path, framework: str) -> CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.spark.horovod_script", folder, framework]
    return run_script(command, folder, 240, PYTHONPATH=f"{ROOT}:{ROOT / 'compat' / 'horovod'}")


def test_a_program_for_pytorch_keeps_its_meaning(tmp_path):
    program = run(tmp_path, "torch")
    results = results_of(program)
    assert results["ranks"] == ["0", "1"]
    assert results["columns"] == ["x", "y", "y__output"]
    # One step over all 16 rows from a weight of 0, with x doubled and the rate of 0.0005 times 2 ranks.
    assert results["scale_lr"]
    assert results["weight"] == pytest.approx(0.001 * sum(2 * y * 2 * y for y in _ROWS) / len(_ROWS))
    assert "TorchEstimator multiplies the learning rate by the number of ranks" in program.stderr
    assert "sparkhvd does not have: reader_pool_type, shuffle_buffer_size." in program.stderr


@pytest.mark.soak
def test_a_program_for_keras_keeps_its_meaning(tmp_path):
    results = results_of(run(tmp_path, "keras"))
    assert results["scale_lr"]
    assert results["history"]["loss"] == results["history"]["val_loss"] == 1
    assert results["loaded"]


@pytest.mark.soak
def test_classes_that_derive_from_horovods_for_lightning_1_fit_predict_and_are_saved(tmp_path):
    results = results_of(run(tmp_path, "derived"))
    assert results["class"] == "LengthModel"
    assert results["weight"] > 0
    assert results["hook"], "the original module is returned"
    assert results["predicted"] == pytest.approx([2 * row * results["weight"] for row in _ROWS])
    assert results["loaded"] == results["predicted"]
    (epoch,) = results["history"]
    assert epoch["train"]["all_metrics"] == [{"steps": 1}]
    assert epoch["validation"]["all_metrics"] == [{"batches": 1}]
