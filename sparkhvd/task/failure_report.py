"""The report of the first failing rank, which is sent to the other tasks and to the driver."""

from __future__ import annotations

import dataclasses
import json
import signal
from dataclasses import dataclass

RAISED = "raised"
NOT_STARTED = "not started"
NOT_EXCHANGED = "not exchanged"
TOO_LARGE = "too large"
LAUNCH = "launch"

# The phases of a rank.
STARTING = "before fn started"
IN_FN = "in fn"
CONNECTED = "in fn, after init()"
ENDED = "after fn ended"

_MAX_TEXT = 64 * 1024


@dataclass(frozen=True)
class FailureReport:
    """The failure of one rank.

    Attributes:
        rank: the failing rank.
        host: the host that it ran on.
        kind: ``RAISED`` for anything that ended the rank, ``NOT_STARTED`` when it was not ready in time, ``TOO_LARGE``
            for results above the limit, ``LAUNCH`` when no rank caused the failure, and ``NOT_EXCHANGED`` when tasks
            missed the exchange of introductions. For the last two, ``cause`` is the whole message.
        cause: completes "Rank 1 on host X ...".
        traceback: its Python traceback; empty if the process ended without one.
        stderr_tail: the last lines that it wrote to stderr.
        phase: the phase in which it failed; empty when ``cause`` contains it.
        secondary: whether it failed because it lost another rank. The other rank's failure is then the one to report.
        error: the error that ``fn`` itself raised: its type and the first line of its message, which are equal whenever
            ``fn`` raises it again. Empty if something else ended the rank.
        is_final: whether every attempt would raise this error, because its cause is the program or its input.
    """

    rank: int
    host: str
    cause: str
    kind: str = RAISED
    traceback: str = ""
    stderr_tail: str = ""
    phase: str = ""
    secondary: bool = False
    error: str = ""
    is_final: bool = False

    def sentence(self) -> str:
        if self.kind in {LAUNCH, NOT_EXCHANGED}:
            return self.cause
        cause = f"{self.cause.removesuffix('.')} ({self.phase})" if self.phase else self.cause
        return f"Rank {self.rank} on host {self.host} {cause}"

    def to_json(self) -> bytes:
        fields = dataclasses.asdict(self)
        for name in ("cause", "traceback", "stderr_tail"):
            fields[name] = shortened(fields[name])
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, content: bytes) -> FailureReport:
        return cls(**json.loads(content))


def shortened(text: str) -> str:
    """Return ``text``, without its middle if it is very long."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters omitted ...\n{text[-half:]}"


def describe_exit(returncode: int) -> str:
    """Return how a process ended before it delivered a result, to complete "Rank 1 on host X ..."."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    number = -returncode
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    hint = "; the kernel sends this signal on a host that runs out of memory" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}){hint}"
