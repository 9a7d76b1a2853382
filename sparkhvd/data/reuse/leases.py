"""Leases on prepared datasets, and the removal of unused datasets.

A lease is a small file in the Store, ``leases/<dataset id>/<owner>``, that a driver holds while it prepares or uses a
dataset. Drivers that share a Store may be killed at any time. Leases guarantee three things:

- A dataset is not removed while a lease on it is held.
- Unless ``clean`` removes it, a dataset stays until its retention time since the last use is over, or one of the caches
  that it was read from is dropped.
- The files of a killed preparation are found by the lease that it leaves behind.

A lease of a process on this machine ends with the process. A lease of another machine is valid for
``BELIEVED_SECONDS``, and its owner renews it long before they are over (``Hold``).

A driver may take a lease while another one removes the dataset. The remover deletes the manifest first and then looks
for leases again; the taker looks for the manifest after it has taken the lease. So at least one of them sees the other:
the remover restores the manifest, or the taker prepares the data again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, Self

from sparkhvd._util.background import in_threads
from sparkhvd._util.closable import Closable
from sparkhvd._util.processes.process_identity import ProcessOnMachine
from sparkhvd.errors import SparkHvdError, StoreError
from sparkhvd.store import layout
from sparkhvd.store.optional_files import read_if_exists
from sparkhvd.store.protocol import Store

logger = logging.getLogger(__name__)

BELIEVED_SECONDS = 7 * 24 * 3600.0
RENEW_SECONDS = 24 * 3600.0
# How often the wall clock is checked, since a machine may sleep; a failed renewal is retried as often.
_CHECK_SECONDS = 3600.0
_RELEASE_SECONDS = 300.0  # a release may remove the dataset
_FAILED_SECONDS = 20.0  # after an error, or Ctrl-C: a Store that does not respond may be the reason
_THREADS = 16  # a remote Store takes a while for each request, and may have leases on a thousand datasets
_RELEASED = "released"
# The suffix of a lease for one use, which any rank may take; it has the retention time of the other leases.
_USE = "-use"


@dataclass(frozen=True)
class Record:
    """The content of a lease's file.

    Attributes:
        machine: identifies the machine, and the container on it.
        pid: the process.
        started: the start time of the process, in clock ticks since boot. Unlike the pid alone, the pair of pid and
            start time is never reused.
        taken: when the lease was taken or renewed, in seconds since 1970.
        keep_seconds: how long to keep the dataset after its last use.
    """

    machine: str
    pid: int
    started: str
    taken: float
    keep_seconds: float

    def holds(self, now: float) -> bool:
        """Return whether the owner may still be using the dataset."""
        if self.process.is_on_this_machine():
            return not self.process.has_ended()
        return now - self.taken < BELIEVED_SECONDS

    @property
    def process(self) -> ProcessOnMachine:
        """Return the owner."""
        return ProcessOnMachine(self.machine, self.pid, self.started)


@dataclass(frozen=True)
class Lease:
    """A lease of this process on a dataset; ``release`` ends it.

    Attributes:
        store: the Store of the dataset.
        dataset_id: the dataset.
        owner: the name of the lease.
        keep_seconds: see ``Record``.
        caches: Spark's caches that the rows were read from; once one of them is dropped, the dataset cannot be reused.
    """

    store: Store
    dataset_id: str
    owner: str
    keep_seconds: float
    caches: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Return the path of the lease's file."""
        return layout.lease_path(self.dataset_id, self.owner)

    def renew(self) -> None:
        """Extend the lease by ``BELIEVED_SECONDS`` from now.

        Raises:
            StoreError: the Store cannot be written, or the lease was removed because its renewal was overdue.
        """
        if not self.store.exists(self.path):
            raise StoreError(
                f"The lease {self.store.url}/{self.path} was removed because it had not been renewed for too long. The "
                "prepared rows may be removed while they are in use. If that happens, prepare them again."
            )
        with self.store.open(self.path, "wb") as file:
            file.write(_record(self.keep_seconds))

    def withdraw(self) -> None:
        """End the lease without recording its use."""
        self.store.delete(self.path)

    def release(self) -> None:
        """End the lease, and remove the dataset if no other lease is held and ``keep_seconds`` is 0."""
        if math.isinf(self.keep_seconds):
            self.withdraw()  # a record of its use would allow `clean` to remove the dataset
            return
        now = time.time()
        path = layout.lease_path(self.dataset_id, _RELEASED)
        caches = self.caches or _json(self.store, path).get("caches", ())  # a lease for one use does not know them
        note = {"time": now, "keep_seconds": self.keep_seconds, "caches": caches}
        try:
            with self.store.open(path, "wb") as file:
                file.write(json.dumps(note).encode())
        except StoreError:
            if self.keep_seconds > 0:
                raise
            # On a full disk, the note cannot be written, and the removal of the dataset makes room.
        self.store.delete(self.path)
        if self.keep_seconds <= 0:
            remove_unused(self.store, self.dataset_id, now)


class Renewable(Protocol):
    """A lease that is renewed until it is released."""

    @property
    def store(self) -> Store: ...
    def renew(self) -> None: ...
    def release(self) -> None: ...


class Held(Closable):
    """Files that ``close`` or the end of ``with`` releases.

    Attributes:
        hold: protects prepared rows from removal; None for files that no driver removes.
    """

    hold: Hold | None

    def close(self) -> None:
        """Release the files; a second call does nothing."""
        if self.hold is not None:
            self.hold.close()

    def __exit__(self, *error: Any) -> None:
        """Release the files; after an error, which the Store may have caused, wait for it only briefly."""
        if self.hold is not None:
            self.hold.__exit__(*error)


class Hold:
    """Renews a lease every ``RENEW_SECONDS`` in a thread until ``close``; a failed renewal is logged and retried.

    Args:
        lease: a lease that was taken just now.
        check_seconds: how often its age is checked.
        renew_seconds: the age at which it is renewed.
    """

    def __init__(
        self, lease: Renewable, *, check_seconds: float = _CHECK_SECONDS, renew_seconds: float = RENEW_SECONDS
    ) -> None:
        self._lease = lease
        self._check_seconds, self._renew_seconds = check_seconds, renew_seconds
        self._pid = os.getpid()
        # A finalizer may run in any thread at any point: it can put into a SimpleQueue, but not set an event.
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()
        # A daemon, because rows that are never closed must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._work, name="sparkhvd-lease", daemon=True)
        self._thread.start()

    def close(self, seconds: float = _RELEASE_SECONDS) -> None:
        """Release the lease; a second call does nothing, and neither does a call in a forked process.

        Args:
            seconds: how long to wait for the release.
        """
        if os.getpid() != self._pid:
            return
        self._closed.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Release the lease; after an error, wait for the release only briefly."""
        self.close(_RELEASE_SECONDS if error is None else _FAILED_SECONDS)

    def _work(self) -> None:
        renewed = time.time()
        while not self._is_closed():
            now = time.time()
            if 0 <= now - renewed < self._renew_seconds:  # negative if the clock was set back
                continue
            try:
                self._lease.renew()
            except (SparkHvdError, OSError) as error:  # the training may end before the lease expires
                logger.warning("Could not renew a lease in %s: %s", self._lease.store.url, error)
            else:
                renewed = now
        release_and_log(self._lease)

    def _is_closed(self) -> bool:
        """Wait for ``close`` at most ``check_seconds``, and return whether it was called."""
        try:
            self._closed.get(timeout=self._check_seconds)
        except queue.Empty:
            return False
        return True


@contextmanager
def holding(lease: Renewable, renew_seconds: float) -> Iterator[None]:
    """Renew a lease within the context, then release it."""
    with Hold(lease, check_seconds=renew_seconds, renew_seconds=renew_seconds):
        yield


def release_and_log(lease: Renewable) -> None:
    """Release a lease and log a failure, which must neither hide another error nor fail a success."""
    try:
        lease.release()
    except SparkHvdError as error:
        logger.warning("Could not release a lease in %s: %s", lease.store.url, error)


def take(store: Store, dataset_id: str, keep_seconds: float, caches: tuple[str, ...] = ()) -> Lease:
    """Take a lease on a dataset. The caller must look for the manifest afterwards, not before."""
    return _publish(Lease(store, dataset_id, _owner(), keep_seconds, caches=caches))


def borrow(store: Store, dataset_id: str) -> Lease:
    """Take a lease for one use, with the longest retention time of the earlier leases."""
    paths = [path for path in store.list(layout.lease_folder(dataset_id)) if not path.endswith(_USE)]
    periods = (_json(store, path).get("keep_seconds") for path in paths)
    keeps = [float(keep) for keep in periods if isinstance(keep, int | float)]
    # A dataset without an earlier lease must not be removed because of this one.
    return _publish(Lease(store, dataset_id, f"{_owner()}{_USE}", max(keeps, default=math.inf)))


def held_here(store: Store) -> list[str]:
    """Return the datasets that this process holds, the latest first, without those held for one use only."""
    leases = []
    own = ProcessOnMachine.own()
    for path in store.list(layout.LEASES):
        record = None if path.endswith(_USE) else _read(store, path)
        if record is not None and record.process == own:
            leases.append((path.rpartition("/")[2], layout.leased_dataset(path)))
    return list(dict.fromkeys(dataset for _, dataset in sorted(leases, reverse=True)))


def remove_expired(store: Store, may_live: Callable[[str], bool] = lambda _cache: True) -> list[str]:
    """Remove the datasets without a held lease whose retention time is over, and return their ids.

    Args:
        store: the Store of the datasets.
        may_live: returns whether a cache (see ``Lease``) may still exist.
    """
    now = time.time()

    def remove_if_expired(dataset: str) -> bool:
        return _expired(store, dataset, now, may_live) and remove_unused(store, dataset, now)

    return _removed(remove_if_expired, _leased(store))


def remove_all_unused(store: Store) -> list[str]:
    """Remove every dataset without a held lease, of any age, and leftover files of others; return the ids.

    Leftovers are files of rows without a manifest and a lease: a write that was in progress when its dataset was
    removed may end after the removal.
    """
    now = time.time()
    # Listed before the leases: a dataset gets a lease before its first file, and then always has a manifest or a lease.
    with_files = dict.fromkeys(map(layout.dataset_of_rows, store.list(layout.DATASETS)))
    leased = _leased(store)
    removed = _removed(lambda dataset: remove_unused(store, dataset, now), leased)
    for dataset in with_files:
        if dataset is None or dataset in leased or store.exists(layout.manifest_path(dataset)):
            continue
        store.delete(layout.dataset_folder(dataset))
        removed.append(dataset)
    return removed


def remove_unused(store: Store, dataset_id: str, now: float) -> bool:
    """Remove a dataset unless a lease on it is held; the module's docstring explains the order."""
    if _held(store, dataset_id, now):
        return False
    path = layout.manifest_path(dataset_id)
    content = read_if_exists(store, path)
    if content is not None:
        store.delete(path)
        if _held(store, dataset_id, time.time()):
            store.publish(path, content)
            return False
        _forget(store, dataset_id, content)
    store.delete(layout.dataset_folder(dataset_id))
    store.delete(layout.lease_folder(dataset_id))
    return True


def _removed(remove: Callable[[str], bool], datasets: list[str]) -> list[str]:
    """Call ``remove`` for all datasets, and return those for which it returns true."""
    outcomes = in_threads(remove, datasets, _THREADS, "sparkhvd-unused")
    return [dataset for dataset, is_removed in zip(datasets, outcomes, strict=True) if is_removed]


def _publish(lease: Lease) -> Lease:
    lease.store.publish(lease.path, _record(lease.keep_seconds))
    return lease


def _owner() -> str:
    """Return a unique name for a lease; the names of a process sort by time, even if the clock is set back."""
    return f"{time.monotonic():017.6f}-{uuid.uuid4().hex[:16]}"


def _record(keep_seconds: float) -> bytes:
    """Return the content of a lease of this process as of now."""
    record = Record(**asdict(ProcessOnMachine.own()), taken=time.time(), keep_seconds=keep_seconds)
    return json.dumps(asdict(record)).encode()


def _forget(store: Store, dataset_id: str, manifest: bytes) -> None:
    """Remove the notes that lead from a fingerprint and a name to the dataset."""
    try:
        content = json.loads(manifest)
    except ValueError:
        return
    if fingerprint := content.get("fingerprint"):
        store.delete(layout.fingerprint_path(str(fingerprint), dataset_id))
    if name := content.get("name"):
        store.delete(layout.name_path(str(name), dataset_id))


def _leased(store: Store) -> list[str]:
    return list(dict.fromkeys(layout.leased_dataset(path) for path in store.list(layout.LEASES)))


def _held(store: Store, dataset_id: str, now: float) -> bool:
    records = (_read(store, path) for path in store.list(layout.lease_folder(dataset_id)))
    return any(record is not None and record.holds(now) for record in records)


def _expired(store: Store, dataset_id: str, now: float, may_live: Callable[[str], bool]) -> bool:
    """Return whether the dataset's retention time since its last use is over, or it was never finished."""
    if not store.exists(layout.manifest_path(dataset_id)):
        return True
    ends = []
    for path in store.list(layout.lease_folder(dataset_id)):
        content = _json(store, path)
        if not all(may_live(str(cache)) for cache in content.get("caches", ())):
            return True
        used = content.get("time", content.get("taken"))
        if isinstance(used, int | float):
            ends.append(float(used) + float(content.get("keep_seconds", 0)))
    return now >= max(ends, default=0.0)


def _read(store: Store, path: str) -> Record | None:
    content = _json(store, path)
    known = {field.name for field in fields(Record)}
    try:
        return Record(
            **{name: value for name, value in content.items() if name in known}
        )  # later versions may add fields
    except TypeError:  # the note of a release, or a file that was removed meanwhile
        return None


def _json(store: Store, path: str) -> dict:  # type: ignore[type-arg]  # JSON is untyped until it has been looked at
    content = read_if_exists(store, path)
    try:
        record = json.loads(content or b"{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
