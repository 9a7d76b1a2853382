"""Renames of finished files, also exclusive ones on file systems that have neither links nor exclusive renames."""

from __future__ import annotations

import errno
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from sparkhvd.deadline import Deadline

_CLAIM_SECONDS = 60.0  # longer than checking and renaming take
_POLL_SECONDS = 0.05  # nothing reports the removal of a folder


def rename(temporary: Path, target: Path) -> None:
    """Rename a file, and replace a file that has the name.

    NFS repeats a request whose answer was lost. The repeated one does not find the file, because it has its new name.
    """
    renamed = temporary.stat()
    try:
        temporary.replace(target)
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            if os.path.samestat(target.stat(), renamed):
                return
        raise


def rename_once(temporary: Path, target: Path) -> None:
    """Rename a file to an unused name.

    Only one writer can create the folder ``.<name>.claim``; that writer checks the name and renames the file. A claim
    that another writer has seen unchanged for a minute by its own clock is that of a killed writer, and is removed. The
    times of files are no measure, because the clocks of machines may differ.

    A claim contains a folder with a unique name, its token. So a writer that removes the old claim of a killed writer
    cannot remove the new claim of another writer that did so first: its token differs, and a folder that is not empty
    cannot be removed.

    Raises:
        FileExistsError: the name exists.
        DeadlineExceededError: other writers kept claiming the name.
    """
    claim = target.with_name(f".{target.name}.claim")
    token = claim / uuid.uuid4().hex
    deadline = Deadline.after(3 * _CLAIM_SECONDS)
    seen, expiry = _tokens(claim), Deadline.after(_CLAIM_SECONDS)
    while not _acquire(claim, token):
        _refuse_existing(target)
        deadline.check(f"the removal of {claim}")
        if (tokens := _tokens(claim)) != seen:
            seen, expiry = tokens, Deadline.after(_CLAIM_SECONDS)
        elif expiry.expired():
            _remove(claim, *seen)
        time.sleep(_POLL_SECONDS)
    try:
        _refuse_existing(target)
        rename(temporary, target)
    finally:
        _remove(claim, token)


def _acquire(claim: Path, token: Path) -> bool:
    """Create the claim and its token; return whether this writer holds it."""
    if not _create(claim):
        return False
    held = False
    try:
        # Another writer may have removed the claim before it had a token, and a third one may have created it again.
        with suppress(FileNotFoundError):
            token.mkdir()
            held = list(claim.iterdir()) == [token]
    finally:
        if not held:
            _remove(claim, token)
    return held


def _tokens(claim: Path) -> list[Path]:
    """Return the tokens in a claim, normally one."""
    with suppress(FileNotFoundError):
        return sorted(claim.iterdir())
    return []


def _remove(claim: Path, *tokens: Path) -> None:
    """Remove these tokens, and the claim unless it has another one."""
    for folder in (*tokens, claim):
        with suppress(OSError):
            folder.rmdir()


def _create(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise FileExistsError(errno.EEXIST, "File exists", str(target))
