"""The WAL: what was appended is read back, whatever a power cut leaves; damage is told from a torn end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.errors import BrokenInvariant, DamagedStore, FormatMismatch, StoreFull
from duelog.store.codec.checksum import crc32
from duelog.store.wal import wal_file as journal_module
from duelog.store.wal.wal_file import FILE_NAME, WalFile, WalFollower, WalRecord, read_wal, write_wal

STORE_ID = bytes(range(16))
SIZE = 32 << 10
SECTOR = 512


def record(number: int, body: bytes = b"body") -> WalRecord:
    """One of many that differ."""
    return WalRecord(86_400_000 * number, 7, 86_400_000 * number + 5, number, body)


@pytest.fixture
def wal_file(tmp_path: Path) -> Iterator[WalFile]:
    """A new WAL, ready to be appended to."""
    with closing(WalFile(tmp_path, STORE_ID, SIZE)) as made:
        made.restart()
        yield made


def test_where_no_wal_is_there_is_nothing_to_read(tmp_path: Path) -> None:
    """Reading makes none."""
    assert read_wal(tmp_path, STORE_ID) == []
    assert not list(tmp_path.iterdir())


def test_groups_are_read_back_in_order(wal_file: WalFile, tmp_path: Path) -> None:
    """Every field of every record, also of empty and of long bodies."""
    groups = [[record(1), record(2, b"")], [record(3, bytes(3000))], [record(4)]]
    for group in groups:
        wal_file.append(group)
    assert read_wal(tmp_path, STORE_ID) == [each for group in groups for each in group]


def test_a_wal_is_as_long_as_it_was_made(wal_file: WalFile, tmp_path: Path) -> None:
    """Appending writes over zeros that are there: the file does not grow, and nothing is sparse."""
    wal_file.append([record(1, bytes(9000))])
    found = (tmp_path / FILE_NAME).stat()
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE


def test_a_new_epoch_holds_nothing_of_the_last(wal_file: WalFile, tmp_path: Path) -> None:
    """What lies after the groups of the new one is not read, though it is whole."""
    for number in range(6):
        wal_file.append([record(number, bytes(600))])
    wal_file.restart()
    assert read_wal(tmp_path, STORE_ID) == []
    wal_file.append([record(99)])
    assert read_wal(tmp_path, STORE_ID) == [record(99)]


def test_a_wal_that_was_closed_is_read_and_begun_anew(wal_file: WalFile, tmp_path: Path) -> None:
    """It has no space before `restart`: what it holds is to be applied first."""
    wal_file.append([record(1)])
    wal_file.close()
    with closing(WalFile(tmp_path, STORE_ID, 2 * SIZE)) as again:
        assert not again.fits(1)
        with pytest.raises(BrokenInvariant, match="does not fit"):
            again.append([record(2)])
        assert read_wal(tmp_path, STORE_ID) == [record(1)]
        again.restart()
        again.append([record(3)])
    assert read_wal(tmp_path, STORE_ID) == [record(3)]
    assert (tmp_path / FILE_NAME).stat().st_size == SIZE


def test_a_group_goes_in_as_long_as_there_is_space(wal_file: WalFile, tmp_path: Path) -> None:
    """`fits` says so to the byte."""
    most = SIZE - 2 * 4096 - journal_module._CRC.size - journal_module._GROUP.size
    assert wal_file.fits(most)
    assert not wal_file.fits(most + 1)
    full = record(1, bytes(most - journal_module.RECORD_BYTES))
    wal_file.append([full])
    assert not wal_file.fits(0)
    assert read_wal(tmp_path, STORE_ID) == [full]


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The block is interrupted when it waits for the disk."""

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_an_interrupted_append_is_done_again_in_its_place(
    wal_file: WalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group that takes its place has what it had, and more."""
    wal_file.append([record(1)])

    with interrupted(monkeypatch):
        wal_file.append([record(2)])
    assert read_wal(tmp_path, STORE_ID) == [record(1), record(2)]
    wal_file.append([record(2), record(3)])
    assert read_wal(tmp_path, STORE_ID) == [record(1), record(2), record(3)]


def test_an_interrupted_restart_is_done_again(
    wal_file: WalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing goes in: it might belong to the old epoch or to the new one."""
    wal_file.append([record(1)])

    with interrupted(monkeypatch):
        wal_file.restart()
    assert not wal_file.fits(0)
    wal_file.restart()
    wal_file.append([record(2)])
    assert read_wal(tmp_path, STORE_ID) == [record(2)]


def test_a_write_that_is_cut_short_is_an_error(wal_file: WalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is not taken for written."""
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, at: len(content) - 1)
    with pytest.raises(OSError, match="cut short"):
        wal_file.append([record(1)])


def test_without_space_for_a_wal_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StoreFull, and no half of one."""
    monkeypatch.setattr(os, "write", lambda descriptor, content: len(content) // 2)
    with pytest.raises(StoreFull):
        WalFile(tmp_path, STORE_ID, SIZE)
    assert not list(tmp_path.iterdir())


def test_the_wal_of_another_store_is_refused(wal_file: WalFile, tmp_path: Path) -> None:
    """By reader and writer, and a version from the future too."""
    wal_file.append([record(1)])
    for refuse in (lambda: read_wal(tmp_path, bytes(16)), lambda: WalFile(tmp_path, bytes(16), SIZE)):
        with pytest.raises(DamagedStore, match="another store"):
            refuse()
    fields = journal_module._SLOT.pack(9, 9, SIZE, STORE_ID)
    slot = journal_module._CRC.pack(crc32(fields)) + fields
    write_at(tmp_path / FILE_NAME, 0, slot)
    with pytest.raises(FormatMismatch, match="version is 9"):
        read_wal(tmp_path, STORE_ID)


def write_at(file: Path, at: int, content: bytes) -> None:
    """Overwrite some bytes."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def test_a_wal_that_was_cut_off_is_damaged(wal_file: WalFile, tmp_path: Path) -> None:
    """At any length."""
    wal_file.append([record(1)])
    content = (tmp_path / FILE_NAME).read_bytes()
    for length in (0, 3, 4095, 4096, 8192, 9000, SIZE - 1):
        (tmp_path / FILE_NAME).write_bytes(content[:length])
        with pytest.raises(DamagedStore):
            read_wal(tmp_path, STORE_ID)


def test_a_group_that_cannot_be_read_before_another_is_damage(wal_file: WalFile, tmp_path: Path) -> None:
    """The last one is taken for torn: it is all that a power cut can leave unreadable."""
    for number in range(3):
        wal_file.append([record(number)])
    file = tmp_path / FILE_NAME
    whole = file.read_bytes()
    for number, at in enumerate((8192, 8704, 9216)):
        file.write_bytes(whole)
        write_at(file, at + 50, b"\xff")
        if number == 2:
            assert read_wal(tmp_path, STORE_ID) == [record(0), record(1)]
            continue
        with pytest.raises(DamagedStore, match=f"group {number} of epoch 2, at byte {at}, .* group {number + 1} foll"):
            read_wal(tmp_path, STORE_ID)


def test_a_reader_beside_the_writer_takes_a_group_that_is_being_written_for_no_damage(
    wal_file: WalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again: what it sees torn before a whole one is whole by then."""
    for number in range(3):
        wal_file.append([record(number)])
    whole = (tmp_path / FILE_NAME).read_bytes()
    torn = bytearray(whole)
    torn[8704 + 50] ^= 1
    seen = [bytes(torn), whole]
    monkeypatch.setattr(Path, "read_bytes", lambda _: seen.pop(0))
    assert read_wal(tmp_path, STORE_ID) == [record(0), record(1), record(2)]
    assert not seen


def test_a_payload_that_holds_a_group_is_none(wal_file: WalFile, tmp_path: Path) -> None:
    """Groups know their place: where the message that holds one is torn, it is not taken for a group after it."""
    wal_file.append([record(1)])
    file = tmp_path / FILE_NAME
    pad = SECTOR - journal_module._CRC.size - journal_module._GROUP.size - journal_module.RECORD_BYTES
    wal_file.append([record(2, bytes(pad) + file.read_bytes()[8192:8704])])
    write_at(file, 8704 + 50, b"\xff")
    assert read_wal(tmp_path, STORE_ID) == [record(1)]


def test_a_torn_slot_leaves_the_epoch_before(wal_file: WalFile, tmp_path: Path) -> None:
    """The two take turns; once the new epoch has a group, a slot that cannot be read is damage."""
    wal_file.append([record(1)])
    for epoch in (3, 4):
        wal_file.restart()
        assert read_wal(tmp_path, STORE_ID) == []
        file = tmp_path / FILE_NAME
        whole = file.read_bytes()
        write_at(file, epoch % 2 * 4096, b"\xff\xff")
        assert read_wal(tmp_path, STORE_ID) == [record(epoch - 2)]
        file.write_bytes(whole)
        wal_file.append([record(epoch - 1)])
        whole = file.read_bytes()
        write_at(file, epoch % 2 * 4096, b"\xff\xff")
        with pytest.raises(DamagedStore, match="cannot be read, and group 0 follows"):
            read_wal(tmp_path, STORE_ID)
        file.write_bytes(whole)


def test_a_copy_holds_what_it_is_given(tmp_path: Path) -> None:
    """Of a size that fits."""
    records = [record(number, bytes(number * 100)) for number in range(40)]
    assert write_wal(tmp_path, STORE_ID, records) == tmp_path / FILE_NAME
    assert read_wal(tmp_path, STORE_ID) == records


class Disk:
    """What the file held at the last flush, and the write that may have followed it."""

    def __init__(self, file: Path, patch: pytest.MonkeyPatch) -> None:
        self.flushed = file.read_bytes()
        self.written: tuple[int, bytes] | None = None
        write, flush = os.pwrite, os.fdatasync

        def pwrite(descriptor: int, content: bytes, at: int) -> int:
            assert self.written is None, "two writes without a flush between them"
            self.written = (at, content)
            return write(descriptor, content, at)

        def fdatasync(descriptor: int) -> None:
            flush(descriptor)
            self.flushed, self.written = file.read_bytes(), None

        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "fdatasync", fdatasync)

    def torn(self, rng: random.Random) -> bytes:
        """What a power cut now could leave: any of the sectors of the last write."""
        content = bytearray(self.flushed)
        if self.written is not None:
            at, written = self.written
            share = rng.random()
            for start in range(0, len(written), SECTOR):
                if rng.random() < share:
                    piece = written[start : start + SECTOR]
                    content[at + start : at + start + len(piece)] = piece
        return bytes(content)


STEPS = st.lists(st.one_of(st.just(0), st.integers(1, 4)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 1 << 30))
def test_a_power_cut_leaves_every_group_that_was_flushed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], seed: int
) -> None:
    """Steps: 0 begins anew, a number appends so many records. Cut before and after every flush, sectors torn."""
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("wal")
    cut = tmp_path_factory.mktemp("cut")
    with closing(WalFile(path, STORE_ID, SIZE)) as wal_file, pytest.MonkeyPatch.context() as patch:
        wal_file.restart()
        disk = Disk(path / FILE_NAME, patch)
        held: list[WalRecord] = []
        number = 0

        def cuts(allowed: list[list[WalRecord]]) -> None:
            for _ in range(3):
                (cut / FILE_NAME).write_bytes(disk.torn(rng))
                assert read_wal(cut, STORE_ID) in allowed

        for step in steps:
            group = [record(number + each, rng.randbytes(rng.choice((0, 10, 700)))) for each in range(step)]
            number += step
            after = [*held, *group] if step else []
            if step and not wal_file.fits(sum(journal_module.RECORD_BYTES + len(each.body) for each in group)):
                continue
            flush = os.fdatasync

            def cut_first(descriptor: int, flush=flush, held=held, after=after) -> None:  # type: ignore[no-untyped-def]
                cuts([held, after])
                flush(descriptor)

            with pytest.MonkeyPatch.context() as cutting:
                cutting.setattr(os, "fdatasync", cut_first)
                if step:
                    wal_file.append(group)
                else:
                    wal_file.restart()
            held = after
            cuts([held])


@settings(max_examples=150, deadline=None)
@given(groups=st.lists(st.integers(1, 3), min_size=1, max_size=6), at=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_changes_no_message(
    tmp_path_factory: pytest.TempPathFactory, groups: list[int], at: int, bit: int
) -> None:
    """It is damage, or harms nothing, or takes the last group for torn."""
    path = tmp_path_factory.mktemp("wal")
    with closing(WalFile(path, STORE_ID, SIZE)) as wal_file:
        wal_file.restart()
        wal_file.append([record(77, bytes(2_000))])
        wal_file.restart()
        written = [
            [record(10 * number + each, b"x" * 300) for each in range(size)] for number, size in enumerate(groups)
        ]
        for group in written:
            wal_file.append(group)
    content = bytearray((path / FILE_NAME).read_bytes())
    at = min(at, 8192 + at % 6_000) if at % 3 else at
    content[at] ^= 1 << bit
    (path / FILE_NAME).write_bytes(content)
    whole = [each for group in written for each in group]
    try:
        found = read_wal(path, STORE_ID)
    except DamagedStore:
        return
    assert found in (whole, whole[: -len(written[-1])])


def test_a_follower_reads_on_where_it_stopped(wal_file: WalFile, tmp_path: Path) -> None:
    """It says whether there was anything, and has all that was on disk when it says that there was not."""
    follower = WalFollower(tmp_path, STORE_ID)
    assert follower.follow()  # an epoch that it did not know
    assert not follower.follow()
    for number in range(3):
        wal_file.append([record(number, bytes(600)), record(number + 10)])
    assert follower.follow()
    wal_file.append([record(3)])
    assert follower.follow()
    assert not follower.follow()
    assert follower.records == read_wal(tmp_path, STORE_ID)
    wal_file.restart()
    assert follower.follow()
    assert follower.records == []
    wal_file.append([record(5)])
    assert follower.follow()
    assert follower.records == [record(5)]


def test_a_follower_of_no_wal_finds_the_one_that_is_made(tmp_path: Path) -> None:
    """A store makes its WAL when it first needs it."""
    follower = WalFollower(tmp_path, STORE_ID)
    assert not follower.follow()
    with closing(WalFile(tmp_path, STORE_ID, SIZE)) as made:
        made.restart()
        made.append([record(1)])
        assert follower.follow()
    assert follower.records == [record(1)]


def test_a_follower_does_not_read_a_group_that_is_written_in_part(wal_file: WalFile, tmp_path: Path) -> None:
    """No sender was told of it."""
    follower = WalFollower(tmp_path, STORE_ID)
    follower.follow()
    wal_file.append([record(1, b"x" * 2000)])
    whole = (tmp_path / FILE_NAME).read_bytes()
    (tmp_path / FILE_NAME).write_bytes(whole[:9000].ljust(SIZE, b"\0"))
    assert not follower.follow()
    (tmp_path / FILE_NAME).write_bytes(whole)
    assert follower.follow()
    assert follower.records == [record(1, b"x" * 2000)]
