from __future__ import annotations

import importlib
import subprocess
import sys

import cloudpickle
import pytest

from sparkhvd.driver.pickling import by_value

MODULE = """
def double(x):
    return 2 * x
"""


@pytest.fixture
def neighbour(tmp_path, monkeypatch):
    """A module beside the user's script, which no other process can import."""
    (tmp_path / "beside_the_script.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("beside_the_script")
    del sys.modules["beside_the_script"]


def elsewhere(content):
    """What a process without the user's modules makes of a pickled function."""
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(21))"
    return subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, timeout=60, check=False)


def test_code_from_a_module_beside_the_script_travels_along(neighbour):
    with by_value([neighbour.double]):
        content = cloudpickle.dumps(neighbour.double)
    assert elsewhere(content).stdout.strip() == b"42"


def test_the_table_of_modules_is_as_before_afterwards(neighbour):
    before = cloudpickle.list_registry_pickle_by_value()
    with pytest.raises(RuntimeError, match="on purpose"), by_value([neighbour.double]):
        raise RuntimeError("on purpose")
    assert cloudpickle.list_registry_pickle_by_value() == before
    assert b"ModuleNotFoundError" in elsewhere(cloudpickle.dumps(neighbour.double)).stderr


def test_code_of_installed_packages_travels_by_name_only():
    with by_value([cloudpickle.dumps, subprocess.run]):
        assert len(cloudpickle.dumps(subprocess.run)) < 100
