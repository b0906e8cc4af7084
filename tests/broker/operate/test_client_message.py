"""An entry of the broker as the messages of a client: batches, compression, and what cannot be sent again."""

import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import present

pytest.importorskip("crc32c", reason="needs duelog[broker]")
pytest.importorskip("pyarrow")

import pyarrow as pa

from duelog.broker.operate.client_message import (
    MOST_BYTES,
    ClientMessage,
    NotCarried,
    StoredMetadata,
    _Single,
    client_messages,
    shown_entry,
)
from duelog.broker.protocol.commands import KeyValue
from duelog.broker.protocol.entry import BATCH, CHUNK, Header, pack
from duelog.broker.protocol.fields import BYTES, ENCODERS, VARINT, tag, varint
from tests.broker.protocol.blobs import join_blob
from tests.tools.command_line import FUTURE_MS, json_lines_of, make_store

HEAD = tag(1, BYTES) + varint(1) + b"p" + tag(2, VARINT) + varint(7) + tag(3, VARINT) + varint(1_000)
"""Fields that all metadata begins with, and a client sets anew: producer, number, publish time."""


def entry(payload: bytes, *, flags: int = 0, magic: bool = True, **fields: Any) -> bytes:
    """An entry as the broker stores it."""
    metadata = HEAD + ENCODERS[StoredMetadata](StoredMetadata(**fields))
    blob = join_blob(metadata, payload)
    return pack(Header(flags, 0, fields.get("num_messages_in_batch") or 1, 1_000), blob if magic else blob[6:])


def carried(stored: bytes) -> list[ClientMessage]:
    """Read an entry whose stored key and properties are not looked at."""
    return client_messages(stored, None, {})


@pytest.mark.parametrize("magic", [True, False], ids=["checksum", "none"])
def test_a_single_message_keeps_all_that_a_client_can_set(magic: bool) -> None:
    """Key, ordering key, properties, event time; the key in metadata counts, also where the store has none."""
    stored = entry(b"pay", magic=magic, properties=[KeyValue("shop", "7"), KeyValue("ö", "")], partition_key="k",
                   ordering_key="ö".encode(), event_time=17)  # fmt: skip
    assert carried(stored) == [ClientMessage(b"pay", {"shop": "7", "ö": ""}, "k", "ö", 17)]
    assert carried(entry(b"", null_value=True)) == [ClientMessage(None, {})]


@pytest.mark.parametrize("codec", [0, 1, 2, 3, 4])
def test_a_batch_is_its_messages_whatever_its_compression(codec: int) -> None:
    """Each with key and properties of its own, in their order; an empty one too; and a batch of one."""
    singles = [
        (_Single(payload_size=3, properties=[KeyValue("n", "0")], partition_key="a", event_time=5), b"one"),
        (_Single(payload_size=0), b""),
        (_Single(payload_size=0, partition_key="gone", null_value=True), b""),
        (_Single(payload_size=9_000, ordering_key=b"o"), bytes(9_000)),
    ]
    expected = [
        ClientMessage(b"one", {"n": "0"}, "a", None, 5),
        ClientMessage(b"", {}),
        ClientMessage(None, {}, "gone"),
        ClientMessage(bytes(9_000), {}, None, "o"),
    ]
    for count in (4, 1):
        content = b""
        for single, body in singles[:count]:
            head = ENCODERS[_Single](single)
            content += len(head).to_bytes(4, "big") + head + body
        packed = content
        if codec == 2:
            packed = zlib.compress(content)
        elif codec:
            name = {1: "lz4_raw", 3: "zstd", 4: "snappy"}[codec]
            packed = pa.Codec(name).compress(content, asbytes=True)
        stored = entry(
            packed, flags=BATCH, num_messages_in_batch=count, compression=codec, uncompressed_size=len(content)
        )
        assert carried(stored) == expected[:count]


def test_a_message_of_a_program_is_as_it_was_sent() -> None:
    """It has no header: payload, key and properties are the store's."""
    assert client_messages(b"pay", "k", {"a": "b"}) == [ClientMessage(b"pay", {"a": "b"}, "k")]


def test_an_entry_is_shown_as_it_was_sent_the_beginning_or_all_of_it() -> None:
    """Within bounds: of a batch the first 100, of a payload a MiB; of what cannot be read the metadata, and why."""
    assert shown_entry(b"pay", whole=True) is None
    single = entry(b"pay", partition_key="k", properties=[KeyValue("shop", "7")], event_time=17)
    for whole in (True, False):
        found = present(shown_entry(single, whole=whole))
        assert (found["producer"], found["sequence_id"], found["count"], found["problem"]) == ("p", 7, 1, None)
        assert found["messages"] == [
            {
                "payload": "cGF5",
                "bytes": 3,
                "key": "k",
                "properties": {"shop": "7"},
                "ordering_key": None,
                "event_time": 17,
            }
        ]
    content = b""
    for number in range(150):
        head = ENCODERS[_Single](_Single(payload_size=300, partition_key=str(number)))
        content += len(head).to_bytes(4, "big") + head + bytes(300)
    batch = entry(zlib.compress(content), flags=BATCH, num_messages_in_batch=150, compression=2,
                  uncompressed_size=len(content))  # fmt: skip
    for whole, count, size in ((True, 100, 300), (False, 1, 256)):
        found = present(shown_entry(batch, whole=whole))
        assert (found["count"], len(found["messages"]), found["compression"]) == (150, count, "ZLIB")
        assert [each["key"] for each in found["messages"]] == [str(number) for number in range(count)]
        assert (len(b64decode(found["messages"][0]["payload"])), found["messages"][0]["bytes"]) == (size, 300)
    large = entry(zlib.compress(bytes(2 << 20)), compression=2, uncompressed_size=2 << 20, partition_key="k")
    found, beginning = (present(shown_entry(large, whole=whole)) for whole in (True, False))
    assert (len(b64decode(found["messages"][0]["payload"])), found["messages"][0]["bytes"]) == (1 << 20, 2 << 20)
    assert (beginning["messages"], beginning["key"], "2,097,152 bytes" in beginning["problem"]) == ([], "k", True)
    for stored, problem in (
        (entry(b"x", encryption_keys=[b"key"]), "encrypted"),
        (pack(Header(0, 0, 1, 0), b""), "blob"),
    ):
        found = present(shown_entry(stored, whole=True))
        assert (found["messages"], problem in found["problem"]) == ([], True)


def test_scheduled_shows_a_message_of_a_client_as_it_was_sent(tmp_path: Path) -> None:
    """Beside one of a program, which the broker has not stored."""
    with make_store(tmp_path / "store") as store:
        store.topic("t").send(entry(b"pay", partition_key="k"), deliver_at=FUTURE_MS)
        store.topic("t").send(b"plain", deliver_at=FUTURE_MS + 1)
    found = json_lines_of("scheduled", tmp_path / "store", "t")
    assert [(each["payload"], each["key"]) for each in found] == [("pay", "k"), ("plain", None)]


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (entry(b"part", flags=CHUNK), "chunks"),
        (entry(b"secret", encryption_param=b"iv"), "encrypted"),
        (entry(b"x", ordering_key=b"\xff"), "no text"),
        (entry(b"x", compression=9, uncompressed_size=1), "number 9"),
        (entry(b"x", compression=2, uncompressed_size=1), "malformed"),
        (entry(zlib.compress(b"abc"), compression=2, uncompressed_size=2_000), "malformed"),
        (entry(zlib.compress(bytes(2_000)), compression=2, uncompressed_size=MOST_BYTES + 1), "too large"),
        (entry(b"secret", encryption_keys=[b"key"]), "encrypted"),
        (entry(b"\0\0\0\xffx", flags=BATCH, num_messages_in_batch=1), "malformed"),
        (entry(b"\0", flags=BATCH, num_messages_in_batch=2), "malformed"),
        (pack(Header(0, 0, 1, 0), b"\0\0\1\0"), "malformed"),
    ],
    ids=["chunk", "encrypted", "ordering-key", "codec", "zlib", "size", "bound", "key", "batch", "short-batch", "blob"],
)
def test_what_cannot_be_sent_again_says_why(stored: bytes, reason: str) -> None:
    """It raises NotCarried and nothing else."""
    with pytest.raises(NotCarried, match=reason):
        carried(stored)
