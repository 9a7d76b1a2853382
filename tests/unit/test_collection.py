"""Find test modules without tests, which pytest does not report."""

from __future__ import annotations

import re
from pathlib import Path

_TESTS = Path(__file__).parents[1]


def test_every_test_module_contains_a_test() -> None:
    modules = list(_TESTS.rglob("test_*.py"))
    assert len(modules) > 200
    assert [path for path in modules if not re.search(r"^ *def test_", path.read_text(), re.MULTILINE)] == []
