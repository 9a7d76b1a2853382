from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkhvd.rpc.fields import MessageError
from sparkhvd.rpc.messages import Introductions, Message, decode, encode
from sparkhvd.rpc.registration import Introduction, TaskOffer

KINDS = get_args(Message)
MESSAGES = st.one_of([st.from_type(kind) for kind in KINDS])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(st.data())
def test_every_message_survives_serialization(kind, data):
    message = data.draw(st.from_type(kind))
    assert decode(encode(message)) == message


def test_a_long_header_is_compressed():
    offers = [TaskOffer(index, "0" * 32, f"host-{index}.example", "10.0.0.1") for index in range(1000)]
    message = Introductions(tuple(Introduction(index, offer, 40000) for index, offer in enumerate(offers)))
    encoded = encode(message)
    assert len(encoded) < len(json.dumps(dataclasses.asdict(message))) / 10
    assert decode(encoded) == message


def payload(header: bytes, raw: bytes = b"") -> bytes:
    return struct.pack(">I", len(header)) + header + raw


ENDED = b'{"type": "WorkerEnded", "returncode": 0, "ended_by_launcher": %s}'
PROBE = b'{"type": "ProbeServers", "servers": %s}'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "too short"),
        (struct.pack(">I", 1000) + b"{}", "truncated or not a JSON object"),
        (payload(b"nonsense"), "The message header is not valid JSON"),
        (payload(b"[" * 100_000), "The message header is not valid JSON"),
        (payload(zlib.compress(b"nonsense")), "The message header is not valid JSON"),
        (payload(b"xyz"), "The message header is not valid JSON"),
        (payload(zlib.compress(b"[" * (65 << 20))), "The message header is not valid JSON"),
        (payload(zlib.compress(ENDED % b"true")[:-8]), "The message header is not valid JSON"),
        (payload(b"[1]"), "not a JSON object"),
        (payload(b'{"type": "Shell"}'), "Unknown message type 'Shell'; expected one of"),
        (payload(b'{"type": ["Flush"]}'), "Unknown message type"),
        (payload(b'{"type": "Started"}'), "must have the fields"),
        (payload(b'{"type": "Started", "num_proc": 1, "more": 2}'), "must have the fields"),
        (payload(b'{"type": "Started", "num_proc": true}'), "must be of type int, got bool"),
        (payload(b'{"type": "Started", "num_proc": 1}', b"more"), "carries 4 unexpected bytes after its header"),
        (payload(b'{"type": "Output", "rank": "0", "stream": "stdout"}'), "must be of type int, got str"),
        (payload(ENDED % b"1"), r"WorkerEnded\.ended_by_launcher must be of type bool, got int"),
        (
            payload(b'{"type": "Register", "registration": {}}'),
            r"registration must have the fields \['attempt'",
        ),
        (
            payload(b'{"type": "Register", "registration": [1]}'),
            r"registration must have the fields .*, got list",
        ),
        (payload(PROBE % b'{"address": "127.0.0.1"}'), r"ProbeServers\.servers must be of type list, got dict"),
        (payload(PROBE % b"[7]"), r"ProbeServers\.servers\[0\] must have the fields .*, got int"),
        (
            payload(b'{"type": "ExecuteOrted", "arguments": ["orted", null]}'),
            r"\[1\] must be of type str, got NoneType",
        ),
    ],
)
def test_invalid_messages_are_refused_with_the_reason(content, complaint):
    with pytest.raises(MessageError, match=complaint):
        decode(content)


def test_a_refusal_does_not_quote_the_whole_message():
    with pytest.raises(MessageError) as caught:
        decode(payload(json.dumps({"type": "Started"} | {str(number): 0 for number in range(10_000)}).encode()))
    assert len(str(caught.value)) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def with_one_value_replaced(draw: st.DrawFn, value: object) -> object:
    """Return ``value`` with another value at a random position, possibly deeply nested."""
    if value and isinstance(value, (dict, list)) and draw(st.booleans()):
        positions = list(value) if isinstance(value, dict) else range(len(value))
        position = draw(st.sampled_from(list(positions)))
        changed = value.copy()
        changed[position] = with_one_value_replaced(draw, value[position])
        return changed
    if isinstance(value, dict):
        keys = draw(st.lists(st.sampled_from([*value, "surplus"]), unique=True))
        return {key: value.get(key) for key in keys}
    return draw(JSON)


@st.composite
def malformed(draw: st.DrawFn) -> bytes:
    """Draw an encoded message of any type with wrong values or wrong bytes."""
    content = encode(draw(MESSAGES))
    if draw(st.integers(0, 3)):
        end = 4 + struct.unpack_from(">I", content)[0]
        text = content[4:end]
        is_compressed = text.startswith(b"x")
        header = json.loads(zlib.decompress(text) if is_compressed else text)
        name = {"type": header.pop("type")}
        changed = with_one_value_replaced(draw, header)
        changed = name | changed if isinstance(changed, dict) else changed
        text = json.dumps(changed).encode()
        return payload(zlib.compress(text) if is_compressed else text, content[end:])
    position = draw(st.integers(0, len(content)))
    length = draw(st.integers(0, 3))
    return content[:position] + draw(st.binary(max_size=3)) + content[position + length :]


def assert_typed(message: object) -> None:
    """Check that all values of a decoded message have the declared types, at every level."""
    for name, hint in get_type_hints(type(message)).items():
        value = getattr(message, name)
        if isinstance(value, tuple):
            kind = get_args(hint)[0]
            items = value
        else:
            kind, items = hint, (value,)
        for item in items:
            assert type(item) is kind
            if dataclasses.is_dataclass(kind):
                assert_typed(item)


@given(malformed() | st.binary(max_size=200))
def test_decoding_arbitrary_bytes_returns_a_message_or_raises_a_message_error(content):
    try:
        message = decode(content)
    except MessageError:
        return
    assert_typed(message)
