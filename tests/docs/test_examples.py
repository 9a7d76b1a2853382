"""The examples run as a user runs them, in their small size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(tmp_path: Path, *command: str) -> str:
    result = subprocess.run(
        [sys.executable, str(_EXAMPLES / command[0]), *command[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.spark
def test_digits_trains_shows_predictions_and_leaves_a_picture(tmp_path: Path) -> None:
    shown = _run(tmp_path, "digits.py", "--rows", "150", "--epochs", "2", "--num-proc", "2", "--folder", "out")
    assert "120 scans of handwritten digits to train on, 30 held out." in shown
    assert "epoch 1/2" in shown
    assert "epoch 2/2" in shown
    assert "predicted" in shown
    assert "held-out accuracy, 2 ranks on Spark:" in shown
    assert "held-out accuracy, plain PyTorch:" in shown
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.spark
def test_run_function_adds_up_a_tensor_over_the_ranks(tmp_path: Path) -> None:
    shown = _run(tmp_path, "run_function.py", "--num-proc", "2")
    assert "results by rank: [{'rank': 0, 'total': 21.0}, {'rank': 1, 'total': 21.0}]" in shown
    assert "[1]<stdout>:I have [11.0, 11.0, 11.0], all 2 ranks together have [21.0, 21.0, 21.0]" in shown


def test_synthetic_benchmark_tells_images_per_second_of_every_rank_and_of_all(tmp_path: Path) -> None:
    small = ["--width", "4", "--image-size", "32", "--batch-size", "2", "--num-classes", "10"]
    short = ["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]
    shown = _run(tmp_path, "synthetic_benchmark.py", "--num-proc", "2", "--fp16-allreduce", *small, *short)
    assert re.search(r"^rank 0: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)
    assert re.search(r"^rank 1: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)
    assert re.search(r"^total of 2 ranks: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)
