"""The order in which the jobs of one Spark application start, so that none waits forever or fails while others run.

Spark starts any job that fits its free slots, so small jobs could keep a large one waiting forever. Here, a job starts
if it is the first in the queue, and either its slots are free or no other job runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sparkhvd._util.counts import counted
from sparkhvd.compat.spark import active_session, is_connect, is_stopped
from sparkhvd.data.spark.job import user_tags
from sparkhvd.driver.log_stream import is_in_write
from sparkhvd.driver.spark.barrier_stage import barrier_tasks_of_others, running_tasks
from sparkhvd.driver.spark.resources import TaskResources
from sparkhvd.driver.spark.slots import Cluster, describe_cluster, has_dynamic_allocation, setting_that_hides_slots
from sparkhvd.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# How often a waiting job checks whether the application has more slots, or has ended.
_POLL_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class Gang:
    """A job whose ranks run at the same time.

    Attributes:
        ranks: the number of slots that the job takes; for an elastic job, the largest number.
        slots: returns the number of the application's slots for such ranks, free or used by jobs of this queue.
        resources: the cores and GPUs of each rank.
        priority: jobs of a higher priority start first.
        thread: the thread that runs the job.
        tags: the tags that the user gave to the Spark jobs of this thread.
    """

    ranks: int
    slots: Callable[[], int]
    resources: TaskResources = field(default_factory=TaskResources)
    priority: int = 0
    thread: int = field(default_factory=threading.get_ident)
    tags: frozenset[str] = frozenset()

    def fits(self, running: Sequence[Gang]) -> bool:
        """Return whether there are slots for this job in addition to the running jobs.

        This is known only if the running jobs use the same resources. Otherwise, it depends on the executors of their
        ranks: ranks with fewer cores may leave too few cores for a rank of this job on every executor.
        """
        slots = self.slots()
        if not running:
            return True
        if any(other.resources != self.resources for other in running):
            return False
        return min(self.ranks, slots) + sum(other.ranks for other in running) <= slots


class GangQueue:
    """The jobs of an application that wait for their slots, and those that run.

    Only the first waiting job may start. Its thread asks Spark for the slots without the lock. The lock is held only
    for moments, because an interrupt of a thread that ends a job must not lose the slots of that job.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: list[Gang] = []  # in the order of their starts
        self._running: list[Gang] = []

    @contextmanager
    def turn(self, gang: Gang) -> Iterator[None]:
        """Wait for the turn of a job; its slots are free again at the end of ``with``.

        Raises:
            LaunchError: the job was cancelled, or it cannot start in a call that another job waits for.
        """
        try:
            self._wait(gang)
            yield
        finally:
            for jobs in (self._waiting, self._running):
                with suppress(ValueError):
                    jobs.remove(gang)  # at once, even if an interrupt keeps this thread from the lock
            with self._changed:
                self._changed.notify_all()

    def jobs(self) -> tuple[list[Gang], list[Gang]]:
        """Return the jobs that run, and those that wait, in the order of their starts."""
        with self._changed:
            return list(self._running), list(self._waiting)

    def cancel(self, gang: Gang) -> bool:
        """End the wait of a job with an error; return whether the job still waited."""
        with self._changed:
            try:
                self._waiting.remove(gang)
            except ValueError:
                return False
            self._changed.notify_all()
            return True

    def _wait(self, gang: Gang) -> None:
        with self._changed:
            caller = next((job for job in self._running if job.thread == _calling_thread()), None)
            position = sum(other.priority >= gang.priority for other in self._waiting) if caller is None else 0
            self._waiting.insert(position, gang)
        if caller is not None and not gang.fits([caller]):
            raise LaunchError(
                f"A job of {counted(gang.ranks, 'rank')} cannot start in a function that a job of "
                f"{counted(caller.ranks, 'rank')} waits for, such as its epoch_callback: both do not fit into the "
                f"{counted(gang.slots(), 'slot')} of this application at the same time. Start it after the other job, "
                "or give that job fewer ranks."
            )
        if self._start_if_possible(gang):
            return
        logger.info(
            "A job of %s waits for its slots: jobs of this application run %s, and %s before it.",
            counted(gang.ranks, "rank"),
            counted(sum(other.ranks for other in self.jobs()[0]), "rank"),
            counted(position, "job waits", "jobs wait"),
        )
        while not self._start_if_possible(gang):
            with self._changed:
                self._changed.wait(_POLL_SECONDS)

    def _start_if_possible(self, gang: Gang) -> bool:
        """Start a job if it is the first in the queue and fits; return whether it started."""
        running, waiting = self.jobs()
        if waiting[:1] == [gang] and not gang.fits(running):
            return False
        with self._changed:
            if gang not in self._waiting:
                raise LaunchError(
                    f"A job of {counted(gang.ranks, 'rank')} was cancelled while it waited for its slots."
                )
            if self._waiting[0] is not gang:  # a job of a higher priority may be first now
                return False
            self._waiting.remove(gang)
            self._running.append(gang)
            return True


@dataclass(frozen=True)
class WaitingJob:
    """A job that waits for its slots.

    Attributes:
        ranks: the number of ranks; for an elastic job, the largest number.
        priority: the ``priority`` of the job.
        tags: the tags of the thread that runs the job, such as those of ``SparkContext.addJobTag``.
    """

    ranks: int
    priority: int
    tags: frozenset[str]
    _cancel: Callable[[], bool] = field(repr=False, compare=False)

    def cancel(self) -> bool:
        """End the job with a ``LaunchError`` in its thread, before it starts.

        Returns:
            Whether the job still waited. False means that it has started or ended, and that this call has no effect.
        """
        return self._cancel()


@dataclass(frozen=True)
class SlotUse:
    """The slots of a Spark application.

    Attributes:
        total: all task slots that are registered now.
        running: the number of ranks of each sparkhvd job of this driver that has its slots; for an elastic job, the
            largest number.
        waiting: the jobs that wait for slots, in the order in which they will start; each has a method ``cancel()``.
        tasks: the number of tasks that run now, of these jobs and of all other Spark jobs; None through Spark Connect,
            whose clients cannot know it.
    """

    total: int
    running: tuple[int, ...]
    waiting: tuple[WaitingJob, ...]
    tasks: int | None


_calls = threading.local()


@contextmanager
def called_by(thread: int) -> Iterator[None]:
    """Mark the calls inside ``with`` as those that the job of another thread waits for.

    A job that starts in such a call does not wait for the job that waits for it.
    """
    _calls.thread = thread
    try:
        yield
    finally:
        del _calls.thread


def _calling_thread() -> int | None:
    thread: int | None = getattr(_calls, "thread", None)
    return thread


_queues: WeakValueDictionary[str, GangQueue] = WeakValueDictionary()  # by application; its jobs keep a queue alive
_lock = threading.Lock()


@contextmanager
def turn_of(spark: SparkSession, resources: TaskResources, ranks: int, priority: int) -> Iterator[None]:
    """Wait until a job may start in the application of a session; its slots are free again at the end of ``with``.

    A job does not wait here if the number of slots is unknown: under dynamic allocation, and if a setting hides it from
    a Spark Connect client.

    Args:
        spark: the session.
        resources: the cores and GPUs of each rank.
        ranks: the number of slots that the job takes; for an elastic job, the largest number.
        priority: jobs of a higher priority start first.

    Raises:
        LaunchError: the session has been stopped, the job was cancelled before it started, or the call comes from the
            ``write`` of a job's ``stdout``.
    """
    if is_in_write():
        raise LaunchError(
            "A job cannot start in the write() of another job's stdout or stderr: that job waits for the end of the "
            "call. Start it from another thread."
        )
    if has_dynamic_allocation(spark) or setting_that_hides_slots(spark):
        yield
        return
    cluster = describe_cluster(spark, resources)
    gang = Gang(ranks, lambda: _count(spark, cluster), resources, priority, tags=user_tags(spark))
    with _queue_of(spark).turn(gang):
        yield


def _count(spark: SparkSession, cluster: Cluster) -> int:
    """Return the number of slots of a session that has not been stopped, without those of other barrier stages."""
    _check_not_stopped(spark)
    return cluster.count() - (0 if is_connect(spark) else barrier_tasks_of_others(spark))


def _check_not_stopped(spark: SparkSession) -> None:
    if is_stopped(spark):
        raise LaunchError("The Spark session has been stopped. Create a new one.")


def _queue_of(spark: SparkSession) -> GangQueue:
    # A Connect client queues its own jobs; the server's other clients are unknown to it.
    session: Any = spark
    application = session.session_id if is_connect(spark) else session.sparkContext.applicationId
    with _lock:
        return _queues.setdefault(str(application), GangQueue())


def slots(spark: SparkSession | None = None) -> SlotUse:
    """Return the slots of a Spark application, and the jobs that run in them and wait for them.

    Args:
        spark: a session of the application; None takes the active one.

    Raises:
        ConfigError: a setting of a Spark Connect server hides the number of slots.
        LaunchError: there is no session, or the session has been stopped.

    Examples:
        >>> sparkhvd.slots()  # doctest: +SKIP
        SlotUse(total=8, running=(4, 2), waiting=(WaitingJob(ranks=8, priority=0, tags=frozenset()),), tasks=7)
    """
    session = active_session() if spark is None else spark
    _check_not_stopped(session)
    if setting := setting_that_hides_slots(session):
        raise ConfigError(
            f"The number of slots is unknown: {setting} of this cluster hides it from Spark Connect clients."
        )
    queue = _queue_of(session)
    running, waiting = queue.jobs()
    total = describe_cluster(session).count()
    return SlotUse(
        total,
        tuple(min(gang.ranks, total) for gang in running),
        tuple(
            WaitingJob(min(gang.ranks, total), gang.priority, gang.tags, partial(queue.cancel, gang))
            for gang in waiting
        ),
        None if is_connect(session) else running_tasks(session),
    )
