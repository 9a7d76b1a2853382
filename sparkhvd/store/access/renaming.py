"""Exclusive renames on file systems that have neither links nor exclusive renames."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path

from sparkhvd.deadline import Deadline

_CLAIM_SECONDS = 60.0  # longer than checking and renaming take
_POLL_SECONDS = 0.05  # nothing reports the removal of a folder


def rename_once(temporary: Path, target: Path) -> None:
    """Rename a file to an unused name.

    Only one writer can create the folder ``.<name>.claim``; that writer checks the name and renames the file. The claim
    of a killed writer is removed after a minute.

    Raises:
        FileExistsError: the name exists.
        DeadlineExceededError: other writers kept claiming the name.
    """
    claim = target.with_name(f".{target.name}.claim")
    deadline = Deadline.after(3 * _CLAIM_SECONDS)
    while not _create(claim):
        _refuse_existing(target)
        deadline.check(f"the removal of {claim}")
        with suppress(FileNotFoundError):
            if time.time() - claim.stat().st_mtime > _CLAIM_SECONDS:
                claim.rmdir()
        time.sleep(_POLL_SECONDS)
    try:
        _refuse_existing(target)
        temporary.rename(target)
    finally:
        with suppress(FileNotFoundError):
            claim.rmdir()


def _create(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(target))
