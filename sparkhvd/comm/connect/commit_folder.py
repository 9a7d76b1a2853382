"""The commits of an elastic job in a Store, from which it resumes if all ranks with its state are lost."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

from sparkhvd.errors import StoreError

logger = logging.getLogger(__name__)

_HEAD = b"sparkhvd commit 1 "
_KEPT = 2  # the newest commit, and the one before, which the driver may still name


class CommitStore(Protocol):
    """The part of a ``sparkhvd.store.Store`` that commits need."""

    @property
    def url(self) -> str: ...

    def open(self, path: str, mode: Literal["rb", "wb"]) -> BinaryIO: ...

    def list(self, path: str) -> list[str]: ...

    def publish(self, path: str, content: bytes) -> None: ...

    def delete(self, path: str) -> None: ...


@dataclass(frozen=True)
class CommitFolder:
    """Where a job keeps commits.

    Attributes:
        store: the Store, which all hosts must reach.
        folder: the job's folder in it.
        interval: seconds from one published commit to the next.
    """

    store: CommitStore
    folder: str
    interval: float

    def publish(self, generation: int, number: int, state: bytes) -> str:
        """Write a commit atomically and return its path.

        Raises:
            StoreError: the Store does not accept it.
        """
        path = self._path(generation, number)
        self.store.publish(path, _HEAD + hashlib.sha256(state).hexdigest().encode() + b"\n" + state)
        return path

    def newest(self, generation: int, known: str) -> str:
        """Return the path of the newest commit from before a generation; empty if there is none.

        Args:
            generation: the generation that resumes.
            known: the newest commit that the driver knows; it may have missed a later one.

        Raises:
            StoreError: the Store lacks that commit.
        """
        end = self._path(generation, 0)
        newest = max((path for path in self.store.list(self.folder) if path < end), default="")
        if newest < known:
            raise StoreError(
                f"{self._url(known)}, the last commit of this job, is not there, so the training cannot continue. All "
                "hosts must reach the same files under the URL of the Store."
            )
        return newest

    def read(self, path: str) -> bytes:
        """Return the state of a commit.

        Raises:
            StoreError: the commit cannot be read, or is damaged.
        """
        with self.store.open(path, "rb") as file:
            head, _, state = file.read().partition(b"\n")
        if head != _HEAD + hashlib.sha256(state).hexdigest().encode():
            raise StoreError(f"{self._url(path)} is damaged: its content does not match its digest.")
        return state

    def delete_before(self, path: str) -> None:
        """Delete the commits that are older than this one and its predecessor; newer ones belong to other ranks."""
        with suppress(StoreError):  # the next commit tries again
            older = sorted(other for other in self.store.list(self.folder) if other <= path)
            for other in older[:-_KEPT]:
                self.store.delete(other)

    def _path(self, generation: int, number: int) -> str:
        return f"{self.folder}/commit-{generation:08}-{number:010}"

    def _url(self, path: str) -> str:
        return f"{self.store.url.rstrip('/')}/{path}"


def number_of(path: str) -> int:
    """Return the number of the commit at a path."""
    return int(path.rpartition("-")[2])


class CommitPublisher:
    """Publishes commits of this rank at intervals; used by one thread.

    Args:
        folder: where the commits go, and the interval.
    """

    def __init__(self, folder: CommitFolder) -> None:
        self.folder = folder
        self._next = time.monotonic()

    def publish_if_due(
        self, generation: int, number: int, dump: Callable[[], bytes], report: Callable[[str], None]
    ) -> None:
        """Publish a commit unless the last one is too recent; a failure is logged, and the next commit tries again.

        Args:
            generation: the current generation.
            number: the number of the commit.
            dump: returns the state.
            report: called with the path once the commit is published, before older commits are deleted.
        """
        if time.monotonic() < self._next:
            return
        try:
            path = self.folder.publish(generation, number, dump())
        except StoreError as error:
            logger.warning(
                "Commit %d could not be published, so a loss of all ranks would cost the steps since the last "
                "published commit: %s",
                number,
                error,
            )
        else:
            report(path)
            self.folder.delete_before(path)
        self._next = time.monotonic() + self.folder.interval
