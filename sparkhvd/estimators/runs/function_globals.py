"""The dependencies of a function's code: the globals that it reads, and the modules that it imports itself."""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from sparkhvd.driver.user_code.user_modules import import_graph, imported_when_called, is_installed, nested_code


def code_names(code: CodeType) -> list[str]:
    """Return all names in a function's code, including the names of attributes."""
    return list(dict.fromkeys(name for part in nested_code(code) for name in part.co_names))


def globals_of(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function reads, with their values."""
    read = {
        str(step.argval)
        for code in nested_code(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and not str(step.argval).startswith("__")
    }
    return {name: function.__globals__[name] for name in sorted(read) if name in function.__globals__}


def passed_globals(function: FunctionType) -> frozenset[str]:
    """Return the globals that a function passes or stores instead of only reading their attributes."""
    passed = set()
    for code in nested_code(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in {"EXTENDED_ARG", "NOP"}]
        for step, following in pairwise(steps):
            if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and following.opname not in {"LOAD_ATTR", "LOAD_METHOD"}:
                passed.add(str(step.argval))
    return frozenset(passed)


def imports_of(function: FunctionType) -> list[tuple[str, str]]:
    """Return the user's modules that a function imports when it runs, directly or indirectly, with their digests."""
    return digests_of(imported_when_called(function))


def digests_of(names: Collection[str]) -> list[tuple[str, str]]:
    """Return the user's modules among these names, and the ones that they import, with the digests of their files."""
    return sorted((name, module.digest) for name, (module, _) in import_graph(names).items())


def module_is_installed(module: str | None) -> bool:
    """Return whether a module belongs to Python, to an installed package, or to sparkhvd, and not to the user."""
    if not isinstance(module, str):  # functions from exec() have none
        return False
    package = module.partition(".")[0]
    loaded = sys.modules.get(module) or sys.modules.get(package)
    if loaded is None or module == "__main__":
        return False
    file = getattr(loaded, "__file__", None)
    if file is None or package == __name__.partition(".")[0]:
        return True
    return is_installed(Path(file))
