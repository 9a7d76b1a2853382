"""Lightning's two names: ``lightning.pytorch`` and ``pytorch_lightning`` hold the same classes twice."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

from sparkhvd._util.framework_imports import keep_triton_from_tensorflow
from sparkhvd.errors import ConfigError

FlavourName = Literal["lightning.pytorch", "pytorch_lightning"]

NAMES: tuple[FlavourName, ...] = ("lightning.pytorch", "pytorch_lightning")

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def imported_flavours() -> list[FlavourName]:
    """Return the names under which this process has imported Lightning."""
    # A package that is still being imported has no Trainer yet.
    return [name for name in NAMES if hasattr(sys.modules.get(name), "Trainer")]


def default_flavour() -> FlavourName:
    """Return the name to use: an imported one, else an installed one; ``lightning`` takes precedence.

    Raises:
        ConfigError: Lightning is not installed.
    """
    names = imported_flavours() or [name for name in NAMES if find_spec(name.partition(".")[0]) is not None]
    if not names:
        raise ConfigError("Lightning is not installed; run pip install 'sparkhvd[lightning]' (on the executors too).")
    return names[0]


def flavour_of(part: object) -> FlavourName | None:
    """Return the name of the Lightning that an object's class comes from; None for other objects."""
    kind = part if isinstance(part, type) else type(part)
    for base in kind.__mro__:
        for name in NAMES:
            if base.__module__.startswith(f"{name}."):
                return name
    return None


def import_lightning(name: FlavourName) -> ModuleType:
    """Import and return the package of this name."""
    keep_triton_from_tensorflow()
    return import_module(name)


def import_fabric(name: FlavourName) -> ModuleType:
    """Import and return the Fabric package that this Lightning is built on."""
    return import_module(_FABRIC[name])
