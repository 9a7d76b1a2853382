"""Errors of executors that cannot import sparkhvd or its compiled core, and their remedies."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

import sparkhvd
from tests.pythons import SPARK_DISTRIBUTIONS, python_with
from tests.scripts import ROOT, results_of, run_script

pytestmark = [pytest.mark.spark, pytest.mark.cluster]

SCRIPT = Path(__file__).with_name("incomplete_executors_script.py")


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    """Return the driver's messages after Spark has sent a wheel or a zip file to executors, by suffix."""
    folder = tmp_path_factory.mktemp("incomplete")
    files = [folder / f"sparkhvd-{sparkhvd.__version__}-cp311-cp311-linux_x86_64.whl", folder / "sparkhvd.zip"]
    for target in files:
        with zipfile.ZipFile(target, "w") as file:
            for path in (ROOT / "sparkhvd").rglob("*"):
                if path.suffix in {".py", ".so"}:
                    file.write(path, path.relative_to(ROOT))
    python = python_with(folder / "python", (*SPARK_DISTRIBUTIONS, "cloudpickle", "fsspec"))
    variables = {"PYTHONPATH": "", "SPARK_WORKER_DIR": str(folder)}
    return results_of(run_script([sys.executable, SCRIPT, python, *files], folder, 500, **variables))


def test_a_wheel_as_a_python_file_is_reported_as_a_missing_installation(messages):
    missing, remedy = "LaunchError: The executors cannot import sparkhvd: they lack", "not even as a wheel"
    assert messages[".whl"]["run"].startswith(missing)
    assert messages[".whl"]["fit"].startswith(missing)
    assert all(remedy in message for message in messages[".whl"].values())


def test_a_zip_file_with_compiled_modules_is_reported_as_one_that_python_cannot_load(messages):
    for action in ("run", "fit"):
        message = messages[".zip"][action]
        assert message.startswith("LaunchError: The sparkhvd in ")
        assert "sparkhvd.zip/sparkhvd on host " in message
        assert "send a packed environment with spark.archives" in message
        assert "Traceback" not in message
    assert "FAIL  tasks  The sparkhvd in " in messages[".zip"]["preflight"]
