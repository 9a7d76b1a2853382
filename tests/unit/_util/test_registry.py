from __future__ import annotations

import pytest

from sparkhvd._util.registry import Registry

REGISTRY = Registry("sparkhvd.shapes", {"square": "math:sqrt"})


def test_an_installed_package_adds_an_implementation_by_an_entry_point(install):
    assert (REGISTRY.added(), REGISTRY.target("circle")) == ({}, None)
    install("class Circle: ...", "sparkhvd.shapes", "circle = added_package:Circle")
    assert REGISTRY.added() == {"circle": "added_package:Circle"}
    assert REGISTRY.load("circle").__module__ == "added_package"


def test_an_entry_point_of_another_group_adds_nothing(install):
    install("class Circle: ...", "sparkhvd.colors", "circle = added_package:Circle")
    with pytest.raises(KeyError, match="circle"):
        REGISTRY.load("circle")


def test_an_entry_point_cannot_replace_an_implementation_of_this_package(install):
    install("class Other: ...", "sparkhvd.shapes", "square = added_package:Other")
    assert REGISTRY.load("square")(9.0) == 3.0
    assert REGISTRY.added() == {}
