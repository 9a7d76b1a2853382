"""Packages whose public names are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        homes: the module of every public name.

    Examples:
        >>> __getattr__, __dir__ = lazy_names(__name__, {"Decimal": "decimal"})
        >>> __getattr__("Decimal")("1.50")
        Decimal('1.50')
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted([*vars(sys.modules[package]), *homes])

    return get, names
