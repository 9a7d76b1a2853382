"""The exchange of introductions between the tasks of a barrier stage, through the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from sparkhvd._util.counts import counted
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.rpc.frames import MAX_FRAME_BYTES
from sparkhvd.rpc.messages import (
    ExchangeIntroductions,
    ExchangeUnavailable,
    Introductions,
    Message,
    Rejected,
    TaskStatus,
    encode,
)
from sparkhvd.rpc.registration import Introduction, TaskOffer

# How long the exchange waits for the connections of all tasks. Spark starts the tasks of a barrier stage at once, and a
# task connects before it does anything else, which takes seconds on a busy host.
_CONNECTIONS_SECONDS = 5.0
_ENDED = Rejected("The job has already ended. See the driver's log for the reason.")


@dataclass
class _Attempt:
    """The state of one attempt of the stage; the exchange succeeds for all its tasks or for none."""

    statuses: dict[int, TaskStatus] = field(default_factory=dict)  # the last status of each connected task
    ranked: set[int] = field(default_factory=set)  # the tasks that have reported their rank
    introductions: dict[int, Introduction] = field(default_factory=dict)
    waiting: list[Future[Message]] = field(default_factory=list)
    answer: Introductions | ExchangeUnavailable | None = None
    connection_timer: threading.Timer | None = None
    ready_timer: threading.Timer | None = None

    def note(self, task: TaskStatus) -> None:
        """Record the status of a task."""
        self.statuses[task.task_index] = task
        if task.rank >= 0:
            self.ranked.add(task.task_index)

    def decide(self, answer: Introductions | ExchangeUnavailable) -> list[Future[Message]]:
        """Set the answer for all tasks, and return the futures of the tasks that wait for it."""
        self.answer = answer
        if self.connection_timer is not None:
            self.connection_timer.cancel()
        waiting, self.waiting = self.waiting, []
        return waiting

    def stop_ready_timer(self) -> None:
        """Stop waiting for missing tasks."""
        if self.ready_timer is not None:
            self.ready_timer.cancel()
            self.ready_timer = None

    def missing(self, num_tasks: int) -> Mapping[int, str]:
        """Return the tasks that the others wait for, with the host of each, which is empty if unknown."""
        if self.ranked:  # the exchange has succeeded, here or by ``allGather``
            late = set(self.statuses) - self.ranked
        else:
            late = set(range(num_tasks)) - set(self.introductions) or set(range(num_tasks))
        return {index: self.statuses[index].host if index in self.statuses else "" for index in sorted(late)}


class TaskExchange:
    """Exchanges the introductions of the tasks; a handler for ``sparkhvd.rpc.server.Server`` that also takes output.

    Spark's own ``BarrierTaskContext.allGather`` does the same on any network, but polls for the answer only once a
    second. It is the fallback for an attempt of the stage in which not every task has a connection to the driver.

    The numbers of the tasks of an attempt of the stage are consecutive, in the order of their indices
    (``sparkhvd.compat.spark.task_number``): number minus index is the same for all of them, and larger in the next
    attempt. With a scheduler that numbers tasks in another way, every task would look like a separate attempt, and all
    tasks would use the fallback.

    Args:
        num_tasks: number of tasks.
        stream: takes the output.
        seconds: the time from the first connection of an attempt until all its tasks must know their ranks.
        with_rows: whether the tasks receive rows first, which may take any time. If so, ``seconds`` starts when all
            connected tasks have sent their introductions.
        on_missing: called with the tasks that do not know their ranks in time, and with the host of each, if it is
            known; None sets no limit.

    Attributes:
        heard: whether any task has sent a message.
    """

    def __init__(
        self,
        num_tasks: int,
        stream: LogStream,
        seconds: float = 0.0,
        on_missing: Callable[[Mapping[int, str]], None] | None = None,
        with_rows: bool = False,
    ) -> None:
        self._num_tasks = num_tasks
        self._stream = stream
        self._seconds = seconds
        self._with_rows = with_rows
        self._on_missing = on_missing
        self.heard = False
        self._lock = threading.Lock()  # guards the fields below
        self._newest = -1
        self._attempt = _Attempt()  # the newest one
        self._has_ended = False

    def handle(self, message: Message) -> Message | Future[Message] | None:
        self.heard = True
        if isinstance(message, TaskStatus):
            self._note(message)
            return None
        if isinstance(message, ExchangeIntroductions):
            return self._add_introduction(message.introduction)
        return self._stream.handle(message)

    def is_superseded(self, task: TaskStatus) -> bool:
        """Return whether Spark has started a newer attempt of the stage than the task's."""
        with self._lock:
            return stage_attempt(task.attempt, task.task_index) < self._newest

    def offers(self) -> tuple[TaskOffer, ...]:
        """Return the offers of the tasks of the newest attempt that have introduced themselves."""
        with self._lock:
            return tuple(task.offer for task in self._attempt.introductions.values())

    def tasks(self) -> dict[int, TaskStatus]:
        """Return the last status of each task of the newest attempt, by index."""
        with self._lock:
            return dict(self._attempt.statuses)

    def end(self) -> None:
        """Release the tasks that wait, because the job has ended."""
        with self._lock:
            self._has_ended = True
            self._attempt.stop_ready_timer()
            waiting = self._attempt.decide(ExchangeUnavailable())
        _answer(waiting, _ENDED)

    def _note(self, task: TaskStatus) -> None:
        number = stage_attempt(task.attempt, task.task_index)
        with self._lock:
            superseded = self._begin(number)
            if number == self._newest:
                self._attempt.note(task)
                self._update_ready_timer(self._attempt)
        _answer(superseded, ExchangeUnavailable())

    def _begin(self, number: int) -> list[Future[Message]]:
        """Start an attempt if it is newer, and return the waiting futures of the attempt that it supersedes."""
        if number <= self._newest:
            return []
        superseded = self._attempt.decide(ExchangeUnavailable())
        self._attempt.stop_ready_timer()
        self._newest, self._attempt = number, _Attempt()
        return superseded

    def _update_ready_timer(self, attempt: _Attempt) -> None:
        """Start or stop the timer after which tasks without a rank count as missing."""
        busy = self._with_rows and len(attempt.introductions) < len(attempt.statuses)  # receiving their rows
        if busy or len(attempt.ranked) == self._num_tasks:
            attempt.stop_ready_timer()
        elif attempt.ready_timer is None and self._on_missing is not None and not self._has_ended:
            attempt.ready_timer = _start_timer(self._seconds, self._report_missing, attempt)

    def _add_introduction(self, introduction: Introduction) -> Message | Future[Message]:
        index = introduction.offer.task_index
        number = stage_attempt(introduction.attempt, index)
        if index not in range(self._num_tasks):
            return Rejected(f"Task index {index} is out of range: this job has {counted(self._num_tasks, 'task')}.")
        answer: Future[Message] = Future()
        with self._lock:
            if self._has_ended:
                return _ENDED
            attempt = self._attempt
            if number != self._newest:
                return ExchangeUnavailable()  # its attempt is superseded
            attempt.introductions[index] = introduction
            self._update_ready_timer(attempt)
            if attempt.answer is not None:
                return ExchangeUnavailable()  # a task has no connection
            attempt.waiting.append(answer)
            if len(attempt.introductions) < self._num_tasks:
                self._wait_for_connections(attempt)
                return answer
            result = self._introductions(attempt)
            waiting = attempt.decide(result)
        _answer(waiting, result)
        return answer

    def _introductions(self, attempt: _Attempt) -> Introductions | ExchangeUnavailable:
        introductions = Introductions(tuple(attempt.introductions[task] for task in range(self._num_tasks)))
        # The introductions of thousands of tasks may not fit into one message.
        return introductions if len(encode(introductions)) <= MAX_FRAME_BYTES else ExchangeUnavailable()

    def _wait_for_connections(self, attempt: _Attempt) -> None:
        if attempt.connection_timer is None and len(attempt.statuses) < self._num_tasks:
            attempt.connection_timer = _start_timer(_CONNECTIONS_SECONDS, self._check_connections, attempt)

    def _check_connections(self, attempt: _Attempt) -> None:
        with self._lock:
            if attempt.answer is not None or len(attempt.statuses) == self._num_tasks:
                return
            waiting = attempt.decide(ExchangeUnavailable())
        _answer(waiting, ExchangeUnavailable())

    def _report_missing(self, attempt: _Attempt) -> None:
        with self._lock:
            current = attempt is self._attempt and attempt.ready_timer is not None and not self._has_ended
            missing = attempt.missing(self._num_tasks) if current else {}
        if missing and self._on_missing is not None:
            self._on_missing(missing)


def _start_timer(seconds: float, function: Callable[[_Attempt], None], attempt: _Attempt) -> threading.Timer:
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), function, [attempt])
    timer.name = "sparkhvd-exchange-timer"
    timer.daemon = True
    timer.start()
    return timer


def stage_attempt(task_attempt: int, task_index: int) -> int:
    """Return a number for the attempt of the stage that a task belongs to; see ``TaskExchange`` for the reason."""
    return task_attempt - task_index


def _answer(waiting: list[Future[Message]], answer: Message) -> None:
    for future in waiting:  # setting the result sends it, so the caller holds no lock
        future.set_result(answer)
