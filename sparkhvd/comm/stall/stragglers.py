"""Stragglers: ranks that keep others waiting. Log them, raise errors about them, and report one to the supervisors."""

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
_KEY = "straggler"
_STORE_SECONDS = 10.0
# The rendezvous answers a lookup only once the key is set, so this limits the wait for a key that no rank sets.
_LOOKUP_SECONDS = 1.0
_LEAST_PAUSE_SECONDS = 1.0
_MAX_NAMED = 4


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps others waiting, from their point of view.

    Attributes:
        rank: its number in the launcher's job.
        why: what the others waited for, and how long they waited.
        joined: whether it had reached ``init()``.
        stack: what its main thread is executing; empty if unknown.
    """

    rank: int
    why: str
    joined: bool
    stack: str = ""


def publish_straggler(rendezvous: RendezvousClient, straggler: Straggler) -> None:
    """Publish the straggler for the job's supervisors; only the first one counts. Call this before ending the job."""
    rendezvous.set(_KEY, json.dumps(asdict(straggler)).encode(), Deadline.after(_STORE_SECONDS))


def published_straggler(rendezvous: RendezvousClient) -> Straggler | None:
    """Return the straggler that a rank has published; None if there is none."""
    try:
        return Straggler(**json.loads(rendezvous.get(_KEY, Deadline.after(_LOOKUP_SECONDS))))
    except (DeadlineExceededError, ValueError, TypeError):
        return None


@contextmanager
def warning_of_stragglers(
    rendezvous: RendezvousClient | None, context: LaunchContext, prefix: str, ranks: Sequence[int], what: str
) -> Iterator[None]:
    """Within this block, log missing ranks after ``stall_check_seconds``, and again after pauses that double.

    Args:
        rendezvous: where each rank sets its key when it arrives; None if no other rank takes part.
        context: the launch context of this rank.
        prefix: the beginning of every rank's key; the rank's index in ``ranks`` follows.
        ranks: the ranks that must arrive.
        what: the name of the point that the ranks must reach, such as ``init()``.
    """
    if rendezvous is None or len(ranks) == 1 or not context.config.stall_check:
        yield
        return
    all_arrived = threading.Event()

    def watch() -> None:
        index = ranks.index(context.world.rank)
        began, pause = time.monotonic(), max(context.config.stall_check_seconds, _LEAST_PAUSE_SECONDS)
        while not all_arrived.wait(pause):
            waited, pause = round(time.monotonic() - began), 2 * pause
            with suppress(SparkHvdError):  # the waiting thread gets the error too
                missing = rendezvous.missing(prefix, range(len(ranks)))
                if missing and not all_arrived.is_set() and should_warn(index, missing):
                    _log.warning(
                        "Rank %d has waited %d s for %s to reach %s. It gives up after start_timeout=%g s.",
                        *(ranks[index], waited, _ranks_text(missing, ranks), what, context.config.start_timeout),
                    )

    watcher = threading.Thread(target=watch, name="sparkhvd-stragglers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        all_arrived.set()
        watcher.join()


def should_warn(index: int, missing: Sequence[int]) -> bool:
    """Return whether the rank at ``index``, which has arrived, should warn of the ``missing`` ones.

    The first rank that has arrived warns. If the first ``_MAX_NAMED`` ranks are missing, all ranks that have arrived
    warn.
    """
    before = list(range(min(index, _MAX_NAMED)))
    return list(missing[: len(before)]) == before


def straggler_error(
    rendezvous: RendezvousClient, context: LaunchContext, prefix: str, ranks: Sequence[int], what: str
) -> DeadlineExceededError | None:
    """Return the error for ranks that did not arrive in time, and publish the first; None if none is known.

    Args:
        rendezvous: where each rank sets its key when it arrives.
        context: the launch context of this rank.
        prefix: the beginning of every rank's key; the rank's index in ``ranks`` follows.
        ranks: the ranks that must arrive.
        what: the name of the point that the ranks must reach, such as ``init()``.
    """
    own_rank = context.world.rank
    try:
        missing = rendezvous.missing(prefix, range(len(ranks)))
        if not missing or ranks.index(own_rank) in missing:
            return None
        waited = (
            f"waited start_timeout={context.config.start_timeout:g} s for {_ranks_text(missing, ranks)} to reach {what}"
        )
        first = context.rank_in_job(ranks[missing[0]])
        publish_straggler(rendezvous, Straggler(first, f"rank {own_rank} {waited}", joined=what != INIT))
    except SparkHvdError:  # the rendezvous has ended; the caller's own error has more details
        return None
    return DeadlineExceededError(
        f"Rank {own_rank} {waited}. Check what {'that rank is' if len(missing) == 1 else 'these ranks are'} doing, or "
        "raise SPARKHVD_START_TIMEOUT."
    )


def _ranks_text(missing: Sequence[int], ranks: Sequence[int]) -> str:
    named = [str(ranks[index]) for index in missing[:_MAX_NAMED]]
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}"
