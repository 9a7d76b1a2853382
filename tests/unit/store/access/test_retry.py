from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from sparkhvd import deadline
from sparkhvd.deadline import Deadline
from sparkhvd.errors import StoreError
from sparkhvd.store.access.retry import is_transient, with_retries


def attempt(failures, seconds=1000.0, pauses=None):
    left = list(failures)

    def action(number):
        if left:
            raise left.pop(0)
        return number

    return with_retries(
        action,
        should_retry=is_transient,
        deadline=Deadline.after(seconds),
        what="test",
        pause=(pauses if pauses is not None else []).append,
    )


def test_transient_errors_are_retried_with_growing_pauses_up_to_a_limit():
    pauses = []
    assert attempt([ConnectionError(), TimeoutError(), OSError("x")] * 4, pauses=pauses) == 12
    limits = [min(0.1 * 2**number, 5.0) for number in range(12)]
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, limits, strict=True))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        FileExistsError(),
        PermissionError(),
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EINVAL, "no"),
        ValueError(),
        StoreError("final"),
    ],
)
def test_permanent_errors_are_not_retried(error):
    pauses = []
    with pytest.raises(type(error)) as caught:
        attempt([error], pauses=pauses)
    assert caught.value is error
    assert pauses == []


def test_at_the_deadline_the_last_error_is_raised_with_the_number_of_attempts(monkeypatch):
    pauses = []
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: sum(pauses)))
    with pytest.raises(ConnectionError, match="second") as caught:
        attempt([ConnectionError("first"), ConnectionError("second")], seconds=0.11, pauses=pauses)
    assert caught.value.__notes__ == ["gave up after 2 attempts"]
