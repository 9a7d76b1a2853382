"""The user's modules and their imports. A user's module belongs neither to Python nor to an installed package."""

from __future__ import annotations

import ast
import dis
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from sparkhvd.task.user_code import importable

# Executors have modules of these names, wherever the files are.
_MODULES_OF_EXECUTORS = frozenset({"__main__", "__mp_main__", "sparkhvd", "pyspark", "py4j"})


@dataclass(frozen=True)
class UserModule:
    """One of the user's modules.

    Attributes:
        name: dotted name.
        file: file it is loaded from.
        content: bytes of that file.
        is_package: whether the file is the ``__init__`` of a package.
    """

    name: str
    file: str
    content: bytes
    is_package: bool

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the file."""
        return importable.digest(self.content)

    @property
    def is_compiled(self) -> bool:
        """Return whether it is an extension module, whose code cannot be pickled."""
        return self.file.endswith(tuple(EXTENSION_SUFFIXES))


def is_installed(path: Path) -> bool:
    """Return whether a module's file belongs to Python or an installed package, so that executors have it too."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return path.is_relative_to(sysconfig.get_path("stdlib"))


def user_module(name: str) -> UserModule | None:
    """Return the user's module of this name, imported or on the import path; None if the user has no such module."""
    top = name.partition(".")[0]
    if top in _MODULES_OF_EXECUTORS or (top in sys.stdlib_module_names and not _is_shadowed(top)):
        return None
    module = sys.modules.get(name)
    if module is None and _is_installed_module(sys.modules.get(top)):
        return None
    spec = importable.locate(name) if module is None else getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None) or getattr(spec, "origin", None)
    if not isinstance(file, str) or not Path(file).suffix or is_installed(Path(file)):
        return None
    return UserModule(name, file, _content(file, spec), hasattr(module, "__path__") or _is_package(spec))


def imported(module: UserModule) -> frozenset[str]:
    """Return the user's modules that a module imports anywhere in its code, their packages, and its own package."""
    candidates = set(_imports(module.content, module.name, module.is_package))
    package = module.name.rpartition(".")[0]
    return frozenset(name for name in (*candidates, package) if name and _is_candidate(name) and user_module(name))


def import_graph(names: Collection[str]) -> dict[str, tuple[UserModule, frozenset[str]]]:
    """Return these modules and all their direct and indirect imports, each with its own imports."""
    graph: dict[str, tuple[UserModule, frozenset[str]]] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in graph and (module := user_module(name)) is not None:
            graph[name] = module, imported(module)
            waiting += graph[name][1]
    return graph


def sent_by_value(imports: Mapping[str, Collection[str]], importable_there: Collection[str]) -> frozenset[str]:
    """Return the modules to pickle by value: all that executors cannot import, and all that import one of these.

    Indirect imports count, too. Therefore, a module that is pickled by reference never imports a module that is
    pickled by value, and no class exists twice on an executor.

    Args:
        imports: the modules that each module imports.
        importable_there: the modules that executors can import.
    """
    sent = {name for name in imports if name not in importable_there}
    while more := {name for name, needed in imports.items() if name not in sent and sent.intersection(needed)}:
        sent |= more
    return frozenset(sent)


def imported_when_called(function: FunctionType) -> frozenset[str]:
    """Return the names in the import statements of a function, whether or not they are modules."""
    package = function.__globals__.get("__package__") or ""
    return frozenset(name for code in nested_code(function.__code__) for name in _imported_by(code, package))


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of a function and of the functions and classes that are nested in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from nested_code(const)


def loaded_user_modules() -> list[UserModule]:
    """Return the user's modules that this process has imported."""
    modules = (user_module(name) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType))
    return [module for module in modules if module is not None]


def _imported_by(code: CodeType, package: str) -> Iterator[str]:
    base = ""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for index, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[index - 2].argval  # the compiler loads the level, then the names to import
            parent_packages = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            base = ".".join([*parent_packages, *([step.argval] if step.argval else [])])
            yield base
        elif step.opname == "IMPORT_FROM" and base:
            yield f"{base}.{step.argval}"


def _is_shadowed(top: str) -> bool:
    """Return whether a user's module shadows one of the standard library: a script's folder comes first on the path."""
    loaded = sys.modules.get(top)
    file = getattr(importable.locate(top), "origin", None) if loaded is None else getattr(loaded, "__file__", None)
    if not isinstance(file, str) or not Path(file).suffix:
        return False
    return not any(Path(file).is_relative_to(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix))


def _is_installed_module(module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and is_installed(Path(file))


def _is_candidate(name: str) -> bool:
    """Return whether a name may be a module: ``from package import name`` may import a submodule or an attribute."""
    parent, _, last = name.rpartition(".")
    known = getattr(sys.modules.get(parent), "__dict__", {}).get(last)
    return name in sys.modules or known is None or isinstance(known, ModuleType)


def _content(file: str, spec: ModuleSpec | None) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError:  # in an archive
        return b"" if spec is None else importable.content(spec)


def _is_package(spec: ModuleSpec | None) -> bool:
    return spec is not None and spec.submodule_search_locations is not None


@lru_cache(maxsize=4096)
def _imports(content: bytes, name: str, is_package: bool) -> frozenset[str]:
    """Return the names in a module's import statements, whether or not they are modules, and their packages."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # compiled, or for another version of Python
        return frozenset()
    package = name if is_package else name.rpartition(".")[0]
    names: set[str] = set()
    for node in _executed_nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            names.add(base)
            names.update(f"{base}.{alias.name}" if base else alias.name for alias in node.names)
    return frozenset(part for imported_name in names for part in _name_and_packages(imported_name))


def _executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes in it, except those under ``if TYPE_CHECKING``, which do not run."""
    yield node
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = iter(node.orelse)
    for child in children:
        yield from _executed_nodes(child)


def _base(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _name_and_packages(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
