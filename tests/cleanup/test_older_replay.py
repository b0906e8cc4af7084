"""The write-ahead log of an older version: what a crash left in it is delivered, and the file goes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig
from duelog.errors import DamagedStore, FormatMismatch
from duelog.opening import read_identity
from duelog.store.codec.body import encode_one
from duelog.store.wal.older_wal import FILE_NAME
from duelog.tools.repair.repair_store import repair_store
from duelog.tools.store_check import check_store
from tests.conftest import START_MS

HOUR_MS = 3_600_000
CONFIG = StoreConfig(partition_ms=HOUR_MS, background=False)
PARTITION_MS = START_MS // HOUR_MS * HOUR_MS + 2 * HOUR_MS
SIZE = 16 << 10


class Crashed:
    """A store with two messages in a partition, and the file of an older version beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / FILE_NAME
        with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
            sent = [store.topic("t").send(b"%d" % number, deliver_at=PARTITION_MS + number) for number in range(2)]
        self.ledger_id = sent[0].ledger_id
        self.store_id = read_identity(path, CONFIG).store_id

    def write(self, *groups: list[int], version: int = 1, store_id: bytes | None = None) -> None:
        """A file whose groups have entries of these ids, in epoch 3, and one of epoch 2 behind them."""
        content = bytearray(SIZE)
        for epoch in (2, 3):
            fields = struct.pack("<IQQ16s", version, epoch, SIZE, store_id or self.store_id)
            at = epoch % 2 * 4096
            content[at : at + 4 + len(fields)] = struct.pack("<I", crc32(fields)) + fields
        for number, entries in enumerate([*groups, [77]]):
            epoch = 3 if number < len(groups) else 2
            records = b"".join(map(self._record, entries))
            fields = struct.pack("<IQII", len(entries), epoch, number, len(records)) + records
            at = 8192 + 512 * number
            assert len(fields) < 508
            crc = crc32(fields, crc32(self.store_id, crc32(struct.pack("<Q", at))))
            content[at : at + 4 + len(fields)] = struct.pack("<I", crc) + fields
        self.file.write_bytes(content)

    def _record(self, entry_id: int) -> bytes:
        body = encode_one(Message(b"%d" % entry_id), START_MS, 1000)[1]
        return struct.pack("<qQqII", PARTITION_MS, self.ledger_id, PARTITION_MS + entry_id, entry_id, len(body)) + body

    def flip(self, group: int) -> None:
        """Break a group."""
        content = bytearray(self.file.read_bytes())
        content[8192 + 512 * group + 40] ^= 1
        self.file.write_bytes(content)

    def waiting(self) -> dict[MessageId, bytes]:
        """What waits in the store once it is opened."""
        with DelayedStore.open(self.path, CONFIG, clock=ManualClock(START_MS)) as store:
            assert list(store.check(deep=True)) == []
            return {message.message_id: bytes(message.payload) for message in store.topic("t").scheduled()}


@pytest.fixture
def crashed(tmp_path: Path) -> Crashed:
    """A store with two messages."""
    return Crashed(tmp_path / "store")


def test_messages_that_no_partition_has_get_the_ids_that_were_reserved(crashed: Crashed) -> None:
    """Those that the partition has are passed over, one that was written twice comes once; the file goes."""
    crashed.write([0, 1], [2, 3], [3, 4])
    expected = {MessageId(crashed.ledger_id, entry): b"%d" % entry for entry in range(5)}
    assert crashed.waiting() == expected
    assert not crashed.file.exists()
    assert crashed.waiting() == expected


def test_a_file_of_a_store_that_was_closed_goes(crashed: Crashed) -> None:
    """Everything in it is in the partitions."""
    crashed.write([0], [1])
    assert len(crashed.waiting()) == 2
    assert not crashed.file.exists()
    crashed.write()
    assert len(crashed.waiting()) == 2
    assert not crashed.file.exists()


def test_a_torn_last_group_was_not_acknowledged(crashed: Crashed) -> None:
    """The groups before it count."""
    crashed.write([2], [3])
    crashed.flip(1)
    assert sorted(crashed.waiting().values()) == [b"0", b"1", b"2"]


def test_entries_of_a_partition_that_is_gone_were_applied(crashed: Crashed) -> None:
    """It was deleted since."""
    crashed.write([2])
    content = bytearray(crashed.file.read_bytes())
    start = PARTITION_MS + 50 * HOUR_MS
    content[8192 + 24 : 8192 + 32] = struct.pack("<q", start)
    (length,) = struct.unpack_from("<I", content, 8192 + 20)
    fields = content[8196 : 8192 + 24 + length]
    content[8192:8196] = struct.pack("<I", crc32(fields, crc32(crashed.store_id, crc32(struct.pack("<Q", 8192)))))
    crashed.file.write_bytes(content)
    assert len(crashed.waiting()) == 2


def _break_a_group(crashed: Crashed) -> None:
    crashed.write([2], [3])
    crashed.flip(0)


def _leave_a_gap(crashed: Crashed) -> None:
    crashed.write([3])


def _cut(crashed: Crashed) -> None:
    crashed.write([2])
    crashed.file.write_bytes(crashed.file.read_bytes()[:-1])


def _empty(crashed: Crashed) -> None:
    crashed.file.write_bytes(b"")


def _of_another_store(crashed: Crashed) -> None:
    crashed.write([2], store_id=bytes(16))


@pytest.mark.parametrize("damage", [_break_a_group, _leave_a_gap, _cut, _empty, _of_another_store])
def test_a_file_of_which_something_is_lost_is_refused_and_kept(
    crashed: Crashed, damage: Callable[[Crashed], None]
) -> None:
    """A group before the last, entries before it, its end, all of it; or it belongs to another store."""
    damage(crashed)
    before = crashed.file.read_bytes()
    with pytest.raises(DamagedStore, match=FILE_NAME):
        DelayedStore.open(crashed.path, CONFIG, clock=ManualClock(START_MS))
    assert crashed.file.read_bytes() == before


def test_a_damaged_file_is_found_by_check_and_discarded_by_repair(crashed: Crashed, tmp_path: Path) -> None:
    """The store opens then, with what its partitions have."""
    _break_a_group(crashed)
    (found,) = check_store(crashed.path)
    assert (found.code, found.address) == ("wal", str(crashed.file))
    report = repair_store(crashed.path, tmp_path / "given-up")
    assert report.left == []
    assert any(FILE_NAME in action for action in report.actions)
    assert len(crashed.waiting()) == 2


def test_a_file_of_a_later_version_is_refused(crashed: Crashed) -> None:
    """It is no damage."""
    crashed.write([2], version=2)
    with pytest.raises(FormatMismatch):
        DelayedStore.open(crashed.path, CONFIG, clock=ManualClock(START_MS))


def test_what_was_replayed_is_counted_fired_and_delivered(crashed: Crashed) -> None:
    """As any other message, behind which sending goes on."""
    crashed.write([2])
    clock = ManualClock(START_MS)
    with DelayedStore.open(crashed.path, CONFIG, clock=clock) as store:
        assert store.stats().pending == 3
        assert store.topic("t").send(b"3", deliver_at=PARTITION_MS + 3) == MessageId(crashed.ledger_id, 3)
        reader = store.topic("t").subscribe("s")
        clock.advance(PARTITION_MS + 10 - START_MS)
        store.tick()
        assert [bytes(message.payload) for message in reader.receive(10)] == [b"0", b"1", b"2", b"3"]
