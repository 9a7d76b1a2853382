"""Where the parts of a Store lie: below one folder, except for those that were given a folder of their own."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from sparkhvd.errors import StoreError

# The end of the names of files that are being written; such names also start with a dot.
UNFINISHED = ".unfinished"
# A file that is being written is touched more often than this; an older one belongs to a writer that was killed.
LEFTOVER_SECONDS = 24 * 3600

_RUNS = "runs"


@dataclass(frozen=True)
class StoreFolders:
    """The folders of a Store, as its file system knows them, without a slash at the end.

    Attributes:
        root: everything lies below it, except for the runs when they have a folder of their own.
        runs: what ``runs/...`` stands for; None means below the root.
    """

    root: str
    runs: str | None = None

    def of(self, path: str, url: str) -> str:
        """The place of a path.

        Raises:
            StoreError: it could lead out of the Store ``url``.
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
        """The places to list for ``path`` (``""`` for the whole Store), each with the path that it stands for."""
        if path:
            return [(self.of(path, url), path)]
        everything = [(self.root, "")]
        return everything if self.runs is None else [*everything, (self.runs, _RUNS)]


def root_of(prefix: str | None, others: Sequence[str | None]) -> str:
    """The folder of a Store: ``prefix``, or without one the deepest folder that holds all the others.

    Raises:
        StoreError: nothing was given, or the others have no folder in common.
    """
    if prefix is not None:
        return prefix
    given = [path.rstrip("/") for path in others if path is not None]
    if not given:
        raise StoreError("A Store needs a folder: set prefix_path, or one of train_path, val_path and runs_path.")
    common = _common_folder([posixpath.dirname(path) for path in given])
    if not common:
        raise StoreError(f"{', '.join(given)} have no folder in common that could hold the Store. Set prefix_path too.")
    return common


def _common_folder(folders: Sequence[str]) -> str:
    parts = [folder.split("/") for folder in folders]
    same = 0
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        same += 1
    return "/".join(parts[0][:same])
