"""The examples run as a user runs them, in their small size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.notebooks import execute

_EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(tmp_path: Path, *command: str) -> str:
    result = subprocess.run(
        [sys.executable, str(_EXAMPLES / command[0]), *command[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.spark
def test_digits_trains_and_writes_a_figure(tmp_path: Path) -> None:
    shown = _run(tmp_path, "digits.py", "--rows", "150", "--epochs", "2", "--num-proc", "2", "--folder", "out")
    assert "120 scans of handwritten digits to train on, 30 held out." in shown
    assert "epoch 1/2" in shown
    assert "epoch 2/2" in shown
    assert "predicted" in shown
    assert "held-out accuracy, 2 ranks on Spark:" in shown
    assert "held-out accuracy, plain PyTorch:" in shown
    assert "120 rows are too few to gain from ranks: most of the time on Spark goes into starting processes." in shown
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.spark
def test_run_function_adds_up_a_tensor_over_the_ranks(tmp_path: Path) -> None:
    shown = _run(tmp_path, "run_function.py", "--num-proc", "2")
    assert "results by rank: [{'rank': 0, 'total': 21.0}, {'rank': 1, 'total': 21.0}]" in shown
    assert "[1]<stdout>:I have [11.0, 11.0, 11.0], all 2 ranks together have [21.0, 21.0, 21.0]" in shown


def test_synthetic_benchmark_prints_images_per_second_per_rank_and_in_total(tmp_path: Path) -> None:
    small = ["--width", "4", "--image-size", "32", "--batch-size", "2", "--num-classes", "10"]
    short = ["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]
    shown = _run(tmp_path, "synthetic_benchmark.py", "--num-proc", "2", "--fp16-allreduce", *small, *short)
    assert re.search(r"^rank 0: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)
    assert re.search(r"^rank 1: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)
    assert re.search(r"^total of 2 ranks: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)


@pytest.mark.spark
def test_lightning_digits_writes_a_checkpoint_and_logs(tmp_path: Path) -> None:
    shown = _run(tmp_path, "lightning_digits.py", "--rows", "150", "--epochs", "2", "--folder", "out")
    assert "epochs trained:       2" in shown
    assert "held-out accuracy:" in shown
    assert (tmp_path / "out" / "digits.ckpt").stat().st_size > 0
    assert [path.name for path in (tmp_path / "out").rglob("metrics.csv")] == ["metrics.csv"]


@pytest.mark.spark
def test_keras_digits_writes_a_model_that_plain_keras_opens(tmp_path: Path) -> None:
    shown = _run(tmp_path, "keras_digits.py", "--rows", "300", "--epochs", "5", "--folder", "out")
    by_average, by_spark, alone = map(float, re.findall(r"held-out accuracy, .*: +([\d.]+)", shown))
    assert by_spark == alone
    assert by_spark > 0.5, "ten digits; by chance a tenth would be right"
    assert by_average > 0.5
    assert (tmp_path / "out" / "digits.keras").stat().st_size > 0


@pytest.mark.spark
def test_movie_ratings_are_predicted_from_embeddings_in_every_framework(tmp_path: Path) -> None:
    shown = _run(tmp_path, "movie_ratings.py", "--num-proc", "1", "--framework", "keras", "lightning", "torch")
    assert "input 0 is userId" in shown
    assert "'person' is userId" in shown
    errors = dict(re.findall(r"held-out error, (.*): +([\d.]+)", shown))
    average = float(errors.pop("the average for everybody"))
    assert list(errors) == ["embeddings, torch", "embeddings, lightning", "embeddings, keras"]
    assert all(float(error) < average for error in errors.values()), "embeddings must know more than the average"


@pytest.mark.spark
def test_documentation_is_classified_by_its_words_in_every_framework(tmp_path: Path) -> None:
    small = ["--num-proc", "1", "--epochs", "4"]
    shown = _run(tmp_path, "documentation.py", *small, "--framework", "torch", "lightning", "keras")
    found = {
        name: int(right) for name, right in re.findall(r"^(.*): +(\d+) of \d+ held-out passages", shown, re.MULTILINE)
    }
    longest = found.pop("always the longest page")
    assert list(found) == ["torch", "lightning", "keras"]
    assert all(right > 1.5 * longest for right in found.values()), found


@pytest.mark.spark
def test_the_notebook_runs_with_a_progress_bar_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is another process, which needs this folder's library."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]))
    for folder in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder))
    notebook = execute(_EXAMPLES / "digits.ipynb", tmp_path)
    cells = {cell.source.partition("\n")[0]: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    training = "".join(output.get("text", "") for output in cells["model = estimator.fit(train)"])
    assert "epoch 6/6" in training
    assert "100%|" in training, "the bar must come to its end"
    assert "val_accuracy" in cells[next(line for line in cells if "to_pandas" in line)][0].data["text/html"]
    assert "image/png" in cells["model.plot_history()"][0].data
    (line,) = [output.text for output in notebook.cells[-1].outputs]
    right, total = map(int, re.findall(r"\d+", line))
    assert right / total > 0.7
