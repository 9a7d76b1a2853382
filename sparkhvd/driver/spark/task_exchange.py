"""Where the tasks of a barrier stage find each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

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

# How long a task that wants to meet the others waits for the lines of all of them. Spark starts the tasks of a barrier
# stage at once, and a task opens its line before it does anything else.
_LINES_SECONDS = 2.0
_ENDED = Rejected("The job has ended meanwhile, the driver says why.")


@dataclass
class _Attempt:
    """What is known of one attempt of the stage, which either all its tasks meet in or none."""

    lines: dict[int, TaskStatus] = field(default_factory=dict)  # the last that each task said, which has one
    introductions: dict[int, Introduction] = field(default_factory=dict)
    waiting: list[Future[Message]] = field(default_factory=list)
    answer: Introductions | ExchangeUnavailable | None = None
    patience: threading.Timer | None = None
    limit: threading.Timer | None = None

    @property
    def ranked(self) -> set[int]:
        """The tasks that have said their rank."""
        return {index for index, task in self.lines.items() if task.rank >= 0}

    def decide(self, answer: Introductions | ExchangeUnavailable) -> list[Future[Message]]:
        """Let ``answer`` hold for all its tasks; those that wait for it."""
        self.answer = answer
        if self.patience is not None:
            self.patience.cancel()
        waiting, self.waiting = self.waiting, []
        return waiting

    def unlimited(self) -> None:
        """Nobody is missed any more."""
        if self.limit is not None:
            self.limit.cancel()
            self.limit = None

    def missing(self, num_tasks: int) -> Mapping[int, str]:
        """The tasks that keep the others waiting, and the host of each; empty where it is not known."""
        if self.ranked:  # they have met, here or elsewhere
            late = set(self.lines) - self.ranked
        else:
            late = set(range(num_tasks)) - set(self.introductions) or set(range(num_tasks))
        return {index: self.lines[index].host if index in self.lines else "" for index in sorted(late)}


class Meeting:
    """Exchanges the introductions of the tasks; a handler for ``sparkhvd.rpc.server.Server``, the rest is output.

    Spark's own ``BarrierTaskContext.allGather`` does the same from any network, but looks for the answer once a second
    only. It is what is left to an attempt of the stage in which not every task has a line to the driver.

    Spark launches the tasks of a barrier stage in one step, in the order of their indices, so the numbers that it gives
    them follow each other: number minus index is the same for all tasks of an attempt of the stage, and larger in the
    next. A scheduler that numbers them otherwise would make every task an attempt of its own, and all meet elsewhere.

    Args:
        num_tasks: how many there are.
        stream: takes the output.
        seconds: how long after the first line of an attempt all its tasks have to know their ranks.
        given: whether the tasks get rows first, which may take any time: then they have so long once all that have a
            line have come to the meeting.
        on_missing: called with the tasks that do not by then, and the host of each, as far as it is known; None lets
            them take their time.

    Attributes:
        heard: whether anything has come from a task.
    """

    def __init__(
        self,
        num_tasks: int,
        stream: LogStream,
        seconds: float = 0.0,
        on_missing: Callable[[Mapping[int, str]], None] | None = None,
        given: bool = False,
    ) -> None:
        self._num_tasks = num_tasks
        self._stream = stream
        self._seconds = seconds
        self._given = given
        self._on_missing = on_missing
        self.heard = False
        self._lock = threading.Lock()  # guards all below
        self._newest = -1
        self._attempt = _Attempt()  # of that number
        self._over = False

    def handle(self, message: Message) -> Message | Future[Message] | None:
        self.heard = True
        if isinstance(message, TaskStatus):
            self._note(message)
            return None
        if isinstance(message, ExchangeIntroductions):
            return self._meet(message.introduction)
        return self._stream.handle(message)

    def is_given_up(self, task: TaskStatus) -> bool:
        """Whether Spark has started the stage anew since that task."""
        with self._lock:
            return stage_attempt(task.attempt, task.task_index) < self._newest

    def offers(self) -> tuple[TaskOffer, ...]:
        """What the tasks of the newest attempt that have come here told about themselves."""
        with self._lock:
            return tuple(task.offer for task in self._attempt.introductions.values())

    def tasks(self) -> dict[int, TaskStatus]:
        """The last that the tasks of the newest attempt have said, by index."""
        with self._lock:
            return dict(self._attempt.lines)

    def end(self) -> None:
        """Let go of the tasks that wait: there will be no job."""
        with self._lock:
            self._over = True
            self._attempt.unlimited()
            waiting = self._attempt.decide(ExchangeUnavailable())
        _tell(waiting, _ENDED)

    def _note(self, task: TaskStatus) -> None:
        number = stage_attempt(task.attempt, task.task_index)
        with self._lock:
            given_up = self._begin(number)
            if number == self._newest:
                self._attempt.lines[task.task_index] = task
                self._limit(self._attempt)
        _tell(given_up, ExchangeUnavailable())

    def _begin(self, number: int) -> list[Future[Message]]:
        """Take note of an attempt; who waits in vain since it is newer than the others."""
        if number <= self._newest:
            return []
        given_up = self._attempt.decide(ExchangeUnavailable())
        self._attempt.unlimited()
        self._newest, self._attempt = number, _Attempt()
        return given_up

    def _limit(self, attempt: _Attempt) -> None:
        """Let the time run in which all have to know their ranks, or not any more."""
        busy = self._given and len(attempt.introductions) < len(attempt.lines)  # with their rows
        if busy or len(attempt.ranked) == self._num_tasks:
            attempt.unlimited()
        elif attempt.limit is None and self._on_missing is not None and not self._over:
            attempt.limit = _after(self._seconds, self._look_who_is_missing, attempt)

    def _meet(self, own: Introduction) -> Message | Future[Message]:
        index = own.offer.task_index
        number = stage_attempt(own.attempt, index)
        if index not in range(self._num_tasks):
            return Rejected(f"This job has {self._num_tasks} tasks; there is no task {index}.")
        answer: Future[Message] = Future()
        with self._lock:
            if self._over:
                return _ENDED
            attempt = self._attempt
            if number != self._newest:
                return ExchangeUnavailable()  # its attempt was given up
            attempt.introductions[index] = own
            self._limit(attempt)
            if attempt.answer is not None:
                return ExchangeUnavailable()  # a task has no line
            attempt.waiting.append(answer)
            if len(attempt.introductions) < self._num_tasks:
                self._wait_for_lines(attempt)
                return answer
            met = self._met(attempt)
            waiting = attempt.decide(met)
        _tell(waiting, met)
        return answer

    def _met(self, attempt: _Attempt) -> Introductions | ExchangeUnavailable:
        met = Introductions(tuple(attempt.introductions[one] for one in range(self._num_tasks)))
        # Of thousands of tasks it may be too much for one message.
        return met if len(encode(met)) <= MAX_FRAME_BYTES else ExchangeUnavailable()

    def _wait_for_lines(self, attempt: _Attempt) -> None:
        if attempt.patience is None and len(attempt.lines) < self._num_tasks:
            attempt.patience = _after(_LINES_SECONDS, self._look_for_lines, attempt)

    def _look_for_lines(self, attempt: _Attempt) -> None:
        with self._lock:
            if attempt.answer is not None or len(attempt.lines) == self._num_tasks:
                return
            waiting = attempt.decide(ExchangeUnavailable())
        _tell(waiting, ExchangeUnavailable())

    def _look_who_is_missing(self, attempt: _Attempt) -> None:
        with self._lock:
            current = attempt is self._attempt and attempt.limit is not None and not self._over
            missing = attempt.missing(self._num_tasks) if current else {}
        if missing and self._on_missing is not None:
            self._on_missing(missing)


def _after(seconds: float, look: Callable[[_Attempt], None], attempt: _Attempt) -> threading.Timer:
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), look, [attempt])
    timer.name = "sparkhvd-meeting"
    timer.daemon = True
    timer.start()
    return timer


def stage_attempt(task_attempt: int, task_index: int) -> int:
    """Which attempt of the stage a task belongs to; ``Meeting`` says why this tells it."""
    return task_attempt - task_index


def _tell(waiting: list[Future[Message]], answer: Message) -> None:
    for one in waiting:  # which sends it, so no lock is held
        one.set_result(answer)
