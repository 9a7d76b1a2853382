"""Pickles of the user's objects that the other side can open without having the user's modules."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import cloudpickle

# cloudpickle's table of modules to pickle by value belongs to the process; this keeps two jobs from undoing each other.
_PICKLE_TABLE = threading.Lock()


@contextmanager
def by_value(objects: Iterable[object]) -> Iterator[None]:
    """Within this block, code from the modules of these objects is pickled itself, where they are no installed package.

    The modules of a script's neighbours, of a notebook or of a test exist on the driver only.
    """
    with _PICKLE_TABLE:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = {module.__name__: module for item in objects if (module := _module_to_send(item)) is not None}
        added = [module for name, module in modules.items() if name not in known]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


def _module_to_send(item: object) -> ModuleType | None:
    name = getattr(item, "__module__", None) or type(item).__module__
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if module is None or path is None or name == "__main__" or name.partition(".")[0] == "sparkhvd":
        return None
    return None if is_installed(Path(path)) else module


def is_installed(path: Path) -> bool:
    """Whether a module's file belongs to Python or an installed package, so that executors have it too."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return path.is_relative_to(sysconfig.get_path("stdlib"))
