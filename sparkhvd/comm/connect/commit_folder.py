"""The commits of an elastic job in a Store, from which it resumes if all ranks with its state are lost."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Literal, Protocol

from sparkhvd._util.background import in_background
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
    """The folder of a Store in which a job keeps its commits.

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
            known: the newest commit that the driver knows; the driver may have missed a later one.

        Raises:
            StoreError: the Store lacks that commit.
        """
        end = self._path(generation, 0)
        newest = max((path for path in self.store.list(self.folder) if path < end), default="")
        if newest < known:
            raise StoreError(
                f"{self._url(known)}, the last commit of this job, is missing, so the training cannot continue. All "
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
        """Delete the commits older than this one and its predecessor; newer ones belong to later generations."""
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


@dataclass(frozen=True)
class _Write:
    """A commit that is being published; ``done`` gets its path."""

    generation: int
    number: int
    done: Future[str]


class CommitPublisher:
    """Publishes commits of this rank at intervals; used by one thread.

    The training continues while a commit is written. If the interval is 0, every commit is published, so the training
    waits.

    Args:
        folder: where the commits go, and the interval.
    """

    def __init__(self, folder: CommitFolder) -> None:
        self.folder = folder
        self._next = time.monotonic()
        self._write: _Write | None = None

    def publish_if_due(
        self, generation: int, number: int, dump: Callable[[], bytes], report: Callable[[str], None]
    ) -> None:
        """Begin to publish a commit, unless the last one is too recent or still being written.

        A failure is logged, and a later commit tries again.

        Args:
            generation: the current generation.
            number: the number of the commit.
            dump: returns the state.
            report: called with the path of each commit that is published while its generation lasts, by this call or
                by a later one.
        """
        if self._write is not None and not self._write.done.done():
            return
        self._conclude(generation, report)
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.folder.interval
        publish = partial(self._publish, generation, number, dump())
        self._write = _Write(generation, number, in_background(publish, "sparkhvd-commit"))
        if self.folder.interval == 0:
            self._conclude(generation, report)

    def finish(self) -> None:
        """Wait until no commit is being written."""
        if self._write is not None:
            wait([self._write.done])

    def _publish(self, generation: int, number: int, state: bytes) -> str:
        path = self.folder.publish(generation, number, state)
        self.folder.delete_before(path)
        return path

    def _conclude(self, generation: int, report: Callable[[str], None]) -> None:
        """Wait for the commit that is being written, then report it, or log why it could not be written."""
        write, self._write = self._write, None
        if write is None:
            return
        try:
            path = write.done.result()
        except StoreError as error:
            logger.warning(
                "Commit %d could not be published, so a loss of all ranks would cost the steps since the last "
                "published commit: %s",
                write.number,
                error,
            )
        else:
            if write.generation == generation:
                report(path)
