"""Estimators whose ranks train on GPUs that Spark assigned, and models that predict on them."""

from __future__ import annotations

import json
import sys

import pytest

from tests.gpu.devices import GPUS, needs_gpu
from tests.scripts import results_of, run_script

pytestmark = [needs_gpu, pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]


def test_estimators_train_and_models_predict_on_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # ranks and predictions share the memory
    addresses = [str(number) for number in range(len(GPUS))]
    discovery = tmp_path / "discover.sh"
    discovery.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': addresses})}'\n")
    discovery.chmod(0o755)
    command = [sys.executable, "-m", "tests.gpu.spark_script", discovery, str(len(GPUS))]
    found = results_of(run_script(command, tmp_path, 580))
    assert set(found) == {"torch, staged", "torch, nccl", "keras, staged", "keras, nccl", "transform"}
    assert {name: error for name, error in found.items() if not error < 0.5} == {}
