from __future__ import annotations

import sys
import types

import pytest

from sparkhvd._util.lazy_names import lazy_names


@pytest.fixture
def package(monkeypatch):
    package = types.ModuleType("lazy_package")
    monkeypatch.setitem(sys.modules, "lazy_package", package)
    package.__getattr__, package.__dir__ = lazy_names("lazy_package", {"Thing": "lazy_package.things"})
    return package


def test_a_name_is_imported_on_first_use(package, monkeypatch):
    with pytest.raises(ModuleNotFoundError, match="lazy_package"):
        _ = package.Thing
    things = types.ModuleType("lazy_package.things")
    things.Thing = object()
    monkeypatch.setitem(sys.modules, "lazy_package.things", things)
    assert package.Thing is things.Thing


def test_an_unknown_name_raises_an_attribute_error(package):
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'Other'"):
        _ = package.Other


def test_dir_lists_the_names_before_their_first_use(package):
    assert {"Thing", "__name__"} <= set(dir(package))
