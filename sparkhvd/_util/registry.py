"""Tables of implementations: those of this package, and those that other packages add by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Registry:
    """Implementations by name, as ``module:attribute``, imported on use.

    An installed package adds one with an entry point, for example to the group ``sparkhvd.launchers``::

        [project.entry-points."sparkhvd.launchers"]
        slurm = "my_package.slurm:SlurmLauncher"

    An entry point cannot replace an implementation of this package.

    Attributes:
        group: the group of the entry points.
        own: the implementations of this package, by name.
    """

    group: str
    own: Mapping[str, str]

    def added(self) -> dict[str, str]:
        """Return the implementations that other packages add."""
        from importlib.metadata import entry_points  # noqa: PLC0415  (slow to import, and many processes never need it)

        return {entry.name: entry.value for entry in entry_points(group=self.group) if entry.name not in self.own}

    def target(self, name: str) -> str | None:
        """Return ``module:attribute`` of a name; None if the name is unknown."""
        return self.own[name] if name in self.own else self.added().get(name)

    def load(self, name: str) -> Any:
        """Import an implementation.

        Raises:
            KeyError: the name is unknown.
            ImportError: its module, or a package that the module needs, is missing.
        """
        target = self.target(name)
        if target is None:
            raise KeyError(name)
        return resolve_name(target)
