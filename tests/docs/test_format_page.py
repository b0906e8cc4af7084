"""The bytes of docs/format.md are what the code writes."""

import re
from contextlib import closing
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from duelog.broker.protocol.entry import MessageMetadata, header_for, pack
from duelog.broker.protocol.fields import ENCODERS
from duelog.delivery.delivery_log import _CRC, _RECORD
from duelog.store.codec import format as fmt
from duelog.store.codec import run_lengths
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.body import encode_one
from duelog.store.codec.checksum import crc32
from duelog.store.codec.format import FailedDeliveries, attempts_key, copy_key, pack_attempts
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import PackedRun, fields_of_message, pack_markers, seal_run, set_apart
from duelog.store.codec.run_lengths import ScatteredBatch
from duelog.store.codec.sent_ids import KeyRecord, NumberedRow, numbered_key, pack_numbered, sent_key
from duelog.store.env.memtable import APPLIED_KEY
from duelog.store.log import catalog
from duelog.store.message import Message
from duelog.store.wal import segment as segments
from duelog.store.wal.segment import MAIN, SEVERAL, GroupContent, Row, RowKind, Segment, file_name
from duelog.store.wal.wal_reader import DIRECTORY
from tests.broker.protocol.blobs import join_blob

PAGE = Path(__file__).parents[2] / "docs" / "format.md"
START_MS = 1_789_948_800_000
SENT_MS = 1_790_000_000_000
DAY_MS = 86_400_000


def example(number: int) -> tuple[bytes, bytes]:
    """(key, value) of the page's hex block `number`: bytes are what stands before the first three spaces."""
    block = re.findall(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    key, _, value = block.partition("\n\n")

    def parse(text: str) -> bytes:
        return bytes.fromhex("".join(line.split("   ")[0] for line in text.splitlines()))

    return parse(key), parse(value)


def whole(number: int) -> bytes:
    """All bytes of the page's hex block `number`."""
    return b"".join(example(number))


def test_the_pages_run_of_messages_is_what_is_written() -> None:
    """Key and value of the worked example's two messages."""
    key, value = example(0)
    bodies = [
        encode_one(Message(b"pay"), SENT_MS, 1_000)[1],
        encode_one(Message(b"ship", key="order-17"), SENT_MS, 1_000)[1],
    ]
    assert key == fmt.run_key(7, 0)
    run = PackedRun(START_MS, np.array([SENT_MS + 60_000, SENT_MS + 3_600_000]), bodies).sealed(key)
    assert value == run
    assert example(8) == (key, set_apart(key, run, 0)[0])


def test_the_pages_failed_deliveries_and_messages_found_by_name_are_what_is_written() -> None:
    """The record of a block, and one of the delivery log; the record of a key, and that of two numbers."""
    key, value = example(-2)
    assert key == attempts_key(9, 3, 0)
    assert value == fmt.seal(key, pack_attempts({2: FailedDeliveries(3, SENT_MS, SENT_MS + 60_000)}))
    crc, record = example(-1)
    assert record == _RECORD.pack(9, 3, 1, 1_025, 1_025, 0)
    assert crc == _CRC.pack(crc32(record))
    key, value = example(10)
    assert key == sent_key(1, "order-17")
    assert value == fmt.seal(key, KeyRecord(START_MS, 7, 1, 0).pack())
    key, value = example(11)
    assert key == numbered_key(1, "p", 4)
    assert value == fmt.seal(key, pack_numbered([NumberedRow(2, START_MS, 7, 2)]))


def test_the_pages_marker_its_frontier_and_the_copy_of_that_are_what_is_written() -> None:
    """The copy has the same fields under a key of its own, with a checksum of its own."""
    due_ms, frontier = SENT_MS + 60_000, fmt.frontier_key(1, START_MS)
    key, value = example(1)
    assert key == fmt.run_key(3, 0)
    assert value == pack_markers(key, 7, START_MS, np.array([0], np.uint32), np.array([due_ms]), due_ms + 5)
    for number, expected in ((2, frontier), (3, copy_key(frontier))):
        key, value = example(number)
        assert key == expected
        assert value == fmt.seal(key, FrontierRecord(7, due_ms, 0, 2, 1, 3, 0, 0).pack())


def test_the_pages_segment_is_what_is_written(tmp_path: Path) -> None:
    """Its header, a group of two rows, one of a batch, and one of bits."""
    due_ms, body = encode_one(Message(b"pay", deliver_at=SENT_MS + 60_000), SENT_MS, 1_000)
    log, run = fmt.log_key(1), fmt.run_key(7, 0)
    rows = [
        Row(RowKind.RECORD, START_MS, log, fmt.pack_u64(7)),
        Row(RowKind.RUN, START_MS, run, seal_run(run, fields_of_message(START_MS, due_ms, body), [body])),
    ]
    dues, groups = np.array([due_ms, START_MS + DAY_MS + 1_000]), [(START_MS, 0, 1), (START_MS + DAY_MS, 1, 2)]
    batch = ScatteredBatch.pack(dues, Bodies([body, body]), groups, [7, 9])
    batch.place([1, 0])
    with closing(Segment(tmp_path, 5, bytes(range(16)), 1 << 20)) as segment:
        segment.append(GroupContent.of(rows), flush=True)
        segment.append(GroupContent.of([Row(RowKind.BATCH, SEVERAL, b"", batch.value)]), flush=True)
        cancelled, acked = fmt.block_key(fmt.Table.CANCELLED, 7, 0), fmt.acked_key(9, 3)
        bits = [
            Row(RowKind.UNITE, MAIN, cancelled, BitMap([1]).serialize()),
            Row(RowKind.SUBTRACT, MAIN, acked, BitMap([4, 6]).serialize()),
        ]
        segment.append(GroupContent.of(bits), flush=True)
    content = (tmp_path / file_name(5)).read_bytes()
    assert content[:4096].rstrip(b"\0") == whole(4)
    assert content[4096:4608].rstrip(b"\0") == whole(5)
    assert content[4608:5120].rstrip(b"\0") == whole(6)
    assert content[5120:].rstrip(b"\0") == whole(7).rstrip(b"\0")
    assert len(content) == 1 << 20


def test_the_page_has_the_log_as_the_module_has_it() -> None:
    """The grammar of segments and batches stands in both; counters and the file's name are those of the code."""
    text = PAGE.read_text()
    both = (segments.__doc__ or "") + (run_lengths.__doc__ or "")
    grammar = [line for line in both.splitlines() if ":= " in line]
    assert len(grammar) == 6
    assert [line for line in grammar if line not in text] == []
    for counter in (fmt.name_of(APPLIED_KEY), catalog.WAL, catalog.LEDGERS, catalog.TOPICS, catalog.SUBSCRIPTIONS,
                    catalog.DOCUMENTS):  # fmt: skip
        assert f"`{counter}`" in text
    assert f"{DIRECTORY}/{file_name(7)} " in text


def test_every_table_of_the_format_stands_on_the_page() -> None:
    """A table that is added to the code without the page is seen."""
    text = PAGE.read_text()
    assert [table.name for table in fmt.Table if f"`{table:02x}`" not in text] == []


def test_the_pages_payload_of_a_client_is_what_the_broker_stores() -> None:
    """The header, and the blob as the client sent it."""
    metadata = MessageMetadata("p", 1, SENT_MS, partition_key="order-17")
    blob = join_blob(ENCODERS[MessageMetadata](metadata), b"pay")
    assert whole(9) == pack(header_for(metadata, 1, is_batch=False), blob)
