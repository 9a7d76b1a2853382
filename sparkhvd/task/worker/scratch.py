"""A folder for the files of one rank that nobody wants after it.

Whoever watches over the rank removes it, because a process that is killed removes nothing; a rank whose watcher is
killed does so itself, before it ends.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress

from sparkhvd.config import local_folders


def make_scratch(within: str | None = None) -> str | None:
    """A new folder: in ``within``, or in the first of the local folders that takes one.

    Spark's own come first of them, which go with the application.
    """
    for folder in local_folders() if within is None else (within,):
        with suppress(OSError):
            return tempfile.mkdtemp(prefix="sparkhvd-rank-", dir=folder)
    return None


def remove_scratch(folder: str | None) -> None:
    """Remove it with all that is in it; may be called again."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
