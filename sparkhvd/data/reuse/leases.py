"""Who uses which prepared dataset, and when one may be removed.

A lease is a small file in the Store, ``leases/<dataset id>/<owner>``, that a driver holds while it prepares or uses a
dataset. It makes these things safe among drivers that share a Store and may be killed at any time:

- a dataset is removed only when nobody holds it and it has not been used for as long as it is to be kept;
- the remains of a preparation that was killed are found by the lease that it leaves.

A lease of a process on this machine ends with the process; one of another machine is believed for ``BELIEVED_SECONDS``,
so whoever holds one renews it (``Hold``) long before.

Taking a lease and removing a dataset can happen at the same time. Whoever removes takes the manifest away first and
then looks for leases once more; whoever takes a lease looks for the manifest afterwards. So at least one of them sees
the other: the remover puts the manifest back, or the taker prepares the data anew.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from sparkhvd._util.process_identity import machine_id, process_start
from sparkhvd.errors import SparkHvdError, StoreError
from sparkhvd.store import layout
from sparkhvd.store.protocol import Store

logger = logging.getLogger(__name__)

BELIEVED_SECONDS = 7 * 24 * 3600.0
RENEW_SECONDS = 24 * 3600.0
# By the clock on the wall, since a machine may sleep meanwhile; so this is also how soon a failure is tried again.
_LOOK_SECONDS = 3600.0
_RELEASE_SECONDS = 300.0  # it may mean to remove the dataset
_RELEASED = "released"
# Ends the name of a lease for one use, of which there may be one per rank; it repeats what the others say.
_USE = "-use"


@dataclass(frozen=True)
class Record:
    """What a lease says.

    Attributes:
        machine: identifies the machine, and the container on it.
        pid: the process.
        started: when the process started, in the kernel's own count: a pid is used again, the pair is not.
        taken: when the lease was taken or renewed, in seconds since 1970.
        keep_seconds: how long the dataset is to be kept after its last use.
    """

    machine: str
    pid: int
    started: str
    taken: float
    keep_seconds: float

    def holds(self, now: float) -> bool:
        """Whether the owner may still use the dataset."""
        if self.machine == machine_id():
            return process_start(self.pid) == self.started
        return now - self.taken < BELIEVED_SECONDS


@dataclass(frozen=True)
class Lease:
    """This process's hold on a dataset; ``release`` ends it.

    Attributes:
        store: where the dataset is.
        dataset_id: names it.
        owner: names the hold.
        keep_seconds: see ``Record``.
        caches: Spark's caches that the rows are of; when one of them is gone, nobody can want the dataset again.
    """

    store: Store
    dataset_id: str
    owner: str
    keep_seconds: float
    caches: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The file that says so."""
        return layout.lease_path(self.dataset_id, self.owner)

    def renew(self) -> None:
        """Have other machines believe in it for as long again.

        Raises:
            StoreError: the Store cannot be written, or the lease was removed: it had not been renewed for too long.
        """
        if not self.store.exists(self.path):
            raise StoreError(
                f"The lease {self.store.url}/{self.path} was removed because it had not been renewed for too long. The "
                "prepared rows may be removed while they are in use."
            )
        with self.store.open(self.path, "wb") as file:
            file.write(_record(self.keep_seconds))

    def withdraw(self) -> None:
        """End the hold as if it had never been."""
        self.store.delete(self.path)

    def release(self) -> None:
        """End the hold; the dataset is removed if nobody else holds it and it is not to be kept."""
        if math.isinf(self.keep_seconds):
            self.withdraw()  # a note of its use would make the dataset one that `clean` may remove
            return
        now = time.time()
        path = layout.lease_path(self.dataset_id, _RELEASED)
        caches = self.caches or _json(self.store, path).get("caches", ())  # one use does not know them
        note = {"time": now, "keep_seconds": self.keep_seconds, "caches": caches}
        with self.store.open(path, "wb") as file:
            file.write(json.dumps(note).encode())
        self.store.delete(self.path)
        if self.keep_seconds <= 0:
            remove_unused(self.store, self.dataset_id, now)


class Renewable(Protocol):
    """Something that is held until it is released, and renewed meanwhile."""

    @property
    def store(self) -> Store: ...
    def renew(self) -> None: ...
    def release(self) -> None: ...


class Hold:
    """A lease that a thread renews every ``RENEW_SECONDS`` (a failure is logged and tried again), until ``close``.

    Args:
        lease: taken just now.
        look_seconds: how often its age is looked at.
        renew_seconds: the age at which it is renewed.
    """

    def __init__(
        self, lease: Renewable, *, look_seconds: float = _LOOK_SECONDS, renew_seconds: float = RENEW_SECONDS
    ) -> None:
        self._lease = lease
        self._look_seconds, self._renew_seconds = look_seconds, renew_seconds
        self._pid = os.getpid()
        # A finalizer may put into it wherever it interrupts whichever thread; it could not set an event.
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Rows may be prepared without ever being closed; that must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._work, name="sparkhvd-lease", daemon=True)
        self._thread.start()

    def close(self, seconds: float = _RELEASE_SECONDS) -> None:
        """Release the lease; a second call does nothing, nor does one in a process that was forked from the owner.

        Args:
            seconds: how long to wait until it is released.
        """
        if os.getpid() != self._pid:
            return
        self._closed.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _work(self) -> None:
        renewed = time.time()
        while not self._is_closed():
            now = time.time()
            if 0 <= now - renewed < self._renew_seconds:  # a clock may be set back
                continue
            try:
                self._lease.renew()
            except (SparkHvdError, OSError) as error:  # the training may well end before anybody minds
                logger.warning("Could not renew a lease in %s: %s", self._lease.store.url, error)
            else:
                renewed = now
        let_go(self._lease)

    def _is_closed(self) -> bool:
        """Whether it is closed within ``look_seconds``."""
        try:
            self._closed.get(timeout=self._look_seconds)
        except queue.Empty:
            return False
        return True


def let_go(lease: Renewable) -> None:
    """Release a lease, and log it where that fails: it may neither hide an error nor make one of a success."""
    try:
        lease.release()
    except SparkHvdError as error:
        logger.warning("Could not release a lease in %s: %s", lease.store.url, error)


def take(store: Store, dataset_id: str, keep_seconds: float, caches: tuple[str, ...] = ()) -> Lease:
    """Hold a dataset. Look for its manifest after this, not before."""
    return _publish(Lease(store, dataset_id, _owner(), keep_seconds, caches=caches))


def borrow(store: Store, dataset_id: str) -> Lease:
    """Hold a dataset for one use, and have it kept afterwards for as long as those said who held it before."""
    paths = [path for path in store.list(layout.lease_folder(dataset_id)) if not path.endswith(_USE)]
    found = (_json(store, path).get("keep_seconds") for path in paths)
    keeps = [float(keep) for keep in found if isinstance(keep, int | float)]
    # What nobody ever held is not to be removed because of this.
    return _publish(Lease(store, dataset_id, f"{_owner()}{_USE}", max(keeps, default=math.inf)))


def held_here(store: Store) -> list[str]:
    """The datasets that this process holds (not only for one use), the one taken last first."""
    found = []
    now = time.time()
    for path in store.list(layout.LEASES):
        record = None if path.endswith(_USE) else _read(store, path)
        if record is None or record.pid != os.getpid():
            continue
        if record.machine == machine_id() and record.holds(now):
            found.append((path.rpartition("/")[2], layout.leased_dataset(path)))
    return list(dict.fromkeys(dataset for _, dataset in sorted(found, reverse=True)))


def remove_expired(store: Store, may_live: Callable[[str], bool] = lambda _cache: True) -> list[str]:
    """Remove what nobody holds and nobody used for as long as it was to be kept; returns the ids.

    Args:
        store: where.
        may_live: tells of a cache (see ``Lease``) whether it may still be there.
    """
    now = time.time()
    return [
        dataset
        for dataset in _leased(store)
        if _expired(store, dataset, now, may_live) and remove_unused(store, dataset, now)
    ]


def remove_all_unused(store: Store) -> list[str]:
    """Remove every dataset that nobody holds, however new; returns the ids."""
    now = time.time()
    return [dataset for dataset in _leased(store) if remove_unused(store, dataset, now)]


def remove_unused(store: Store, dataset_id: str, now: float) -> bool:
    """Remove a dataset unless somebody holds it; the module's text says why in this order."""
    if _held(store, dataset_id, now):
        return False
    path = layout.manifest_path(dataset_id)
    content = _content(store, path)
    if content is not None:
        store.delete(path)
        if _held(store, dataset_id, time.time()):
            store.publish(path, content)
            return False
        _forget(store, dataset_id, content)
    store.delete(layout.dataset_folder(dataset_id))
    store.delete(layout.lease_folder(dataset_id))
    return True


def _publish(lease: Lease) -> Lease:
    lease.store.publish(lease.path, _record(lease.keep_seconds))
    return lease


def _owner() -> str:
    """A name of its own for a lease; names sort by the time."""
    return f"{time.time():017.6f}-{uuid.uuid4().hex[:16]}"


def _record(keep_seconds: float) -> bytes:
    """What a lease of this process says now."""
    record = Record(machine_id(), os.getpid(), process_start(os.getpid()), time.time(), keep_seconds)
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
    """Whether the dataset has been kept for long enough after its last use, or was never finished."""
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
        )  # a later version may say more
    except TypeError:  # the note of a release, or a file that is gone meanwhile
        return None


def _json(store: Store, path: str) -> dict:  # type: ignore[type-arg]  # JSON is untyped until it has been looked at
    content = _content(store, path)
    try:
        found = json.loads(content or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _content(store: Store, path: str) -> bytes | None:
    try:
        with store.open(path, "rb") as file:
            return bytes(file.read())
    except StoreError:
        if store.exists(path):
            raise
        return None  # another driver removed it between the listing and now
