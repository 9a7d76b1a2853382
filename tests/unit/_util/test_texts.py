from __future__ import annotations

import pytest

from sparkhvd._util.texts import first_line


@pytest.mark.parametrize(
    ("message", "expected"), [("\n no luck\nat all", "no luck"), (ValueError("no luck\nat all"), "no luck"), ("", "")]
)
def test_the_first_line_of_a_message_is_the_first_that_is_not_empty(message, expected):
    assert first_line(message) == expected
