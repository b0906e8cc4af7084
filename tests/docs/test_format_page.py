"""The bytes of docs/format.md are what the code writes."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np

from duelog.store.codec import format as fmt
from duelog.store.codec.body import encode_one
from duelog.store.codec.copies import copy_key
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import pack_markers, pack_messages
from duelog.store.message import Message
from duelog.store.wal.wal_file import FILE_NAME, WalFile, WalRecord

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
START_MS = 1_789_948_800_000
SENT_MS = 1_790_000_000_000


def example(number: int) -> tuple[bytes, bytes]:
    """(key, value) of the page's hex block `number`: bytes are what stands before the first three spaces."""
    block = re.findall(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    key, _, value = block.partition("\n\n")

    def parse(text: str) -> bytes:
        return bytes.fromhex("".join(line.split("   ")[0] for line in text.splitlines()))

    return parse(key), parse(value)


def test_the_pages_run_of_messages_is_what_is_written() -> None:
    """Key and value of the worked example's two messages."""
    key, value = example(0)
    bodies = [
        encode_one(Message(b"pay"), SENT_MS, 1_000)[1],
        encode_one(Message(b"ship", key="order-17"), SENT_MS, 1_000)[1],
    ]
    assert key == fmt.run_key(7, 0)
    assert value == pack_messages(key, START_MS, np.array([SENT_MS + 60_000, SENT_MS + 3_600_000]), bodies)


def test_the_pages_run_of_markers_is_what_is_written() -> None:
    """Key and value of the worked example's marker."""
    key, value = example(1)
    assert key == fmt.run_key(3, 0)
    due_ms = SENT_MS + 60_000
    assert value == pack_markers(key, 7, START_MS, np.array([0], np.uint32), np.array([due_ms]), due_ms + 5)


def test_the_pages_frontier_is_what_is_written() -> None:
    """Key and sealed value of the worked example's frontier."""
    key, value = example(2)
    assert key == fmt.frontier_key(1, START_MS)
    assert value == fmt.seal(key, FrontierRecord(7, SENT_MS + 60_000, 0, 2, 1, 3, 0, 0).pack())


def test_the_copy_of_the_pages_frontier_is_what_is_written() -> None:
    """The same fields under a key of its own, with a checksum of its own."""
    key, value = example(3)
    assert key == copy_key(fmt.frontier_key(1, START_MS))
    assert value == fmt.seal(key, FrontierRecord(7, SENT_MS + 60_000, 0, 2, 1, 3, 0, 0).pack())


def test_the_pages_journal_is_what_is_written(tmp_path: Path) -> None:
    """The slot of its epoch, and its group."""
    store_id = bytes(range(16))
    with closing(WalFile(tmp_path, store_id, 1 << 20)) as wal:
        wal.restart()
        due_ms, body = encode_one(Message(b"pay", deliver_at=SENT_MS + 60_000), SENT_MS, 1_000)
        wal.append([WalRecord(START_MS, 7, due_ms, 0, body)])
    content = (tmp_path / FILE_NAME).read_bytes()
    slot, group = b"".join(example(4)), b"".join(example(5))
    assert content.startswith(slot)
    assert content[8192:].rstrip(b"\0") == group
    assert len(content) == 1 << 20


def test_every_table_of_the_format_stands_on_the_page() -> None:
    """A table that is added to the code without the page is seen."""
    text = PAGE.read_text()
    assert [table.name for table in fmt.Table if f"`{table:02x}`" not in text] == []
