"""Where the tasks of a barrier stage find each other."""

from __future__ import annotations

import threading

from sparkhvd.deadline import Deadline
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.rpc.messages import Apart, Attending, Meet, Message, Met, Refused
from sparkhvd.rpc.registration import Introduction

# How long a task that wants to meet the others waits for the lines of all of them. Spark starts the tasks of a barrier
# stage at once, and a line is opened before anything else is done.
_LINES_SECONDS = 2.0


class Meeting:
    """Exchanges the introductions of the tasks; a handler for ``sparkhvd.rpc.server.Server``, the rest is output.

    Spark's own ``BarrierTaskContext.allGather`` does the same from any network, but looks for the answer once a second
    only. It is what is left when not every task has a line to the driver, which is decided once for the whole job: a
    task is never told to meet the others here while one of them waits there.

    The numbers that Spark gives the tasks of one attempt of a barrier stage follow each other, because all are launched
    in one step. So those whose numbers do not are not all of the same attempt, and wait for the newer ones.

    Args:
        num_tasks: how many there are.
        stream: takes the output.
    """

    def __init__(self, num_tasks: int, stream: LogStream) -> None:
        self._num_tasks = num_tasks
        self._stream = stream
        self._changed = threading.Condition()  # guards all below
        self._lines: dict[int, int] = {}  # the newest attempt of every task that has opened a line
        self._introductions: dict[int, Introduction] = {}
        self._apart = False
        self._over = False

    def handle(self, message: Message) -> Message | None:
        if isinstance(message, Attending):
            self._note(message)
            return None
        if isinstance(message, Meet):
            return self._meet(message.introduction)
        return self._stream.handle(message)

    def end(self) -> None:
        """Let go of the tasks that wait: there will be no job."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _note(self, task: Attending) -> None:
        with self._changed:
            self._lines[task.task_index] = max(task.attempt, self._lines.get(task.task_index, -1))
            self._changed.notify_all()

    def _meet(self, own: Introduction) -> Message:
        index = own.offer.task_index
        patience = Deadline.after(_LINES_SECONDS)
        with self._changed:
            if self._lines.get(index) == own.attempt:
                self._introductions[index] = own
                self._changed.notify_all()
            while not self._over and not self._apart:
                if self._lines.get(index) != own.attempt:
                    return Refused("Spark has started this task anew.")
                together = self._have_lines()
                if together and (met := self._of_this_attempt()) is not None:
                    return Met(met)
                if not together and patience.expired():
                    self._apart = True
                    self._changed.notify_all()
                else:
                    self._changed.wait(None if together else patience.remaining())
            return Refused("The job is over.") if self._over else Apart()

    def _have_lines(self) -> bool:
        numbers = self._lines.values()
        return sorted(self._lines) == list(range(self._num_tasks)) and max(numbers) - min(numbers) < self._num_tasks

    def _of_this_attempt(self) -> tuple[Introduction, ...] | None:
        """What all tasks have said of themselves, by index; None as long as one has not."""
        found = [self._introductions.get(index) for index in range(self._num_tasks)]
        met = tuple(one for one in found if one is not None and one.attempt == self._lines[one.offer.task_index])
        return met if len(met) == self._num_tasks else None
