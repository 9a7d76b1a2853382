"""What the ranks of a job tell those who watch over them: which rank it is that keeps the others waiting."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from sparkhvd.comm.connect.launch_context import LaunchContext
from sparkhvd.comm.connect.rendezvous import RendezvousClient
from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError, SparkHvdError

_log = logging.getLogger(__name__)

INIT = "init()"
_KEY = "absent"
_STORE_SECONDS = 10.0
# For the rendezvous to answer that a key is set; that it is not shows in no answer.
_LOOK_SECONDS = 1.0
_MOST_NAMED = 4


@dataclass(frozen=True)
class Straggler:
    """A rank that does not come to the others, as they see it.

    Attributes:
        rank: its number in the job of the launcher.
        why: what the others waited for, and how long.
        joined: whether it had come to ``init()``.
        stack: what its main thread is executing; empty where nobody knows.
    """

    rank: int
    why: str
    joined: bool
    stack: str = ""


def publish_straggler(rendezvous: RendezvousClient, absent: Straggler) -> None:
    """Let those who watch over the ranks know; who is first counts. Call it before the job ends for that."""
    rendezvous.set(_KEY, json.dumps(asdict(absent)).encode(), Deadline.after(_STORE_SECONDS))


def published_straggler(rendezvous: RendezvousClient) -> Straggler | None:
    """What one of the ranks has told; None where they did not."""
    try:
        return Straggler(**json.loads(rendezvous.get(_KEY, Deadline.after(_LOOK_SECONDS))))
    except (DeadlineExceededError, ValueError, TypeError):
        return None


@contextmanager
def warning_of_stragglers(
    rendezvous: RendezvousClient | None, context: LaunchContext, keys: Sequence[str], ranks: Sequence[int], what: str
) -> Iterator[None]:
    """Within this block, log the ranks that have not come after ``stall_check_seconds``, then after twice the time...

    Args:
        rendezvous: where each rank that comes sets its key; None where nobody else comes.
        context: of this rank.
        keys: those of all of them.
        ranks: whose keys these are.
        what: they come to.
    """
    if rendezvous is None or len(ranks) == 1 or not context.config.stall_check:
        yield
        return
    came = threading.Event()

    def watch() -> None:
        index = ranks.index(context.world.rank)
        began, pause = time.monotonic(), max(context.config.stall_check_seconds, _LOOK_SECONDS)
        while not came.wait(pause):
            waited, pause = round(time.monotonic() - began), 2 * pause
            with suppress(SparkHvdError):  # who waits gets the error, too
                missing = _missing(rendezvous, keys, came)
                if missing and not came.is_set() and should_warn(index, missing):
                    _log.warning(
                        "Rank %d has waited %d s for %s to come to %s. It gives up after start_timeout=%g s.",
                        *(ranks[index], waited, _named(missing, ranks), what, context.config.start_timeout),
                    )

    watcher = threading.Thread(target=watch, name="sparkhvd-stragglers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        came.set()
        watcher.join()


def should_warn(index: int, missing: Sequence[int]) -> bool:
    """Whether the rank at ``index`` is the one to warn: the first that waits, as far as ``missing`` tells."""
    before = list(range(min(index, _MOST_NAMED)))
    return list(missing[: len(before)]) == before


def straggler_error(
    rendezvous: RendezvousClient, context: LaunchContext, keys: Sequence[str], ranks: Sequence[int], what: str
) -> DeadlineExceededError | None:
    """The error for ranks that have not come in time, which are told; None where all have, or nobody knows.

    Args:
        rendezvous: where each rank that comes sets its key.
        context: of this rank.
        keys: those of all of them.
        ranks: whose keys these are.
        what: it is that they come to.
    """
    own = context.world.rank
    try:
        missing = _missing(rendezvous, keys) if _is_set(rendezvous, keys[ranks.index(own)]) else []
        if not missing:
            return None
        waited = (
            f"waited start_timeout={context.config.start_timeout:g} s for {_named(missing, ranks)} to come to {what}"
        )
        publish_straggler(
            rendezvous, Straggler(context.rank_in_job(ranks[missing[0]]), f"rank {own} {waited}", joined=what != INIT)
        )
    except SparkHvdError:  # the rendezvous is gone; the first error says more
        return None
    return DeadlineExceededError(f"Rank {own} {waited}. See what it does instead, or raise SPARKHVD_START_TIMEOUT.")


def _missing(rendezvous: RendezvousClient, keys: Sequence[str], stop: threading.Event | None = None) -> list[int]:
    """The indices of the first keys that nobody has set; ``stop`` ends the search."""
    missing: list[int] = []
    for index, key in enumerate(keys):
        if len(missing) == _MOST_NAMED or (stop is not None and stop.is_set()):
            break
        if not _is_set(rendezvous, key):
            missing.append(index)
    return missing


def _named(missing: Sequence[int], ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(missing) > 1 else ''} {', '.join(str(ranks[index]) for index in missing)}"


def _is_set(rendezvous: RendezvousClient, key: str) -> bool:
    try:
        rendezvous.get(key, Deadline.after(_LOOK_SECONDS))
    except DeadlineExceededError:
        return False
    return True
