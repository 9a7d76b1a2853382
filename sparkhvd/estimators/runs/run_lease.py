"""The lease of a run: only one fit at a time trains the run, and only its latest writer owns it.

Every writer of a run claims the next number, its *token*, by publishing a file with that number. A Store lets exactly
one writer publish a file. The writer with the highest token owns the run. The driver claims a token when a fit begins,
and rank 0 claims another for the same fit whenever the ranks start. Checkpoints carry the token in their names. After a
claim, the owner records the checkpoints that it inherits; readers ignore all others except the owner's own. A writer
that was suspended in the middle of a write may therefore still add a file, but readers ignore it.

A writer looks for a higher token before it publishes, and again before it deletes. The owner lists the inherited
checkpoints after its claim. If a writer deletes a checkpoint, it has therefore published the next checkpoint before
the claim, and the owner inherits that one.

A fit is refused while another fit of the same run is alive. The driver of every fit renews a file, the *beat*. A fit
on another machine is presumed dead if its beat does not change for ``SILENT_SECONDS`` by the waiting driver's clock.
A beat also has the time of its machine's clock since boot. A fit on the same machine is dead if its process has ended,
or if its beat is older than ``SILENT_SECONDS``: a process whose Store failed could not release the run. Clocks of
different machines are never compared.
"""

from __future__ import annotations

import json
import logging
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

from sparkhvd._util.processes.process_identity import ProcessOnMachine
from sparkhvd.data.reuse.leases import holding, release_and_log
from sparkhvd.errors import ParamError, StoreError
from sparkhvd.store import layout
from sparkhvd.store.optional_files import read_if_exists
from sparkhvd.store.protocol import Store

T = TypeVar("T")

logger = logging.getLogger(__name__)

SILENT_SECONDS = 60.0
RENEW_SECONDS = 10.0
_POLL_SECONDS = 1.0
_CLAIM = "claim"  # the key of a unique text, beside the attributes of the holder
_active_fits: set[str] = set()  # the names of the fits that run in this process


@dataclass(frozen=True)
class Holder:
    """The fit that trains a run, as its claims record it.

    Attributes:
        name: unique name of the fit.
        machine: identifies the machine of its driver, and the container on it.
        pid: the driver's process.
        started: when that process started, in the kernel's clock ticks.
        host: name of the machine, for messages.
        since: when the fit began, for messages.
    """

    name: str
    machine: str
    pid: int
    started: str
    host: str
    since: str

    @property
    def process(self) -> ProcessOnMachine:
        """Return the driver's process."""
        return ProcessOnMachine(self.machine, self.pid, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


@dataclass(frozen=True)
class Fence:
    """The right to publish in a run until another writer claims a higher token.

    Attributes:
        store: where the run is kept.
        run_id: name of the run.
        token: number of this writer; 0 if nothing was claimed.
    """

    store: Store
    run_id: str
    token: int

    def check(self) -> None:
        """Raise ``StoreError`` if another fit has taken the run over."""
        if (last := _last_token(self.store, self.run_id)) > self.token:
            raise _takeover_error(self.store, self.run_id, last)


@dataclass(frozen=True)
class RunLease:
    """A driver's lease of a run.

    Attributes:
        store: where the run is kept.
        run_id: name of the run.
        holder: the fit that holds the lease.
        token: the token that the fit claimed when it began; 0 before that.
        is_fenced: whether ranks publish in the run, so that tokens must never be used again.
    """

    store: Store
    run_id: str
    holder: Holder
    token: int = 0
    is_fenced: bool = True

    def check(self) -> None:
        """Raise ``StoreError`` if another fit has taken the run over."""
        last = _last_token(self.store, self.run_id)
        if _holder(self.store, self.run_id, last) != self.holder:
            raise _takeover_error(self.store, self.run_id, last)

    def renew(self) -> None:
        """Write a new beat, which shows other machines that the fit is alive."""
        self.check()
        self.beat()

    def release(self) -> None:
        """End the lease, so that the next fit can begin immediately."""
        _active_fits.discard(self.holder.name)  # first, because the Store may fail
        last = _last_token(self.store, self.run_id)
        if _holder(self.store, self.run_id, last) != self.holder:
            self.store.delete(layout.beat_path(self.run_id, self.holder.name))
        elif last == self.token and (last == 1 or not self.is_fenced) and self._has_only_claims():
            self._delete_run()
        else:
            self._write_beat(_RELEASED)

    def _has_only_claims(self) -> bool:
        """Return whether the run has no files but claims, because the fit failed before its ranks started."""
        holders = f"{layout.holders_folder(self.run_id)}/"
        return all(path.startswith(holders) for path in self.store.list(layout.run_folder(self.run_id)))

    def _delete_run(self) -> None:
        """Delete the run; no writer has an earlier token of the run, so tokens may begin at 1 again.

        The beat is deleted last, because it keeps other fits from claiming the run. A fit that claims the run later
        finds none of these files.
        """
        self.store.delete(layout.inheritance_path(self.run_id, self.token))
        self.store.delete(layout.claim_path(self.run_id, self.token))
        self.store.delete(layout.beat_path(self.run_id, self.holder.name))

    def beat(self) -> None:
        """Write a new beat, without a look at the claims."""
        self._write_beat(f"{uuid.uuid4().hex} {time.monotonic()}".encode())

    def _write_beat(self, content: bytes) -> None:
        with self.store.open(layout.beat_path(self.run_id, self.holder.name), "wb") as file:
            file.write(content)


_RELEASED = b"released"


@contextmanager
def hold_run(store: Store, run_id: str, *, is_fenced: bool = True) -> Iterator[RunLease]:
    """Hold the lease of a run within the context.

    Args:
        store: where the run is kept.
        run_id: name of the run.
        is_fenced: see ``RunLease``.

    Raises:
        ParamError: another fit trains the run.
        StoreError: the Store cannot be read or written.
    """
    lease = acquire_lease(store, run_id, is_fenced=is_fenced)
    try:
        with holding(lease, RENEW_SECONDS):
            yield lease
    finally:
        _active_fits.discard(lease.holder.name)  # the release may still wait for the Store


def acquire_lease(
    store: Store, run_id: str, *, silent_seconds: float = SILENT_SECONDS, is_fenced: bool = True
) -> RunLease:
    """Acquire the lease of a run that is free or whose holder is dead; see ``hold_run``."""
    lease = RunLease(store, run_id, _this_process(), is_fenced=is_fenced)
    lease.beat()  # a claim without a beat would look dead
    _active_fits.add(lease.holder.name)
    try:
        while True:
            last = _last_token(store, run_id)
            before = _holder(store, run_id, last)
            if before is not None and before != lease.holder:  # its own, if the answer to its claim was lost
                _refuse_active(store, run_id, before, silent_seconds)
                lease.beat()  # a fit that held the run meanwhile may have removed it
            if _claim(store, run_id, last + 1, lease.holder):
                return replace(lease, token=last + 1)
    except BaseException:
        release_and_log(lease)  # the interruption may have come after the claim
        raise


def claim_fence(store: Store, run_id: str, holder: Holder) -> Fence:
    """Claim a token for ranks that have just started, so that earlier ranks of the same fit can no longer publish.

    Raises:
        StoreError: another fit has taken the run over.
    """
    while True:
        last = _last_token(store, run_id)
        if _holder(store, run_id, last) != holder:
            raise _takeover_error(store, run_id, last)
        if _claim(store, run_id, last + 1, holder):
            return Fence(store, run_id, last + 1)


def owned_checkpoints(store: Store, run_id: str, paths: list[str]) -> list[str]:
    """Return the checkpoints of a run that its current owner wrote or inherited."""
    inheritances = [path for path in store.list(layout.claims_folder(run_id)) if layout.is_inheritance(path)]
    if not inheritances:
        return paths
    with store.open(inheritances[-1], "rb") as file:
        inherited = set(_parsed(bytes(file.read()), inheritances[-1], list))
    token = layout.token_of(inheritances[-1])
    return [path for path in paths if path in inherited or layout.token_of(path) == token]


def _claim(store: Store, run_id: str, token: int, holder: Holder) -> bool:
    """Claim a token; return False if another writer claimed it first."""
    path = layout.claim_path(run_id, token)
    try:
        # Some Stores take a file with equal content for their own; ranks of the same fit may claim the same token.
        store.publish(path, json.dumps({**asdict(holder), _CLAIM: uuid.uuid4().hex}).encode())
    except StoreError:
        if store.exists(path):
            return False
        raise
    checkpoints = owned_checkpoints(store, run_id, store.list(layout.checkpoints_folder(run_id)))
    store.publish(layout.inheritance_path(run_id, token), json.dumps(checkpoints).encode())
    _delete_earlier_claims(store, run_id, token, holder)
    return True


def _delete_earlier_claims(store: Store, run_id: str, token: int, holder: Holder) -> None:
    """Remove the files of earlier claims; the highest token always stays."""
    beat = layout.beat_path(run_id, holder.name)
    for path in store.list(layout.holders_folder(run_id)):
        number = layout.token_of(path)
        if (number == 0 and path != beat) or 0 < number < token:
            store.delete(path)


def _is_alive(store: Store, run_id: str, holder: Holder, silent_seconds: float) -> bool:
    """Return whether the fit still runs and renews its beat in time."""
    first = read_if_exists(store, layout.beat_path(run_id, holder.name))
    if first in {None, _RELEASED}:
        return False
    if holder.process == ProcessOnMachine.own():
        return holder.name in _active_fits
    if holder.process.is_on_this_machine():
        return not holder.process.has_ended() and _age(first) <= silent_seconds
    logger.info(
        "Run %s was held by %s; waiting up to %g s for a sign that this fit is alive", run_id, holder, silent_seconds
    )
    end = time.monotonic() + silent_seconds
    while time.monotonic() < end:
        time.sleep(min(_POLL_SECONDS, silent_seconds / 4))
        beat = read_if_exists(store, layout.beat_path(run_id, holder.name))
        if beat in {None, _RELEASED}:
            return False
        if beat != first:
            return True
    return False


def _age(beat: bytes | None) -> float:
    """Return the seconds since a process of this machine wrote a beat; 0 if the beat does not have its time."""
    try:
        return time.monotonic() - float((beat or b"").split()[-1])
    except (ValueError, IndexError):
        return 0.0


def _refuse_active(store: Store, run_id: str, holder: Holder, silent_seconds: float) -> None:
    if _is_alive(store, run_id, holder, silent_seconds):
        raise ParamError(
            f"Run {run_id!r} is being trained by another fit ({holder}). Wait until it has ended, or choose another "
            "run_id."
        )


def _this_process() -> Holder:
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return Holder(uuid.uuid4().hex, **asdict(ProcessOnMachine.own()), host=platform.node(), since=since)


def _last_token(store: Store, run_id: str) -> int:
    return max((layout.token_of(path) for path in store.list(layout.claims_folder(run_id))), default=0)


def _holder(store: Store, run_id: str, token: int) -> Holder | None:
    path = layout.claim_path(run_id, token)
    content = read_if_exists(store, path) if token else None
    if content is None:
        return None
    claim = _parsed(content, path, dict)
    claim.pop(_CLAIM, None)
    try:
        return Holder(**claim)
    except TypeError as error:
        raise _unreadable_error(path) from error


def _parsed(content: bytes, path: str, expected_type: type[T]) -> T:
    """Return the value in a file, or raise ``StoreError``, which the thread that renews the lease survives.

    A Store may return other content, such as the error page of a proxy.
    """
    try:
        value = json.loads(content)
    except ValueError as error:
        raise _unreadable_error(path) from error
    if not isinstance(value, expected_type):
        raise _unreadable_error(path)
    return value


def _unreadable_error(path: str) -> StoreError:
    return StoreError(
        f"{path} does not hold the content that a fit wrote there. If the Store answers correctly again, nothing needs "
        "to be done; otherwise choose another run_id."
    )


def _takeover_error(store: Store, run_id: str, token: int) -> StoreError:
    return StoreError(
        f"Run {run_id!r} in {store.url} was taken over by another fit ({_holder(store, run_id, token)}), because this "
        "fit appeared dead. This fit ends and publishes nothing more. Fit again with the same run_id when the other "
        "fit has ended, or choose another run_id."
    )
