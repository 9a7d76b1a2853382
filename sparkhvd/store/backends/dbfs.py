"""A Store on Databricks: DBFS and Unity Catalog volumes, which every machine of a cluster mounts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparkhvd.compat.databricks import mounted_path, spark_url_of
from sparkhvd.errors import StoreError
from sparkhvd.store.access.renaming import rename_once
from sparkhvd.store.backends.local import LocalStore, absolute_path


@dataclass(frozen=True)
class DBFSStore(LocalStore):
    """A Store at ``dbfs:/folder``, ``/dbfs/folder``, ``file:/dbfs/folder`` or ``/Volumes/catalog/schema/volume``.

    Python reads and writes through the mounted folder, Spark through ``dbfs:``. These mounts have no links, so
    ``publish`` checks the name and then renames the file. A folder beside the file excludes other writers meanwhile.

    Attributes:
        prefix_path: the folder; see ``LocalStore`` for the others.
    """

    def spark_url(self, path: str) -> str:
        return spark_url_of(str(self._file(path)))

    def _absolute(self, path_or_url: str) -> str:
        mounted = mounted_path(path_or_url)
        if mounted is None:
            raise StoreError(
                f"{path_or_url!r} is not a folder on Databricks; use dbfs:/folder, /dbfs/folder, file:/dbfs/folder or "
                "/Volumes/catalog/schema/volume/folder."
            )
        return absolute_path(mounted)

    def _give_name(self, temporary: Path, target: Path) -> None:
        rename_once(temporary, target)


DBFSLocalStore = DBFSStore
"""Horovod's name."""
