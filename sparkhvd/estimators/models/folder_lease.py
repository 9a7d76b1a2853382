"""The lease of a saved object's folder: its writers take turns.

A writer announces itself with a new file, ``-writer-<name>``, and then looks for the files of others. If two writers
announce themselves at the same time, at least one of them sees the other. A writer holds the folder once it sees no
other writer; until then, only the one with the smallest name stays announced, and the others withdraw.

The holder rewrites its file regularly. A writer on the same machine is dead if its process has ended. Any writer is
presumed dead if its file does not change for ``SILENT_SECONDS``, which is longer than any operation on a Store may
take. A holder that could not rewrite its file for that long ends.
"""

from __future__ import annotations

import json
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from sparkhvd._util.processes.process_identity import ProcessOnMachine
from sparkhvd.data.reuse.leases import holding, release_and_log
from sparkhvd.deadline import Deadline
from sparkhvd.errors import StoreError
from sparkhvd.store import Store
from sparkhvd.store.optional_files import read_if_exists

SILENT_SECONDS = 300.0
_RENEW_SECONDS = 10.0
_WAIT_SECONDS = 900.0  # for other writers, which may write large models
_POLL_SECONDS = 0.5
_WRITER = "-writer-"
_active_writers: set[str] = set()  # the files of the writers of this process


class FolderLease:
    """A writer's lease of a folder.

    Args:
        store: the Store of the folder.
        folder: the folder's path in it.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self.store = store
        self._folder = folder
        self._began = f"{time.time_ns():020d}"  # writers that begin earlier have smaller names
        self._path = ""  # the file of this writer; empty unless it is announced
        self._renewed = 0.0
        self._seen: dict[str, tuple[bytes, float]] = {}  # the files of other writers, and since when they are unchanged

    def check(self) -> None:
        """Raise ``StoreError`` if another writer may have taken the folder over."""
        if time.monotonic() - self._renewed >= SILENT_SECONDS or not self.store.exists(self._path):
            raise StoreError(
                f"{self.store.url}/{self._folder} was taken over by another writer, because this one appeared dead. "
                "Save the object again after the other writer has ended."
            )

    def renew(self) -> None:
        """Show other machines that this writer is alive."""
        self.check()
        self._write()

    def release(self) -> None:
        """Let the next writer begin."""
        if self._path:
            _active_writers.discard(self._path)  # first, because the Store may fail
            self.store.delete(self._path)
            self._path = ""

    def acquire(self, *, waits: bool) -> None:
        """Acquire the lease; see ``hold_folder``."""
        deadline = Deadline.after(_WAIT_SECONDS)
        while True:
            others = self._live_writers()
            if not others:
                if self._path:
                    return
                self._announce()
                continue
            # An announced writer only waits for others to withdraw. It does not rewrite its file.
            if self._path and (min(others) < self._path or time.monotonic() - self._renewed > _RENEW_SECONDS):
                self.release()
            if deadline.expired() or not (waits or self._path):
                raise occupied_error(self.store, self._folder)
            time.sleep(_POLL_SECONDS)

    def _announce(self) -> None:
        # With a new name: another writer may still be removing the file with which this one has withdrawn.
        self._path = f"{self._folder}/{_WRITER}{self._began}-{uuid.uuid4().hex}"
        _active_writers.add(self._path)
        self._write()

    def _write(self) -> None:
        began = time.monotonic()
        content = {
            **asdict(ProcessOnMachine.own()),
            "host": platform.node(),
            "beat": uuid.uuid4().hex,
        }
        with self.store.open(self._path, "wb") as file:
            file.write(json.dumps(content).encode())
        self._renewed = began

    def _live_writers(self) -> list[str]:
        """Return the files of all other writers that are alive, and remove those of dead writers."""
        live = []
        for path in self.store.list(self._folder):
            if not is_lease(path) or path == self._path:
                continue
            content = read_if_exists(self.store, path)
            if content is None:  # the writer has withdrawn
                continue
            if self._is_alive(path, content):
                live.append(path)
            else:
                self.store.delete(path)
        return live

    def _is_alive(self, path: str, content: bytes) -> bool:
        try:
            record = json.loads(content)
            writer = ProcessOnMachine(record["machine"], record["pid"], record["started"])
        except (ValueError, TypeError, KeyError):
            writer = ProcessOnMachine("", 0, "")
        if writer == ProcessOnMachine.own():
            return path in _active_writers
        if writer.has_ended():
            return False
        now = time.monotonic()
        last, since = self._seen.get(path, (content, now))
        self._seen[path] = (content, since if content == last else now)
        return now - self._seen[path][1] < SILENT_SECONDS


@contextmanager
def hold_folder(store: Store, folder: str, *, waits: bool) -> Iterator[FolderLease]:
    """Hold the lease of a folder within the context.

    Args:
        store: the Store of the folder.
        folder: the folder's path in it.
        waits: whether to wait until an earlier writer has ended.

    Raises:
        StoreError: an earlier writer has not ended, or the Store cannot be read or written.
    """
    lease = FolderLease(store, folder)
    try:
        lease.acquire(waits=waits)
    except BaseException:
        release_and_log(lease)
        raise
    with holding(lease, _RENEW_SECONDS):
        yield lease


def is_lease(path: str) -> bool:
    """Return whether a file in the folder of an object is that of a writer, and not part of the object."""
    return path.rpartition("/")[2].startswith(_WRITER)


def occupied_error(store: Store, folder: str) -> StoreError:
    """Return the error of a writer whose folder another writer holds."""
    return StoreError(
        f"Another writer saves an object to {store.url}/{folder}. Choose another path, or wait until it has ended and "
        "use write().overwrite().save(path)."
    )
