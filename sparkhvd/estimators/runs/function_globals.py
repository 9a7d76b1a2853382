"""What the code of a function takes from around it: the names of its module, and modules that it imports itself."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from sparkhvd.driver.user_code.user_modules import codes, import_graph, imported_when_called, is_installed


def code_names(code: CodeType) -> list[str]:
    """All names in a function's code, also those of attributes."""
    return list(dict.fromkeys(name for each in codes(code) for name in each.co_names))


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The names of its module that a function reads, with what they stand for."""
    read = {
        str(step.argval)
        for code in codes(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname in {"LOAD_GLOBAL", "LOAD_NAME"} and not str(step.argval).startswith("__")
    }
    return {name: function.__globals__[name] for name in sorted(read) if name in function.__globals__}


def imports_of(function: FunctionType) -> list[tuple[str, str]]:
    """The modules of the user's that a function imports when it runs, with all that they import and their digests."""
    graph = import_graph(imported_when_called(function))
    return sorted((name, module.digest) for name, (module, _) in graph.items())


def module_is_installed(module: str | None) -> bool:
    """Whether a module comes with Python, from a package, or from here; its version counts no more than theirs."""
    if not isinstance(module, str):  # as of a function that exec made
        return False
    package = module.partition(".")[0]
    found = sys.modules.get(module) or sys.modules.get(package)
    if found is None or module == "__main__":
        return False
    file = getattr(found, "__file__", None)
    if file is None or package == __name__.partition(".")[0]:
        return True
    return is_installed(Path(file))
