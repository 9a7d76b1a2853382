"""Executors train in an environment that Spark sends with the job; the Python of their machine has no packages."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.pythons import SPARK_DISTRIBUTIONS, python_with
from tests.scripts import ROOT, results_of, run_script

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.soak]

SCRIPT = Path(__file__).with_name("packed_environment_script.py")
# pyspark and py4j come from the executor.
PACKAGES = (*SPARK_DISTRIBUTIONS[2:], "cloudpickle", "fsspec", "torch")
TORCH_NEEDS = ("typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "setuptools")


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Pack an environment with sparkhvd like a user; its other packages are links into this environment."""
    pytest.importorskip("venv_pack", reason="tools/make-venv renews an older environment")
    import venv_pack  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("packed")
    python = python_with(folder / "environment", (*PACKAGES, *TORCH_NEEDS))
    (packages,) = (folder / "environment" / "lib").glob("python*/site-packages")
    shutil.copytree(ROOT / "sparkhvd", packages / "sparkhvd", ignore=shutil.ignore_patterns("__pycache__"))
    assert python.exists()
    return venv_pack.pack(prefix=str(folder / "environment"), output=str(folder / "training.tar.gz"))


@pytest.mark.usefixtures("connect_port")
@pytest.mark.parametrize("how", ["archives", "artifacts"])
def test_ranks_run_in_the_environment_that_was_sent(how, archive, tmp_path):
    bare = Path(sys.executable).resolve()  # without the packages of this environment
    variables = {"PYTHONPATH": "", "PYSPARK_PYTHON": str(bare), "SPARK_WORKER_DIR": str(tmp_path)}
    results = results_of(run_script([sys.executable, SCRIPT, how, archive], tmp_path, 900, **variables))
    for python, package, total in results["ranks"]:
        assert python.endswith("training/bin/python")
        assert f"{Path(python).parents[1]}/lib" in package
        assert total == 2.0
    assert results["losses"][-1] < results["losses"][0]
    assert results["predictions"] == 64
