"""A framework that another package adds: ``added_framework``, one folder with one entry point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.scripts import ROOT, results_of, run_script

pytestmark = pytest.mark.spark

SITE = Path(__file__).with_name("added_framework")  # as pip would install the package
WEIGHTS = [2.0, -3.0, 1.0]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("added")
    script = Path(__file__).with_name("added_framework_script.py")
    done = run_script([sys.executable, script, folder], folder, 250, PYTHONPATH=f"{SITE}:{ROOT}")
    return results_of(done), done.stderr


def test_two_ranks_train_its_model_with_and_without_a_store(results):
    np.testing.assert_allclose(results[0]["direct weights"], WEIGHTS, atol=0.05)
    np.testing.assert_allclose(results[0]["weights"], WEIGHTS, atol=0.05)
    assert (results[0]["epochs"], results[0]["metrics"]) == (40, ["loss", "val_loss"])


def test_its_model_transforms_and_survives_saving_and_loading(results):
    values = results[0]
    np.testing.assert_allclose(values["predictions"], values["labels"], atol=0.05)
    assert values["loaded"] == values["wrapped"] == values["predictions"]
    assert values["with prediction_fn"] == [-value for value in values["predictions"]]
    assert values["loaded estimator"] == 0.5
    assert values["pipeline"]


def test_its_package_decides_which_parameters_identify_a_run(results):
    values = results[0]
    assert values["run found again"] == values["run"]
    assert values["run of other weights"] != values["run"]


def test_a_warning_names_its_method_of_seeding(results):
    assert "keras.utils.set_random_seed, numpy.random.default_rng)" in results[1]


def test_its_package_refuses_parameters_that_it_cannot_train_with(results):
    assert results[0]["wrong model"] == "model is a str; it must be a LinearRegression."
    assert results[0]["too few features"] == "The model has 2 features, but the rows have 1."
    assert results[0]["monitored"].startswith("halve_rate_on monitors 'val_loss', but this fit has no validation rows.")
    assert results[0]["unknown metric"].startswith("early_stopping monitors 'val_los', but an epoch reports loss, val_")


def test_no_other_framework_is_imported(results):
    assert results[0]["other frameworks"] == []
