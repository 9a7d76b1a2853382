"""Selects the files of a folder that Spark reads, by their names alone."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

_UNFINISHED = "._COPYING_"  # the suffix of files that Hadoop's shell is still copying


def shown_files(paths: Sequence[str]) -> list[str]:
    """Return the files that contain rows, in their original order.

    A name that begins with ``_`` or a dot hides a file, or all files in a folder. A partition folder such as ``_day=1``
    is not hidden. If there are partition folders, the rows are in their files; otherwise they are in the files directly
    in the folder. Without partition folders and such files, files at any depth count, although Spark would fail.

    Args:
        paths: all files, relative to the folder.
    """
    visible = visible_files(paths)
    in_partitions = [path for path in visible if partition_columns([path])]
    return in_partitions or [path for path in visible if "/" not in path] or visible


def visible_files(paths: Sequence[str]) -> list[str]:
    """Return the files that are not hidden by their own name or the name of a folder."""
    return [path for path in paths if not any(map(_is_hidden, path.split("/")))]


def partition_columns(paths: Sequence[str]) -> set[str]:
    """Return the partition columns: those whose values Spark's ``partitionBy`` writes into folder names."""
    folders = {folder for path in paths for folder in path.split("/")[:-1]}
    return {unquote(folder.partition("=")[0]) for folder in folders if "=" in folder}


def _is_hidden(name: str) -> bool:
    return (name.startswith("_") and "=" not in name) or name.startswith(".") or name.endswith(_UNFINISHED)
