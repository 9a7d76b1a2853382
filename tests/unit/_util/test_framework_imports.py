"""Several frameworks imported in one process."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from sparkhvd.estimators.training.worker import find_plugin

_LIGHTNING_AFTER_TENSORFLOW = """
import tensorflow
from sparkhvd.lightning.flavour import import_lightning
print(import_lightning("lightning.pytorch").Trainer.__name__)
import torch
linear = torch.compile(torch.nn.Linear(2, 1))
print(tuple(linear(torch.ones(3, 2)).shape))
"""

_PLUGIN_AFTER_TENSORFLOW = """
import sys
import tensorflow
from sparkhvd.estimators.training.worker import find_plugin
find_plugin(sys.argv[1])
print(sys.modules.get("triton"))
"""

_WITH_TRITON_FIRST = """
import triton
import tensorflow
from sparkhvd._util.framework_imports import keep_triton_from_tensorflow
keep_triton_from_tensorflow()
from torch.utils._triton import has_triton_package
print(has_triton_package())
"""


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_lightning_is_imported_and_torch_compiles_in_a_process_that_has_loaded_tensorflow() -> None:
    assert _run(_LIGHTNING_AFTER_TENSORFLOW) == "Trainer\n(3, 1)\n"


@pytest.mark.soak
@pytest.mark.parametrize("framework", ["torch", "lightning"])
def test_the_estimators_are_imported_without_triton_in_a_process_that_has_loaded_tensorflow(framework: str) -> None:
    assert _run(_PLUGIN_AFTER_TENSORFLOW, f"sparkhvd.estimators.{framework}.plugin:PLUGIN") == "None\n"


def test_a_plugin_is_imported_without_triton_if_tensorflow_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", ModuleType("tensorflow"))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "triton")
    find_plugin("json:loads")
    assert sys.modules["triton"] is None


@pytest.mark.skipif(find_spec("triton") is None, reason="PyTorch without triton")
@pytest.mark.soak
def test_an_already_imported_triton_is_kept() -> None:
    assert _run(_WITH_TRITON_FIRST) == "True\n"


_COLLECTIONS = """
import gc
from sparkhvd._util.framework_imports import gc_paused_for_import

def collections():
    return sum(one["collections"] for one in gc.get_stats())

before = collections()
try:
    with gc_paused_for_import():
        kept = [[] for _ in range(100_000)]
        raise ImportError
except ImportError:
    pass
print(collections() - before, gc.isenabled(), gc.get_freeze_count() >= 100_000)
gc.disable()
with gc_paused_for_import():
    pass
print(gc.isenabled())
"""


def test_importing_a_framework_pauses_garbage_collection_and_freezes_its_objects() -> None:
    assert _run(_COLLECTIONS) == "0 True True\nFalse\n"
