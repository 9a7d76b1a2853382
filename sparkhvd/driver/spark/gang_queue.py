"""The order in which the jobs of one Spark application start, so that none waits for ever or fails while others run.

Spark starts whichever job fits its free slots: small jobs could keep a large one waiting without end. Here, a job
starts if it is the first in the queue, and its slots are free or no other job runs.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import active_session, is_connect, is_stopped
from sparkhvd.deadline import Deadline
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.driver.spark.slots import describe_cluster, has_dynamic_allocation
from sparkhvd.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# How often a waiting job looks whether the application has more slots, or has ended.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class Gang:
    """A job whose ranks run at the same time.

    Attributes:
        ranks: the slots that it takes; for an elastic job, the most.
        slots: returns the slots of the application for such ranks, free or not.
        priority: jobs of a higher priority start first.
    """

    ranks: int
    slots: Callable[[], int]
    priority: int = 0

    def share(self) -> Fraction:
        """Return the share of the application that it takes; jobs may need other cores and GPUs per rank."""
        slots = max(1, self.slots())
        return Fraction(min(self.ranks, slots), slots)


class GangQueue:
    """The jobs of an application that wait for their slots, and those that run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[Gang] = []  # in the order of their starts
        self._running: list[Gang] = []

    @contextmanager
    def turn(self, gang: Gang) -> Iterator[None]:
        """Wait for the turn of a job; its slots are free again at the end of ``with``."""
        with self._changed:
            self._wait(gang)
            self._running.append(gang)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(gang)
                self._changed.notify_all()

    def jobs(self) -> tuple[list[Gang], list[Gang]]:
        """Return the jobs that run, and those that wait, in the order of their starts."""
        with self._changed:
            return list(self._running), list(self._waiting)

    def _wait(self, gang: Gang) -> None:
        before = sum(other.priority >= gang.priority for other in self._waiting)
        self._waiting.insert(before, gang)
        try:
            if not self._may_start(gang):
                logger.info(
                    "A job of %s waits for its slots: jobs of this application run %s, and %s before it.",
                    counted(gang.ranks, "rank"),
                    counted(sum(other.ranks for other in self._running), "rank"),
                    counted(before, "job waits", "jobs wait"),
                )
            while not self._may_start(gang):
                self._changed.wait(_LOOK_SECONDS)
        finally:
            self._waiting.remove(gang)
            self._changed.notify_all()

    def _may_start(self, gang: Gang) -> bool:
        if self._waiting[0] is not gang:
            return False
        own, taken = gang.share(), sum((other.share() for other in self._running), Fraction(0))
        return not self._running or taken + own <= 1


@dataclass(frozen=True)
class SlotUse:
    """The slots of a Spark application.

    Attributes:
        total: all task slots that are registered now.
        running: the ranks of each sparkhvd job of this driver that runs; for an elastic job, the most.
        waiting: the same of each one that waits, in the order of their starts.
        other_tasks: the tasks of other Spark jobs that run now.
    """

    total: int
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    other_tasks: int


_queues: WeakValueDictionary[str, GangQueue] = WeakValueDictionary()  # by application; jobs keep theirs alive
_lock = threading.Lock()


@contextmanager
def turn_of(spark: SparkSession, resources: TaskResources, ranks: int, priority: int) -> Iterator[None]:
    """Wait until a job may start in the application of a session; its slots are free again at the end of ``with``.

    Through Spark Connect, and under dynamic allocation, a job does not wait here: the slots are not known.

    Args:
        spark: the session.
        resources: the cores and GPUs of each rank.
        ranks: how many slots the job takes; for an elastic job, the most.
        priority: jobs of a higher priority start first.

    Raises:
        LaunchError: the session was stopped while the job waited.
    """
    if is_connect(spark) or has_dynamic_allocation(spark):
        yield
        return
    cluster = describe_cluster(spark, resources)

    def slots() -> int:
        if is_stopped(spark):
            raise LaunchError("The Spark session was stopped while a job waited for its slots.")
        return cluster.count(Deadline(math.inf))

    with _queue_of(spark).turn(Gang(ranks, slots, priority)):
        yield


def _queue_of(spark: SparkSession) -> GangQueue:
    with _lock:
        return _queues.setdefault(str(spark.sparkContext.applicationId), GangQueue())


def slots(spark: SparkSession | None = None) -> SlotUse:
    """Return the slots of a Spark application, and the jobs that run in them and wait for them.

    Args:
        spark: a session of the application; None takes the active one.

    Raises:
        ConfigError: it is a session of Spark Connect, whose client does not know the server's tasks.
        LaunchError: there is no session.

    Examples:
        >>> sparkhvd.slots()  # doctest: +SKIP
        SlotUse(total=8, running=(4, 2), waiting=(8,), other_tasks=1)
    """
    session = active_session() if spark is None else spark
    if is_connect(session):
        raise ConfigError("slots() needs a classic Spark session: a Spark Connect client does not know all tasks.")
    running, waiting = _queue_of(session).jobs()
    total = describe_cluster(session).count(Deadline(math.inf))
    tracker = session.sparkContext.statusTracker()
    stages = filter(None, map(tracker.getStageInfo, tracker.getActiveStageIds()))
    held, needed = (tuple(min(gang.ranks, total) for gang in gangs) for gangs in (running, waiting))
    tasks = sum(stage.numActiveTasks for stage in stages)
    return SlotUse(total, held, needed, max(0, tasks - sum(held)))
