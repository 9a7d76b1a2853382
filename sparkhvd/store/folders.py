"""The folders of a Store: one root, and optionally a separate folder for runs."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.errors import StoreError

# The suffix of names of unfinished files; such names also start with a dot.
UNFINISHED = ".unfinished"
# A writer finishes a file, or writes to it again, within this time; an older unfinished file belongs to a killed
# writer.
LEFTOVER_SECONDS = 24 * 3600

_RUNS = "runs"


@dataclass(frozen=True)
class StoreFolders:
    """The folders of a Store as locations in its file system, without a trailing slash.

    Attributes:
        root: the folder of everything except runs with a separate folder.
        runs: the folder for ``runs/...``; None for one below the root.
    """

    root: str
    runs: str | None = None

    def of(self, path: str, url: str) -> str:
        """Return the file-system location of a path.

        Raises:
            StoreError: the path could lead out of the Store ``url``.
        """
        if not path or "\0" in path or any(part in {"", ".", ".."} for part in path.split("/")):
            raise StoreError(
                f"{path!r} is not a path inside the Store {url}; use names separated by single '/', "
                "without a leading '/', '.' or '..'."
            )
        first, slash, rest = path.partition("/")
        if self.runs is not None and first == _RUNS:
            return f"{self.runs}{slash}{rest}"
        return f"{self.root}/{path}"

    def tops(self, path: str, url: str) -> list[tuple[str, str]]:
        """Return the locations to list for ``path`` (``""`` for the whole Store), each with its path in the Store."""
        if path:
            return [(self.of(path, url), path)]
        everything = [(self.root, "")]
        return everything if self.runs is None else [*everything, (self.runs, _RUNS)]


def root_of(prefix: str | None, others: Sequence[str | None]) -> str:
    """Return the folder of a Store: ``prefix``, or by default the deepest folder that contains all others.

    Raises:
        StoreError: all are None, or the others have no folder in common.
    """
    if prefix is not None:
        return prefix
    paths = [path.rstrip("/") for path in others if path is not None]
    if not paths:
        raise StoreError("A Store needs a folder: set prefix_path, or one of the other paths.")
    common = _common_folder([posixpath.dirname(path) for path in paths])
    if not common:
        raise StoreError(f"{', '.join(paths)} have no folder in common that could hold the Store. Set prefix_path too.")
    return common


def _common_folder(folders: Sequence[str]) -> str:
    parts = [folder.split("/") for folder in folders]
    same = 0
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        same += 1
    return "/".join(parts[0][:same])
