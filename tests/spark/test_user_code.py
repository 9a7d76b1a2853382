"""Models whose code is in a user's project: classes keep their identity on the driver, ranks and executors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import ROOT, results_of, run_script

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

PROJECT = Path(__file__).with_name("project")
SCRIPT = Path(__file__).with_name("user_code_script.py")


# Most other tests have their code everywhere.
@pytest.fixture(scope="module", params=["driver", pytest.param("everywhere", marks=pytest.mark.soak)])
def trial(request, tmp_path_factory) -> tuple[str, Path, dict[str, Any]]:
    """Return the results if only the driver has the project, and if executors have it, too."""
    folder = tmp_path_factory.mktemp(request.param)
    shared = {"PYTHONPATH": f"{PROJECT}:{ROOT}"} if request.param == "everywhere" else {}
    done = run_script([sys.executable, SCRIPT, PROJECT, folder], folder, 500, **shared)
    return request.param, folder, results_of(done)


@pytest.mark.parametrize("framework", ["torch", "lightning", "keras"])
def test_classes_singletons_and_globals_of_a_project_are_the_same_in_fit_transform_and_saved_models(trial, framework):
    _, _, results = trial
    assert results[framework] == {
        "loss": 0,
        "transform": 1,
        "prediction_fn": 1001,
        "saved": 1001,
        "saved, new prediction_fn": 1001,
        "own class": True,
    }


def test_arguments_of_run_keep_their_identity_on_the_ranks(trial):
    known, _, results = trial
    kind = "SentModule" if known == "driver" else "module"
    assert results["run"] == [[kind, [True] * 5]] * 2


def test_executors_are_asked_once_and_the_driver_keeps_its_classes(trial):
    _, _, results = trial
    assert results["questions"] == 1
    assert results["forward is its module's"]


def test_a_saved_model_opens_without_the_project_if_its_code_was_sent(trial):
    known, folder, _ = trial
    program = (
        "import sys, torch; from pathlib import Path; from sparkhvd.estimators.torch.serialization import artifact; "
        "print(artifact.load_model(Path(sys.argv[1]))(torch.tensor(0.5)).item())"
    )
    command = [sys.executable, "-c", program, folder / "torch-model" / "model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert ("32.0" in done.stdout) if known == "driver" else ("No module named 'scaling'" in done.stderr)
