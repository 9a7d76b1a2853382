"""The cost and the names of ``import sparkhvd``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sparkhvd

_ROOT = Path(__file__).parents[2]
_HEAVY = ("pyspark", "torch", "tensorflow", "keras", "lightning", "pandas", "pyarrow", "numpy")
# Measured inside the new interpreter, so that its own start does not count.
_TIME_IMPORT = "import time; start = time.perf_counter(); import sparkhvd; print(time.perf_counter() - start)"


def _run_in_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=_ROOT, check=True, capture_output=True, text=True).stdout


def test_importing_takes_less_than_150_ms() -> None:
    fastest = min(float(_run_in_new_process(_TIME_IMPORT)) for _ in range(5))
    assert fastest < 0.150, f"`import sparkhvd` took {fastest * 1000:.0f} ms at best"


def test_importing_loads_no_framework_and_no_spark() -> None:
    loaded = json.loads(_run_in_new_process("import json, sys, sparkhvd; print(json.dumps(sorted(sys.modules)))"))
    heavy = [name for name in loaded if name.partition(".")[0] in _HEAVY]
    assert heavy == []


def test_importing_changes_neither_the_environment_nor_the_threads() -> None:
    code = (
        "import os, threading; before = dict(os.environ); import sparkhvd; "
        "print(before == dict(os.environ), threading.active_count())"
    )
    assert _run_in_new_process(code).split() == ["True", "1"]


def test_a_collective_does_not_import_the_masked_arrays_of_numpy() -> None:
    code = (
        "import sys, numpy, sparkhvd.numpy as hvd; before = 'numpy.ma' in sys.modules; hvd.init(); "
        "hvd.allgather(numpy.ones(2)); print(before == ('numpy.ma' in sys.modules)); hvd.shutdown()"
    )
    assert _run_in_new_process(code).split() == ["True"]


@pytest.mark.parametrize("name", sparkhvd.__all__)
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(sparkhvd, name) is not None
    assert name in dir(sparkhvd)


def test_the_central_names_are_public() -> None:
    assert {"run", "Store", "TorchEstimator", "TorchModel"} <= set(sparkhvd.__all__)


def test_public_names_can_be_imported_with_from_and_know_the_modules_that_define_them() -> None:
    from sparkhvd import Store, run  # noqa: PLC0415

    assert run.__module__.startswith("sparkhvd.driver")
    assert Store.__module__.startswith("sparkhvd.store")


def test_the_error_for_an_unknown_name_contains_the_name() -> None:
    with pytest.raises(AttributeError, match="module 'sparkhvd' has no attribute 'Stor'"):
        sparkhvd.Stor  # noqa: B018


@pytest.mark.parametrize(
    ("missing", "name", "extra"),
    [
        ("torch", "TorchEstimator", "torch"),
        ("torch", "LightningModel", "torch"),
        ("keras", "KerasEstimator", "keras"),
        ("pyspark", "TorchEstimator", "spark"),
    ],
)
def test_a_missing_package_is_reported_with_the_extra_that_installs_it(missing, name, extra) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"try: from sparkhvd import {name}\n"
        "except ImportError as error: print(error)"
    )
    message = (
        f"sparkhvd.{name} needs the package {missing}, which is not installed here: pip install 'sparkhvd[{extra}]'."
    )
    assert _run_in_new_process(code).strip() == message


def test_star_import_contains_the_names_of_the_installed_frameworks() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('keras', 'lightning', 'pytorch_lightning'))); "
        "from sparkhvd import *; print(*sorted(name for name in globals() if name.endswith('Estimator')), run.__name__)"
    )
    assert _run_in_new_process(code).split() == ["TorchEstimator", "run"]
