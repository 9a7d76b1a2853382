"""Finds, without imports, which user modules a process can import and whether they match the driver's."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from itertools import accumulate
from pathlib import Path


@dataclass(frozen=True)
class Findings:
    """The modules that a process finds on its import path.

    Attributes:
        same: modules with the requested content.
        other: modules with the requested name but other content.
    """

    same: frozenset[str]
    other: frozenset[str]


def find_modules(modules: Mapping[str, str]) -> Findings:
    """Look for modules on the import path of this process.

    Args:
        modules: the SHA-256 of each module's file, by the module's name.
    """
    importlib.invalidate_caches()
    specs = {name: spec for name in modules if (spec := locate(name)) is not None}
    same = frozenset(name for name, spec in specs.items() if digest(content(spec)) == modules[name])
    return Findings(same, frozenset(specs) - same)


def locate(name: str) -> ModuleSpec | None:
    """Find a module on the import path without importing it or its packages; None if it does not exist.

    For a module that a compiled module may create when it is imported, return the compiled module.
    """
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    for part in accumulate(name.split("."), "{}.{}".format):
        parent, spec = spec, _find(part, path)
        if spec is None:
            return parent if isinstance(getattr(parent, "loader", None), ExtensionFileLoader) else None
        # The locations of a nested namespace package cannot be listed before its parent is imported.
        locations = spec.submodule_search_locations
        path = list(getattr(locations, "_path", locations) or ())
    return spec


def _find(name: str, path: list[str] | None) -> ModuleSpec | None:
    try:
        finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
        return next((spec for finder in finders if (spec := finder.find_spec(name, path)) is not None), None)
    except KeyError:  # the finder looks up the parent of a namespace package, which is not imported
        folder = name.rpartition(".")[2]
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [
            str(location) for root in path or () if (location := Path(root, folder)).is_dir()
        ]
        return spec


def content(spec: ModuleSpec) -> bytes:
    """Return the bytes of a module's file; empty if there is none to read."""
    try:
        return bytes(spec.loader.get_data(spec.origin))  # type: ignore[union-attr]  # not every loader has it
    except (AttributeError, OSError, TypeError):
        return b""


def digest(content: bytes) -> str:
    """Return the SHA-256 of a module's file."""
    return hashlib.sha256(content).hexdigest()
