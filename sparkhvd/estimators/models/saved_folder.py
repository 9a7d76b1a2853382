"""The folder of a saved object, which is replaced so that a reader finds the old object or the new one, always whole.

``metadata/part-00000`` makes a saved object of a folder, and a Store replaces one file at once. So it decides which
files count: those beside it, or those in the folder ``content-...`` that it names. To replace an object,

1. the new files are written to a folder ``content-...`` beside the old ones,
2. the metadata is replaced by one that names this folder: from here on the new object is there,
3. the old files are removed, and the new ones copied to their place,
4. the metadata is replaced by one that names no folder, and the folder is removed.

Whoever is killed in between leaves one whole object, and files that the next writer removes.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparkhvd.errors import ParamError, SparkHvdError, StoreError
from sparkhvd.estimators.training.job_files import PIECE_BYTES
from sparkhvd.store import Store

logger = logging.getLogger(__name__)

METADATA = "metadata/part-00000"
FORMAT, _FORMAT_ELSEWHERE = 1, 2
_CONTENT = "content-"
# Hadoop's checksum of the metadata that Spark wrote: with it, Spark would take other metadata for damaged.
_CHECKSUM = "metadata/.part-00000.crc"

T = TypeVar("T")
Metadata = Mapping[str, Any]
Write = Callable[[Store, str], Metadata]  # writes the files of an object into a folder and returns the metadata


def write_new(store: Store, folder: str, write: Write) -> None:
    """Write an object into a folder that is not there yet; the metadata last."""
    store.publish(f"{folder}/{METADATA}", _to_json(write(store, folder), None))


def overwrite(store: Store, folder: str, write: Write) -> None:
    """Write an object in place of what is in a folder.

    Raises:
        SparkHvdError: it cannot be written; what was there is still there.
    """
    name = f"{_CONTENT}{uuid.uuid4().hex}"
    content = f"{folder}/{name}"
    try:
        metadata = write(store, content)
        written = store.list(content)
        store.delete(f"{folder}/{_CHECKSUM}")
        _replace(store, folder, _to_json(metadata, name))
    except BaseException:
        _remove_unless_named(store, folder, name)
        raise
    try:
        _move_to_place(store, folder, name, written)
        if _is_named(store, folder, name):  # else another writer has saved its object since
            _replace(store, folder, _to_json(metadata, None))
        store.delete(content)
    except (SparkHvdError, OSError) as error:  # it is saved
        # As text: an error holds the frames that it came through, and a log may hold it for long.
        logger.warning("%s/%s is saved, but with its files in %s: %s", store.url, folder, name, str(error))


def read(store: Store, folder: str, kind: str, load: Callable[[dict[str, Any], str], T]) -> T:
    """Read a saved object, as a whole; where another writer replaces it meanwhile, from the start.

    Args:
        store: where.
        folder: of the object.
        kind: the name of its class.
        load: makes it of its metadata and the folder that holds its files.

    Raises:
        StoreError: there is none.
        ParamError: it is of another class, or of a later format.
    """
    while True:
        content = _metadata(store, folder)
        if content is None:
            raise StoreError(f"{store.url}/{folder} holds no saved {kind}: {METADATA} is missing.")
        try:
            found = load(content, _place(store, folder, kind, content))
        except SparkHvdError:
            if _metadata(store, folder) == content:
                raise
        else:
            if _metadata(store, folder) == content:
                return found


def _place(store: Store, folder: str, kind: str, content: Metadata) -> str:
    """The folder that holds the files of an object with this metadata."""
    found = content["class"].rpartition(".")[2]
    if found != kind:
        raise ParamError(f"{store.url}/{folder} holds a {found}, not a {kind}; load it with {found}.load.")
    if (written := content["sparkhvd"]["format"]) > _FORMAT_ELSEWHERE:
        raise ParamError(
            f"{store.url}/{folder} was saved in format {written}; this version reads up to {_FORMAT_ELSEWHERE}. "
            "Install a newer sparkhvd."
        )
    elsewhere = content["sparkhvd"].get("content")
    return folder if elsewhere is None else f"{folder}/{elsewhere}"


def is_transient(folder: str) -> bool:
    """Whether the files of an object lie in a folder that its next writer removes."""
    return folder.rpartition("/")[2].startswith(_CONTENT)


def _metadata(store: Store, folder: str) -> dict[str, Any] | None:
    path = f"{folder}/{METADATA}"
    try:
        with store.open(path, "rb") as file:
            found: dict[str, Any] = json.loads(file.read())
    except StoreError:
        if store.exists(path):
            raise
        return None
    return found


def _to_json(metadata: Metadata, content: str | None) -> bytes:
    own: dict[str, Any] = {**metadata["sparkhvd"], "format": FORMAT}
    if content is not None:
        own |= {"format": _FORMAT_ELSEWHERE, "content": content}
    return json.dumps({**metadata, "sparkhvd": own}).encode() + b"\n"


def _replace(store: Store, folder: str, metadata: bytes) -> None:
    with store.open(f"{folder}/{METADATA}", "wb") as file:
        file.write(metadata)


def _remove_unless_named(store: Store, folder: str, name: str) -> None:
    """Remove the files of an object that was not saved; a write that failed may have arrived all the same."""
    try:
        if not _is_named(store, folder, name):
            store.delete(f"{folder}/{name}")
    except (SparkHvdError, ValueError) as error:  # the failure that led here is the one to report
        logger.warning("Could not remove %s/%s/%s: %s", store.url, folder, name, str(error))


def _is_named(store: Store, folder: str, name: str) -> bool:
    """Whether the metadata says that the files of the object lie in the folder ``name``."""
    found = _metadata(store, folder)
    return found is not None and found.get("sparkhvd", {}).get("content") == name


def _move_to_place(store: Store, folder: str, name: str, written: list[str]) -> None:
    """Remove everything else from a folder, and copy the object's files to where they belong."""
    content = f"{folder}/{name}"
    for path in store.list(folder):
        if path != f"{folder}/{METADATA}" and path not in written:
            store.delete(path)
    for path in written:
        target = f"{folder}/{path.removeprefix(content).lstrip('/')}"
        with store.open(path, "rb") as source, store.open(target, "wb") as copied:
            shutil.copyfileobj(source, copied, PIECE_BYTES)
