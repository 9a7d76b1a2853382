"""Run a small version of each example: one as a user runs it, the others in the session of the tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from examples.synthetic_benchmark import EXCHANGES, torch_network
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
    output = _run(tmp_path, "digits.py", "--rows", "150", "--epochs", "2", "--num-proc", "2", "--folder", "out")
    assert "120 scans of handwritten digits to train on, 30 held out." in output
    assert "epoch 1/2" in output
    assert "epoch 2/2" in output
    assert "predicted" in output
    assert "held-out accuracy, 2 ranks on Spark:" in output
    assert "held-out accuracy, plain PyTorch:" in output
    assert "120 rows are too few to gain from ranks: most of the time on Spark goes into starting processes." in output
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.spark
def test_run_function_sums_a_tensor_over_the_ranks(spark: SparkSession, tmp_path: Path) -> None:
    output = _run_in(spark, tmp_path, "run_function.py", "--num-proc", "2")
    assert "results by rank: [{'rank': 0, 'total': 21.0}, {'rank': 1, 'total': 21.0}]" in output
    assert "[1]<stdout>:I have [11.0, 11.0, 11.0], all 2 ranks together have [21.0, 21.0, 21.0]" in output


@pytest.mark.spark
def test_jax_digits_trains_equally_on_one_rank_and_on_two(spark: SparkSession, tmp_path: Path) -> None:
    outputs = [_run_in(spark, tmp_path, "jax_digits.py", "--num-proc", ranks, "--epochs", "5") for ranks in ("1", "2")]
    losses = [tuple(map(float, re.findall(r"([\d.]+) in the", text))) for text in outputs]
    assert losses[0] == pytest.approx(losses[1], abs=0.002)
    assert losses[0][1] < losses[0][0] / 2
    accuracies = [float(re.search(r"held-out accuracy, \d ranks: ([\d.]+)%", text)[1]) for text in outputs]
    assert min(accuracies) > 70, "guessing is right for a tenth of the digits"


@pytest.mark.spark
def test_scikit_learn_digits_averages_the_weights_of_the_ranks(spark: SparkSession, tmp_path: Path) -> None:
    output = _run_in(spark, tmp_path, "scikit_learn_digits.py", "--num-proc", "2", "--epochs", "5")
    assert "the ranks have the same model: True" in output
    assert float(re.search(r"held-out accuracy, 2 ranks: ([\d.]+)%", output)[1]) > 70


@pytest.mark.soak
def test_ray_tune_digits_trains_a_trial_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "0")  # with Ray's default, other programs starve its workers
    output = _run(tmp_path, "ray_tune_digits.py", "--trials", "1", "--epochs", "1")
    shutil.rmtree(Path(tempfile.gettempdir(), "ray"))  # Ray keeps its logs
    assert "1 trials, 0 of them failed" in output
    assert float(re.search(r"held-out accuracy, 2 ranks: ([\d.]+)%", output)[1]) > 5


@pytest.mark.soak
def test_ray_parquet_trains_on_two_ranks_without_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "0")
    output = _run(tmp_path, "ray_parquet.py", "--epochs", "1")
    shutil.rmtree(Path(tempfile.gettempdir(), "ray"))
    assert float(re.search(r"held-out accuracy, 2 ranks: ([\d.]+)%", output)[1]) > 20


@pytest.mark.soak
def test_deephyper_digits_evaluates_a_point_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("deephyper", reason="its dependencies are not among those of the tests: pip install deephyper")
    output = _run(tmp_path, "deephyper_digits.py", "--evaluations", "1", "--epochs", "1")
    assert "1 evaluations, 0 of them failed" in output
    assert float(re.search(r"held-out accuracy, 2 ranks: ([\d.]+)%", output)[1]) > 5


_SMALL_NETWORK = ("--width", "4", "--image-size", "32", "--batch-size", "2", "--num-classes", "10")
_FEW_BATCHES = ("--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2")


def test_synthetic_benchmark_prints_images_per_second_as_horovod_does(tmp_path: Path) -> None:
    arguments = ["--model", "resnet50", "--num-proc", "2", "--fp16-allreduce", *_SMALL_NETWORK, *_FEW_BATCHES]
    output = _run(tmp_path, "synthetic_benchmark.py", *arguments)
    iterations = re.findall(r"^Iter #\d: (\d+\.\d) img/sec per CPU$", output, re.MULTILINE)
    mean = float(re.search(r"^Img/sec per CPU: (\d+\.\d) \+-\d+\.\d$", output, re.MULTILINE)[1])
    total = float(re.search(r"^Total img/sec on 2 CPU\(s\): (\d+\.\d) \+-\d+\.\d$", output, re.MULTILINE)[1])
    assert mean == pytest.approx(sum(map(float, iterations)) / 2, abs=0.11)
    assert total == pytest.approx(2 * mean, abs=0.21)
    assert float(re.search(r"^Slowest rank: [01], (\d+\.\d) img/sec$", output, re.MULTILINE)[1]) <= mean + 0.1


def test_scaling_study_compares_numbers_of_ranks(tmp_path: Path) -> None:
    strong = ["--num-proc", "2", "1", "--total-batch-size", "4", "--results", "results.jsonl"]
    output = _run(tmp_path, "scaling_study.py", *strong, *_SMALL_NETWORK, *_FEW_BATCHES)
    one, two = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert [one["ranks"], two["ranks"]] == [1, 2]
    assert [one["options"]["batch_size"], two["options"]["batch_size"]] == [4, 2]
    rows = re.findall(r"^average +(\d) +([\d.]+) \+-[\d. ]+ (\d+)% +([\d.]+) ms", output, re.MULTILINE)
    assert [float(speed) for _, speed, _, _ in rows] == [one["speed"], two["speed"]]
    assert [int(efficiency) for _, _, efficiency, _ in rows] == [100, round(50 * two["speed"] / one["speed"])]
    assert float(rows[1][3]) == pytest.approx(4000 / two["speed"], abs=0.06), "the step of both ranks has 4 images"


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_scaling_study_measures_both_frameworks_and_every_exchange(tmp_path: Path, framework: str) -> None:
    exchanges = tuple(EXCHANGES)
    job = ["--framework", framework, "--model", "vgg16", "--launcher", "sparkhvdrun", "--num-proc", "2"]
    output = _run(tmp_path, "scaling_study.py", *job, "--exchange", *exchanges, *_SMALL_NETWORK, *_FEW_BATCHES)
    rows = re.findall(rf"^({'|'.join(exchanges)}) +2 .*%", output, re.MULTILINE)
    assert rows == list(exchanges)


@pytest.mark.parametrize(
    ("model", "parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032), ("vgg16", 138_357_544)]
)
def test_networks_of_the_benchmark_have_the_published_numbers_of_parameters(model: str, parameters: int) -> None:

    with torch.device("meta"):
        network = torch_network(model, 64, 1000, 224)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


@pytest.mark.spark
def test_lightning_digits_writes_a_checkpoint_and_logs(spark: SparkSession, tmp_path: Path) -> None:
    output = _run_in(spark, tmp_path, "lightning_digits.py", "--rows", "150", "--epochs", "2", "--folder", "out")
    assert "epochs trained:       2" in output
    assert "held-out accuracy:" in output
    assert (tmp_path / "out" / "digits.ckpt").stat().st_size > 0
    assert [path.name for path in (tmp_path / "out").rglob("metrics.csv")] == ["metrics.csv"]


@pytest.mark.spark
def test_keras_digits_writes_a_model_that_plain_keras_opens(spark: SparkSession, tmp_path: Path) -> None:
    output = _run_in(spark, tmp_path, "keras_digits.py", "--rows", "300", "--epochs", "5", "--folder", "out")
    accuracy_of_average, accuracy_on_spark, accuracy_of_keras = map(
        float, re.findall(r"held-out accuracy, .*: +([\d.]+)", output)
    )
    assert accuracy_on_spark == accuracy_of_keras
    assert accuracy_on_spark > 0.5, "guessing is right for a tenth of the digits"
    assert accuracy_of_average > 0.5
    assert (tmp_path / "out" / "digits.keras").stat().st_size > 0


@pytest.mark.spark
def test_movie_ratings_are_predicted_better_than_by_their_average_in_every_framework(
    spark: SparkSession, tmp_path: Path
) -> None:
    output = _run_in(
        spark, tmp_path, "movie_ratings.py", "--num-proc", "1", "--framework", "keras", "lightning", "torch"
    )
    assert "input 0 is userId" in output
    assert "'person' is userId" in output
    errors = dict(re.findall(r"held-out error, (.*): +([\d.]+)", output))
    average = float(errors.pop("the average for everybody"))
    assert list(errors) == ["embeddings, torch", "embeddings, lightning", "embeddings, keras"]
    assert all(float(error) < average for error in errors.values()), "embeddings must predict better than the average"


@pytest.mark.spark
def test_passages_of_the_documentation_are_classified_by_their_words_in_every_framework(
    spark: SparkSession, tmp_path: Path
) -> None:
    small = ["--num-proc", "1", "--epochs", "4"]
    output = _run_in(spark, tmp_path, "documentation.py", *small, "--framework", "torch", "lightning", "keras")
    correct = {
        name: int(count) for name, count in re.findall(r"^(.*): +(\d+) of \d+ held-out passages", output, re.MULTILINE)
    }
    baseline = correct.pop("always the longest page")
    assert list(correct) == ["torch", "lightning", "keras"]
    assert all(count > 1.5 * baseline for count in correct.values()), correct


@pytest.mark.spark
def test_elastic_digits_replaces_a_lost_rank_and_uses_every_scan_once_per_epoch(
    spark: SparkSession, tmp_path: Path
) -> None:
    output = _run_in(spark, tmp_path, "elastic_digits.py", "--num-proc", "2", "--epochs", "6")
    assert re.search(r"ranks in each generation: 2 1\b", output)
    assert "scans in each epoch: 1500 1500 1500 1500 1500 1500" in output
    assert float(re.search(r"held-out accuracy: ([\d.]+)%", output)[1]) > 60


@pytest.mark.spark
def test_elastic_keras_digits_replaces_a_lost_rank(spark: SparkSession, tmp_path: Path) -> None:
    output = _run_in(spark, tmp_path, "elastic_keras_digits.py", "--num-proc", "2", "--epochs", "6")
    assert re.search(r"ranks in each generation: 2 1\b", output)
    assert float(re.search(r"held-out accuracy: ([\d.]+)%", output)[1]) > 60


@pytest.mark.spark
def test_elastic_estimator_trains_in_a_session_of_any_kind(spark: SparkSession, tmp_path: Path) -> None:
    output = _run_in(spark, tmp_path, "elastic_estimator.py", "--epochs", "3", "--folder", "out")
    assert "epochs trained: 3" in output
    assert float(re.search(r"held-out accuracy: ([\d.]+)%", output)[1]) > 40, "guessing is right for a tenth"


@pytest.mark.soak
def test_elastic_estimator_trains_on_dynamic_allocation(tmp_path: Path) -> None:
    output = _run(tmp_path, "elastic_estimator.py", "--epochs", "3")
    assert "numbers of ranks, from the first epoch to the last: " in output
    assert float(re.search(r"held-out accuracy: ([\d.]+)%", output)[1]) > 40
