"""The temporary folder of one rank.

The supervisor of the rank removes the folder, because a killed rank cannot. If the supervisor is killed, the rank
removes the folder before it ends.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress

from sparkhvd.config import local_folders


def make_scratch(within: str | None = None) -> str | None:
    """Create a folder in ``within``, or in the first usable local folder.

    Spark's local folders come first, because Spark removes them with the application.
    """
    for folder in local_folders() if within is None else (within,):
        with suppress(OSError):
            return tempfile.mkdtemp(prefix="sparkhvd-rank-", dir=folder)
    return None


def remove_scratch(folder: str | None) -> None:
    """Remove the folder with its content; a missing folder is no error."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
