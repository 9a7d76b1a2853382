from __future__ import annotations

import time

import pytest

from sparkhvd.deadline import Deadline
from sparkhvd.errors import DeadlineExceededError


def test_deadline_in_the_future_is_not_expired() -> None:
    deadline = Deadline.after(1000)
    assert not deadline.expired()
    assert 0 < deadline.remaining() <= 1000
    deadline.check("rank 3")


def test_deadline_in_the_past_is_expired_and_has_no_time_left() -> None:
    deadline = Deadline(time.monotonic() - 1)
    assert deadline.expired()
    assert deadline.remaining() == 0.0


def test_check_raises_a_timeout_that_names_what_was_awaited() -> None:
    with pytest.raises(TimeoutError, match=r"^Timed out waiting for rank 3\.$") as caught:
        Deadline.after(0).check("rank 3")
    assert isinstance(caught.value, DeadlineExceededError)


def test_capped_deadline_is_the_earlier_of_the_two() -> None:
    near, far = Deadline.after(10), Deadline.after(1000)
    assert near.capped(1000) == near
    assert far.capped(10).at < far.at


def test_capped_deadline_never_lengthens_a_wait() -> None:
    expired = Deadline(time.monotonic() - 1)
    assert expired.capped(60).expired()
