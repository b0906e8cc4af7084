"""Bodies: which messages are refused and with which field, and the form of what is taken."""

import threading
from array import array
from collections import OrderedDict, UserDict
from datetime import datetime
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.codec.body import EncodedBatch, decode_body, encode_batch, encode_one, encode_send
from duelog.store.errors import InvalidMessage
from duelog.store.message import MAX_DUE_MS, MAX_KEY_BYTES, Message
from tests.conftest import in_threads

NOW = 1_790_000_000_000
LIMIT = 5 * 1024 * 1024
NAIVE = datetime(2026, 1, 1)

texts = st.text(max_size=20).filter(lambda text: all(not 0xD800 <= ord(c) < 0xE000 for c in text))
messages = st.builds(
    Message,
    st.binary(max_size=300) | st.integers(250, 70_000).map(bytes),
    deliver_at=st.none() | st.integers(0, MAX_DUE_MS),
    key=st.none() | texts,
    properties=st.none() | st.dictionaries(texts, texts, max_size=4),
)


def test_a_naive_datetime_and_a_text_payload_are_told_what_to_do() -> None:
    """The two commonest mistakes get a reason that helps."""
    with pytest.raises(InvalidMessage, match="tzinfo"):
        encode_one(Message(b"", deliver_at=NAIVE), NOW, LIMIT)
    with pytest.raises(InvalidMessage, match=r"\.encode\(\)"):
        encode_one(Message("text"), NOW, LIMIT)  # type: ignore[arg-type]


def test_an_error_inside_a_callers_mapping_is_not_taken_for_ours() -> None:
    """An AttributeError out of the caller's own class passes through."""

    class Broken(UserDict[str, str]):
        def __getitem__(self, key: str) -> str:
            raise AttributeError("mine")

    with pytest.raises(AttributeError, match="mine"):
        encode_batch([Message(b"", properties=Broken(a="b"))], NOW, LIMIT)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("limit", [100, 300, 70_000])
def test_the_limit_is_of_the_encoded_message(keyed: bool, limit: int) -> None:
    """A body of exactly the limit is taken, one byte more is refused, with its size as value."""
    arguments: dict[str, Any] = {"key": "order", "properties": {"shop": "7"}} if keyed else {}
    size = limit - len(encode_one(Message(b"", **arguments), NOW, LIMIT)[1])
    size -= 0 if limit < 256 else 1 if limit < 65_536 else 3  # the payload's length takes more bytes
    fits, over = Message(bytes(size), **arguments), Message(bytes(size + 1), **arguments)
    assert len(encode_one(fits, NOW, limit)[1]) == limit
    assert len(encode_batch([fits], NOW, limit).bodies[0]) == limit
    with pytest.raises(InvalidMessage, match="max_message_bytes") as caught:
        encode_one(over, NOW, limit)
    assert (caught.value.field, caught.value.value) == ("payload", limit + 1)
    with pytest.raises(InvalidMessage) as caught:
        encode_batch([fits, over], NOW, limit)
    assert (caught.value.field, caught.value.value) == ("messages[1].payload", limit + 1)


def test_extra_does_not_count_towards_the_limit() -> None:
    """A message that was taken once can be handed on with facts added."""
    message = Message(bytes(80))
    assert len(encode_one(message, NOW, 100)[1]) <= 100
    due_ms, body = encode_one(message, NOW, 100, {"topic": "x" * 50})
    assert len(body) > 100
    assert decode_body(body)[4] == {"topic": "x" * 50}
    assert due_ms == NOW


def test_the_longest_key_is_taken() -> None:
    """64 KiB of UTF-8, whatever its number of characters."""
    for key in ("x" * MAX_KEY_BYTES, "ü" * (MAX_KEY_BYTES // 2), ""):
        assert decode_body(encode_one(Message(b"", key=key), NOW, LIMIT)[1])[2] == key


def expected_body(message: Message, extra: dict[str, Any] | None = None) -> bytes:
    """The plain twin: the fields as a list, trailing nils off, packed by msgpack."""
    fields: list[Any] = [NOW, bytes(message.payload), message.key, dict(message.properties or {}) or None, extra]
    while fields[-1] is None:
        fields.pop()
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return body


@given(st.lists(messages, max_size=8))
@settings(max_examples=100)
def test_a_batch_is_what_msgpack_writes_and_reads_back(batch: list[Message]) -> None:
    """Columns and bodies hold every message in order, each body byte for byte the plain msgpack form."""
    encoded = encode_batch(batch, NOW, LIMIT, allow_past=True)
    assert isinstance(encoded, EncodedBatch)
    assert len(encoded) == len(batch)
    assert encoded.dues.dtype == np.int64
    assert encoded.delayed.dtype == np.bool_
    assert encoded.dues.tolist() == [NOW if m.deliver_at is None else m.deliver_at for m in batch]
    assert encoded.delayed.tolist() == [isinstance(m.deliver_at, int) and m.deliver_at > NOW for m in batch]
    for message, body, due_ms in zip(batch, encoded.bodies, encoded.dues.tolist(), strict=True):
        assert type(body) is bytes
        assert body == expected_body(message)
        assert encode_one(message, NOW, LIMIT, allow_past=True) == (due_ms, body)
        assert decode_body(memoryview(body)) == (NOW, message.payload, message.key, message.properties or None, None)


@given(
    messages,
    st.dictionaries(
        texts, st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | texts | st.binary(), min_size=1
    ),
)
@settings(max_examples=60)
def test_extra_facts_read_back(message: Message, extra: dict[str, Any]) -> None:
    """A map of msgpack values goes after the message's own fields."""
    _, body = encode_one(message, NOW, LIMIT, extra, allow_past=True)
    assert body == expected_body(message, extra)
    assert decode_body(body) == (NOW, message.payload, message.key, message.properties or None, extra)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_payloads_are_copied_to_bytes(kind: Any) -> None:
    """The caller may change its buffer afterwards; the body stays."""
    buffer = bytearray(b"payload")
    encoded = encode_batch([Message(kind(buffer))], NOW, LIMIT)
    buffer[:] = b"changed"
    assert decode_body(encoded.bodies[0])[1] == b"payload"


def test_a_memoryview_is_measured_in_bytes() -> None:
    """A view of wider items counts all its bytes, strided ones too."""
    view = memoryview(array("q", range(20)))
    with pytest.raises(InvalidMessage):
        encode_one(Message(view), NOW, 160)
    assert decode_body(encode_one(Message(view[::2]), NOW, LIMIT)[1])[1] == array("q", range(0, 20, 2)).tobytes()


class Text(str):
    """A str subclass, as enumerations of text are."""


def test_subclasses_are_taken_as_what_they_are() -> None:
    """Mappings other than dict, str and Message subclasses go through the slower checks."""

    class Own(Message):
        pass

    kinds: list[Any] = [OrderedDict(a="b"), UserDict(a="b"), {Text("a"): Text("b")}]
    for properties in kinds:
        message = Own(b"p", key=Text("k"), properties=properties)
        assert decode_body(encode_batch([message], NOW, LIMIT).bodies[0]) == (NOW, b"p", "k", {"a": "b"}, None)


def test_a_refused_batch_leaves_the_next_one_unharmed() -> None:
    """Nothing of a failed encoding stays behind in what encoders share."""
    with pytest.raises(InvalidMessage):
        encode_batch([Message(b"a", key="k" * 100, properties={"a": "b", "c": "\ud800"})], NOW, LIMIT)
    with pytest.raises(TypeError):
        encode_one(Message(b"a"), NOW, LIMIT, {"a": 1, "b": object()})
    message = Message(b"b", key="k")
    assert encode_batch([message], NOW, LIMIT).bodies == [expected_body(message)]


def test_threads_encode_side_by_side() -> None:
    """Four threads with different messages each get their own bodies."""
    wrong: list[str] = []
    start = threading.Barrier(4)

    def run(name: str) -> None:
        batch = [Message(name.encode() * n, key=name * n, properties={name: name * n}) for n in range(1, 60)]
        start.wait(60)
        for _ in range(20):
            if encode_batch(batch, NOW, LIMIT).bodies != [expected_body(message) for message in batch]:
                wrong.append(name)

    in_threads(partial(run, name) for name in "abcd")
    assert wrong == []


@pytest.mark.parametrize(
    "fields",
    [[], [NOW], [NOW, b"p", None, None, None], [NOW, b"p", None], [NOW, b"p", "k", None],
     [NOW, b"p", "k", {}, {}, 1], ["1", b"p"], [True, b"p"], [-1, b"p"], [1.5, b"p"], [None, b"p"], [NOW, "text"],
     [NOW, None], [NOW, b"p", b"k"], [NOW, b"p", 5], [NOW, b"p", None, ["a"]], [NOW, b"p", None, {"a": 1}],
     [NOW, b"p", None, {1: "a"}], [NOW, b"p", None, {b"a": "a"}], [NOW, b"p", None, None, ["a"]],
     [NOW, b"p", None, None, {1: "a"}], {"publish_ms": NOW}, None, 5],
)  # fmt: skip
def test_a_body_of_another_form_is_refused(fields: Any) -> None:
    """Well-formed msgpack that is no body raises ValueError."""
    with pytest.raises(ValueError, match=r"body"):
        decode_body(msgpack.packb(fields))


@pytest.mark.parametrize("message", [Message(b"payload"), Message(b"p", key="kü", properties={"a": "b"})])
def test_a_cut_or_lengthened_body_is_refused(message: Message) -> None:
    """No prefix of a body is a body, nor is one with bytes after it."""
    body = encode_one(message, NOW, LIMIT)[1]
    for size in range(len(body)):
        with pytest.raises(ValueError, match=r"body"):
            decode_body(body[:size])
    for tail in (b"\x00", b"\xc0", body):
        with pytest.raises(ValueError, match=r"body"):
            decode_body(body + tail)


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda tail: b"\x95\x01\xc4\x00\xc0\xc0" + tail))
@settings(max_examples=300)
def test_any_bytes_are_a_body_or_a_value_error(data: bytes) -> None:
    """No input makes the decoder raise anything else."""
    try:
        publish_ms, payload, _, _, _ = decode_body(data)
    except ValueError:
        return
    assert type(publish_ms) is int
    assert type(payload) is bytes


def test_a_map_key_without_a_hash_is_a_value_error() -> None:
    """The one form at which msgpack raises TypeError is refused like the others."""
    with pytest.raises(ValueError, match=r"body"):
        decode_body(b"\x95\x01\xc4\x00\xc0\xc0\x81\x90\x01")


@given(
    st.sampled_from([0, 1, 255, 256, 257, 1024, 65_535, 65_536]).map(bytes) | st.binary(max_size=400),
    st.sampled_from([None, 0, 5, MAX_DUE_MS, MAX_DUE_MS + 1, -1, True, 1.5]),
    st.sampled_from([None, 0, 3]),
    st.sampled_from([None, "k"]),
    st.sampled_from([None, {}, {"a": "b"}]),
    st.sampled_from([0, 2**32 - 1, 2**32, NOW]),
    st.sampled_from([300, 1036, 1 << 20]),
)
def test_a_plain_send_is_encoded_as_any_message(
    payload: bytes, at: Any, after: Any, key: Any, properties: Any, now_ms: int, limit: int
) -> None:
    """It has a way of its own, with the same result and the same refusals, at every limit of its forms."""

    def outcome(encode: Any) -> Any:
        try:
            return encode()
        except InvalidMessage as error:
            return error.field, error.reason

    message = Message(payload, deliver_at=at, deliver_after=after, key=key, properties=properties)
    for past in (False, True):
        expected = outcome(lambda: encode_one(message, now_ms, limit, allow_past=past))  # noqa: B023
        found = outcome(lambda: encode_send(payload, at, after, key, properties, now_ms, limit, past))  # noqa: B023
        assert found == expected
