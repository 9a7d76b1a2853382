"""The folder of a saved object, which is replaced atomically: a reader finds the complete old object or the new one.

A folder is a saved object if it has ``metadata/part-00000``, which a Store replaces atomically. The metadata decides
which files count: the files next to it, or the files in the folder ``content-...`` that it names. To replace an object,

1. the new files are written to a folder ``content-...`` next to the old ones,
2. the metadata is replaced by one that names this folder, which commits the new object,
3. the old files are removed, and the new ones are copied to their final paths,
4. the metadata is replaced by one that names no folder, and the folder is removed.

A writer that is killed in between leaves one complete object, and files that the next writer removes. Writers of the
same folder take turns (see ``folder_lease``).
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sparkhvd.errors import ParamError, SparkHvdError, StoreError
from sparkhvd.estimators.models.folder_lease import FolderLease, hold_folder, is_lease, occupied_error
from sparkhvd.estimators.training.job_files import PIECE_BYTES
from sparkhvd.store import Store
from sparkhvd.store.optional_files import read_if_exists

logger = logging.getLogger(__name__)

METADATA = "metadata/part-00000"
FORMAT, _FORMAT_WITH_FOLDER = 1, 2
_CONTENT = "content-"
# Hadoop's checksum of metadata that Spark wrote; while it exists, Spark considers replaced metadata corrupt.
_CHECKSUM = "metadata/.part-00000.crc"

T = TypeVar("T")
Metadata = Mapping[str, Any]
Write = Callable[[Store, str], Metadata]  # writes the files of an object into a folder and returns the metadata


def write_new(store: Store, folder: str, write: Write) -> None:
    """Write an object into a new folder, the metadata last.

    Raises:
        SparkHvdError: the object cannot be written, or another writer has begun to write one.
    """
    with hold_folder(store, folder, waits=False) as lease:
        if files(store, folder):  # of a writer that has ended meanwhile
            raise occupied_error(store, folder)
        _write_first(store, folder, write, lease)


def overwrite(store: Store, folder: str, write: Write) -> None:
    """Replace the object in a folder, or write the first one; wait until earlier writers have ended.

    Raises:
        SparkHvdError: the new object cannot be written, or another writer does not end.
    """
    with hold_folder(store, folder, waits=True) as lease:
        if files(store, folder):
            _replace(store, folder, write, lease)
        else:
            _write_first(store, folder, write, lease)


def _write_first(store: Store, folder: str, write: Write, lease: FolderLease) -> None:
    """Write an object into an empty folder, and leave it empty if that fails."""
    try:
        metadata = _to_json(write(store, folder), None)
        lease.check()
        store.publish(f"{folder}/{METADATA}", metadata)
    except BaseException:
        try:
            if _metadata(store, folder) is None:  # else the write succeeded and still raised an error
                lease.check()
                for path in files(store, folder):
                    store.delete(path)
        except (SparkHvdError, ValueError) as error:  # the failure that led here is the one to report
            logger.warning("Could not remove the files in %s/%s: %s", store.url, folder, str(error))
        raise


def _replace(store: Store, folder: str, write: Write, lease: FolderLease) -> None:
    name = f"{_CONTENT}{uuid.uuid4().hex}"
    content = f"{folder}/{name}"
    try:
        metadata = write(store, content)
        written = store.list(content)
        lease.check()
        store.delete(f"{folder}/{_CHECKSUM}")
        _replace_metadata(store, folder, _to_json(metadata, name))
    except BaseException:
        _remove_unless_committed(store, folder, name)
        raise
    try:
        lease.check()
        _copy_to_final_paths(store, folder, name, written)
        lease.check()
        _replace_metadata(store, folder, _to_json(metadata, None))
        store.delete(content)
    except (SparkHvdError, OSError) as error:  # the object is saved nevertheless
        # As text: a log record may live long, and an error keeps the frames of its traceback alive.
        logger.warning("%s/%s is saved, but its files stay in the folder %s: %s", store.url, folder, name, str(error))


def read(store: Store, folder: str, class_name: str, load: Callable[[Metadata, str], T]) -> T:
    """Return a saved object; if a writer replaces it in the meantime, read the new object.

    Args:
        store: the Store of the folder.
        folder: the object's folder.
        class_name: the name of its class.
        load: creates the object from its metadata and the folder that holds its files.

    Raises:
        StoreError: there is no saved object.
        ParamError: the object has another class or a later format.
    """
    while True:
        metadata = _metadata(store, folder)
        if metadata is None:
            raise StoreError(
                f"{store.url}/{folder} holds no saved {class_name}: {METADATA} is missing. Check the path."
            )
        try:
            loaded = load(metadata, _content_folder(store, folder, class_name, metadata))
        except SparkHvdError:
            if _metadata(store, folder) == metadata:
                raise
        else:
            if _metadata(store, folder) == metadata:
                return loaded


def _content_folder(store: Store, folder: str, class_name: str, metadata: Metadata) -> str:
    """Return the folder that holds the files of an object with this metadata."""
    saved_class = metadata["class"].rpartition(".")[2]
    if saved_class != class_name:
        raise ParamError(
            f"{store.url}/{folder} holds a {saved_class}, not a {class_name}; load it with {saved_class}.load."
        )
    if (saved_format := metadata["sparkhvd"]["format"]) > _FORMAT_WITH_FOLDER:
        raise ParamError(
            f"{store.url}/{folder} was saved in format {saved_format}; this version reads up to {_FORMAT_WITH_FOLDER}. "
            "Install a newer sparkhvd."
        )
    content = metadata["sparkhvd"].get("content")
    return folder if content is None else f"{folder}/{content}"


def is_transient(folder: str) -> bool:
    """Return whether an object's files are in a folder ``content-...``, which the next writer removes."""
    return folder.rpartition("/")[2].startswith(_CONTENT)


def _metadata(store: Store, folder: str) -> Metadata | None:
    content = read_if_exists(store, f"{folder}/{METADATA}")
    metadata: Metadata | None = None if content is None else json.loads(content)
    return metadata


def _to_json(metadata: Metadata, content: str | None) -> bytes:
    own: dict[str, object] = {**metadata["sparkhvd"], "format": FORMAT}
    if content is not None:
        own |= {"format": _FORMAT_WITH_FOLDER, "content": content}
    return json.dumps({**metadata, "sparkhvd": own}).encode() + b"\n"


def _replace_metadata(store: Store, folder: str, metadata: bytes) -> None:
    with store.open(f"{folder}/{METADATA}", "wb") as file:
        file.write(metadata)


def _remove_unless_committed(store: Store, folder: str, name: str) -> None:
    """Remove the files of an object unless its metadata was written; a write may succeed and still raise an error."""
    try:
        if not _is_committed(store, folder, name):
            store.delete(f"{folder}/{name}")
    except (SparkHvdError, ValueError) as error:  # the failure that led here is the one to report
        logger.warning("Could not remove %s/%s/%s: %s", store.url, folder, name, str(error))


def _is_committed(store: Store, folder: str, name: str) -> bool:
    """Return whether the metadata names ``name`` as the folder of the object's files."""
    metadata = _metadata(store, folder)
    return metadata is not None and metadata.get("sparkhvd", {}).get("content") == name


def files(store: Store, folder: str) -> list[str]:
    """Return all files in a folder except those of its writers."""
    return [path for path in store.list(folder) if not is_lease(path)]


def _copy_to_final_paths(store: Store, folder: str, name: str, written: list[str]) -> None:
    """Remove all other files from a folder, and copy the object's files to their final paths."""
    content = f"{folder}/{name}"
    for path in files(store, folder):
        if path != f"{folder}/{METADATA}" and path not in written:
            store.delete(path)
    for path in written:
        target = f"{folder}/{path.removeprefix(content).lstrip('/')}"
        with store.open(path, "rb") as source, store.open(target, "wb") as copied:
            shutil.copyfileobj(source, copied, PIECE_BYTES)
