from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkhvd.rpc.messages import Acknowledged, Flush, MessageError, Output, Started, decode, encode


@pytest.mark.parametrize(
    "message", [Started(3), Output(2, "stdout", b"a\xff\nb"), Output(0, "stderr", b""), Flush(), Acknowledged()]
)
def test_a_message_survives_the_way(message):
    assert decode(encode(message)) == message


def payload(header: bytes, raw: bytes = b"") -> bytes:
    return struct.pack(">I", len(header)) + header + raw


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "too short"),
        (struct.pack(">I", 1000) + b"{}", "cut off"),
        (payload(b"nonsense"), "cannot be read"),
        (payload(b"[" * 100_000), "cannot be read"),
        (payload(b"[1]"), "not an object"),
        (payload(b'{"type": "Shell"}'), "no message of type 'Shell'"),
        (payload(b'{"type": ["Flush"]}'), "no message of type"),
        (payload(b'{"type": "Started"}'), "has the fields"),
        (payload(b'{"type": "Started", "num_proc": 1, "more": 2}'), "has the fields"),
        (payload(b'{"type": "Started", "num_proc": true}'), "is bool, not int"),
        (payload(b'{"type": "Output", "rank": "0", "stream": "stdout"}'), "is str, not int"),
    ],
)
def test_what_is_no_message_is_refused_with_the_reason(content, complaint):
    with pytest.raises(MessageError, match=complaint):
        decode(content)


@given(st.binary(max_size=200))
def test_no_bytes_make_decoding_fail_in_another_way(content):
    try:
        decode(content)
    except MessageError:
        return
