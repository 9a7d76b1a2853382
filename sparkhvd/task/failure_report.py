"""The report on the first rank that fails; the other tasks and the driver receive it."""

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
        kind: ``RAISED`` if an exception or the end of the process caused the failure, ``NOT_STARTED`` if the rank was
            not ready in time, ``TOO_LARGE`` if its result exceeds the limit, ``LAUNCH`` if no rank caused the failure,
            and ``NOT_EXCHANGED`` if tasks did not send their introductions in time. For ``LAUNCH`` and
            ``NOT_EXCHANGED``, ``cause`` is the whole message.
        cause: a predicate that completes the sentence "Rank 1 on host X ...".
        traceback: the rank's Python traceback; empty if the process ended without one.
        stderr_tail: the last lines that the rank wrote to stderr.
        phase: the phase in which the rank failed; empty if ``cause`` mentions it.
        secondary: whether another failure caused this one. If so, the other failure is the one to report.
        error: the exception that ``fn`` itself raised: its type and the first line of its message, which are equal if
            ``fn`` raises it again. Empty if something else ended the rank.
        is_final: whether a retry would fail in the same way, because the cause is the program or its input.
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
    """Describe how a process ended without a result, as a predicate for "Rank 1 on host X ..."."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    number = -returncode
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    hint = "; the kernel sends this signal on a host that runs out of memory" if number == signal.SIGKILL else ""
    return f"was killed by signal {number} ({name}){hint}"
