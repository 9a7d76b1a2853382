from __future__ import annotations

import sys
import types

import pytest

from sparkhvd._util.frameworks import estimator_hint, frameworks
from sparkhvd.estimators.runs.canonical import canonical_form
from sparkhvd.estimators.training.user_errors import describe_error

_FRAMEWORK_CODE = """
from sparkhvd._util.frameworks import Framework

FRAMEWORK = Framework(
    title="Trees",
    estimator="TreeEstimator",
    packages=("trees",),
    libraries=("treelib",),
    describe="added_package:describe",
)


def describe(value, form):
    return ["tree", form.of(list(value.branches))] if type(value).__module__ == "trees" else None
"""
_LIBRARY_CODE = """
class Tree:
    branches = (1, 2)

    def grow(self, change):
        change()


def stop():
    raise ValueError("no more rows")
"""


@pytest.fixture
def tree(monkeypatch):
    """Return a model of the package ``trees``; the function ``treelib.stop`` of the same framework raises an error."""
    for name in ("trees", "treelib"):
        module = types.ModuleType(name)
        exec(compile(_LIBRARY_CODE, f"{name}.py", "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["trees"].Tree()


def test_another_package_adds_a_framework(install, tree):
    assert estimator_hint(tree, ("torch",)) == ""
    install(_FRAMEWORK_CODE, "sparkhvd.frameworks", "trees = added_package:FRAMEWORK")
    assert estimator_hint(tree, ("torch",)) == " Use TreeEstimator for Trees objects."
    assert [framework.title for framework in frameworks()] == ["PyTorch", "Keras", "Lightning", "Trees"]
    assert canonical_form({"model": tree}) == ["mapping", [("model", ["tree", [1, 2]])]]


def test_an_error_in_an_added_framework_names_the_line_of_user_code(install, tree):
    def error_text():
        with pytest.raises(ValueError, match="no more rows") as caught:
            tree.grow(sys.modules["treelib"].stop)
        return describe_error(caught.value)

    assert "of treelib.py, in stop" in error_text()
    install(_FRAMEWORK_CODE, "sparkhvd.frameworks", "trees = added_package:FRAMEWORK")
    assert "of test_frameworks.py, in error_text" in error_text()
