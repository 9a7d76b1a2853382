"""A Store on Databricks: DBFS and Unity Catalog volumes, which every machine of a cluster mounts."""

from __future__ import annotations

import errno
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkhvd.databricks import mounted_path, spark_url_of
from sparkhvd.deadline import Deadline
from sparkhvd.errors import StoreError
from sparkhvd.store.local import LocalStore, absolute_path

_CLAIM_SECONDS = 60.0  # longer than looking and renaming takes
_LOOK_SECONDS = 0.05  # nothing tells when a folder goes


@dataclass(frozen=True)
class DBFSStore(LocalStore):
    """A Store at ``dbfs:/folder``, ``/dbfs/folder``, ``file:/dbfs/folder`` or ``/Volumes/catalog/schema/volume``.

    Python reads and writes through the mounted folder, Spark through ``dbfs:``. These mounts know no links, so
    ``publish`` looks and then renames, while a folder beside the file keeps others from doing the same.

    Attributes:
        prefix_path: the folder; see ``LocalStore`` for the others.
    """

    def spark_url(self, path: str) -> str:
        return spark_url_of(str(self._file(path)))

    def _absolute(self, path_or_url: str) -> str:
        mounted = mounted_path(path_or_url)
        if mounted is None:
            raise StoreError(
                f"{path_or_url!r} is no folder of Databricks; give dbfs:/folder, /dbfs/folder, file:/dbfs/folder or "
                "/Volumes/catalog/schema/volume/folder."
            )
        return absolute_path(mounted)

    def _give_name(self, temporary: Path, target: Path) -> None:
        rename_once(temporary, target)


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


DBFSLocalStore = DBFSStore
"""Horovod's name."""
