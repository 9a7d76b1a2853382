"""Run the small size of each example: one as a user runs it, the others in the session of the tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.scripts import run_in_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("warm_ranks")

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


def _run_in(spark: SparkSession, tmp_path: Path, script: str, *arguments: str) -> str:
    return run_in_session(_EXAMPLES / script, arguments, tmp_path, spark)


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
def test_run_function_adds_up_a_tensor_over_the_ranks(spark: SparkSession, tmp_path: Path) -> None:
    shown = _run_in(spark, tmp_path, "run_function.py", "--num-proc", "2")
    assert "results by rank: [{'rank': 0, 'total': 21.0}, {'rank': 1, 'total': 21.0}]" in shown
    assert "[1]<stdout>:I have [11.0, 11.0, 11.0], all 2 ranks together have [21.0, 21.0, 21.0]" in shown


@pytest.mark.spark
def test_jax_digits_are_recognized_as_well_by_two_ranks_as_by_one(spark: SparkSession, tmp_path: Path) -> None:
    shown = [_run_in(spark, tmp_path, "jax_digits.py", "--num-proc", ranks, "--epochs", "5") for ranks in ("1", "2")]
    losses = [tuple(map(float, re.findall(r"([\d.]+) in the", one))) for one in shown]
    assert losses[0] == pytest.approx(losses[1], abs=0.002)
    assert losses[0][1] < losses[0][0] / 2
    accuracies = [float(re.search(r"held-out accuracy, \d ranks: ([\d.]+)%", one)[1]) for one in shown]
    assert min(accuracies) > 70, "ten digits; by chance a tenth would be right"


@pytest.mark.spark
def test_scikit_learn_digits_averages_the_weights_of_the_ranks(spark: SparkSession, tmp_path: Path) -> None:
    shown = _run_in(spark, tmp_path, "scikit_learn_digits.py", "--num-proc", "2", "--epochs", "5")
    assert "the ranks have the same model: True" in shown
    assert float(re.search(r"held-out accuracy, 2 ranks: ([\d.]+)%", shown)[1]) > 70


@pytest.mark.soak
def test_ray_tune_digits_trains_a_trial_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "0")  # at Ray's default, other programs starve its workers
    shown = _run(tmp_path, "ray_tune_digits.py", "--trials", "1", "--epochs", "1")
    shutil.rmtree(Path(tempfile.gettempdir(), "ray"))  # Ray keeps its logs
    assert "1 trials, 0 of them failed" in shown
    assert float(re.search(r"held-out accuracy, 2 ranks: ([\d.]+)%", shown)[1]) > 5


def test_synthetic_benchmark_prints_images_per_second_per_rank_and_in_total(tmp_path: Path) -> None:
    small = ["--width", "4", "--image-size", "32", "--batch-size", "2", "--num-classes", "10"]
    short = ["--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2"]
    shown = _run(tmp_path, "synthetic_benchmark.py", "--num-proc", "2", "--fp16-allreduce", *small, *short)
    assert re.search(r"^rank 0: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)
    assert re.search(r"^rank 1: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)
    assert re.search(r"^total of 2 ranks: \d+\.\d \+- \d+\.\d images/s$", shown, re.MULTILINE)


@pytest.mark.spark
def test_lightning_digits_writes_a_checkpoint_and_logs(spark: SparkSession, tmp_path: Path) -> None:
    shown = _run_in(spark, tmp_path, "lightning_digits.py", "--rows", "150", "--epochs", "2", "--folder", "out")
    assert "epochs trained:       2" in shown
    assert "held-out accuracy:" in shown
    assert (tmp_path / "out" / "digits.ckpt").stat().st_size > 0
    assert [path.name for path in (tmp_path / "out").rglob("metrics.csv")] == ["metrics.csv"]


@pytest.mark.spark
def test_keras_digits_writes_a_model_that_plain_keras_opens(spark: SparkSession, tmp_path: Path) -> None:
    shown = _run_in(spark, tmp_path, "keras_digits.py", "--rows", "300", "--epochs", "5", "--folder", "out")
    by_average, by_spark, alone = map(float, re.findall(r"held-out accuracy, .*: +([\d.]+)", shown))
    assert by_spark == alone
    assert by_spark > 0.5, "ten digits; by chance a tenth would be right"
    assert by_average > 0.5
    assert (tmp_path / "out" / "digits.keras").stat().st_size > 0


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_movie_ratings_are_predicted_from_embeddings_in_every_framework(spark: SparkSession, tmp_path: Path) -> None:
    shown = _run_in(
        spark, tmp_path, "movie_ratings.py", "--num-proc", "1", "--framework", "keras", "lightning", "torch"
    )
    assert "input 0 is userId" in shown
    assert "'person' is userId" in shown
    errors = dict(re.findall(r"held-out error, (.*): +([\d.]+)", shown))
    average = float(errors.pop("the average for everybody"))
    assert list(errors) == ["embeddings, torch", "embeddings, lightning", "embeddings, keras"]
    assert all(float(error) < average for error in errors.values()), "embeddings must know more than the average"


@pytest.mark.spark
def test_documentation_is_classified_by_its_words_in_every_framework(spark: SparkSession, tmp_path: Path) -> None:
    small = ["--num-proc", "1", "--epochs", "4"]
    shown = _run_in(spark, tmp_path, "documentation.py", *small, "--framework", "torch", "lightning", "keras")
    correct = {
        name: int(right) for name, right in re.findall(r"^(.*): +(\d+) of \d+ held-out passages", shown, re.MULTILINE)
    }
    longest = correct.pop("always the longest page")
    assert list(correct) == ["torch", "lightning", "keras"]
    assert all(right > 1.5 * longest for right in correct.values()), correct
