"""A name for one writer only, in folders that know no links."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from pathlib import Path

from sparkhvd.deadline import Deadline

_CLAIM_SECONDS = 60.0  # longer than looking and renaming takes
_LOOK_SECONDS = 0.05  # nothing tells when a folder goes


def rename_once(temporary: Path, target: Path) -> None:
    """Give a file a name that nothing has yet, where neither links nor exclusive renames are to be had.

    Only one writer can make a folder, and who has made ``.<name>.claim`` may look and rename. The claim of a writer
    that was killed is taken away after a minute.

    Raises:
        FileExistsError: something has the name.
        DeadlineExceededError: others keep claiming it.
    """
    claim = target.with_name(f".{target.name}.claim")
    deadline = Deadline.after(3 * _CLAIM_SECONDS)
    while not _made(claim):
        _refuse_existing(target)
        deadline.check(f"the end of {claim}")
        with suppress(FileNotFoundError):
            if time.time() - claim.stat().st_mtime > _CLAIM_SECONDS:
                claim.rmdir()
        time.sleep(_LOOK_SECONDS)
    try:
        _refuse_existing(target)
        temporary.rename(target)
    finally:
        with suppress(FileNotFoundError):
            claim.rmdir()


def _made(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(target))
