"""One monotonic deadline per operation, created where the operation starts and passed down."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sparkhvd.errors import DeadlineExceededError


@dataclass(frozen=True)
class Deadline:
    """A point on the monotonic clock by which an operation must be over.

    ``Deadline.after(30.0)`` expires 30 seconds from now. A deadline is created once, where the operation starts, and
    passed to everything that waits on its behalf, so that nested waits cannot add up.
    """

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def capped(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and the one ``seconds`` from now."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def check(self, waiting_for: str) -> None:
        """Raise ``DeadlineExceededError`` naming ``waiting_for`` once the time is up."""
        if self.expired():
            raise DeadlineExceededError(f"Timed out waiting for {waiting_for}.")
