"""A segment: what was appended is read back, and damage is told from a torn end."""

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.errors import BrokenInvariant, DamagedStore, FormatMismatch
from duelog.store.codec.checksum import crc32
from duelog.store.wal.segment import (
    MAIN,
    GroupContent,
    Row,
    RowKind,
    Segment,
    capacity_of,
    file_name,
    numbers_in,
    place_of,
    read_group,
    read_segment,
    salvage,
    write_segment,
)
from duelog.store.wal.segment_file import SegmentFile, make_file
from tests.conftest import Plant, raising
from tests.store.wal.segments import GROUPS_AT, SECTOR, SIZE, STORE_ID, flip, make_segment, numbers, row, write_at


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    """A new segment of number 7."""
    with closing(Segment(tmp_path, 7, STORE_ID, SIZE)) as made:
        yield made


def test_groups_are_read_back_in_order(segment: Segment, tmp_path: Path) -> None:
    """Every field of every row, also of empty and of long values, with their places."""
    groups = [
        [Row(RowKind.RUN, 5, b"k", b"value"), Row(RowKind.RECORD, MAIN, b"", b"")],
        [Row(RowKind.SUBTRACT, 86_400_000, b"key", bytearray(3_000))],
        [Row(RowKind.RUN, -86_400_000, bytes(200), b"x")],
    ]
    for group in groups:
        segment.append(GroupContent.of(group), flush=True)
    found = read_segment(tmp_path, 7, STORE_ID)
    assert [list(group.rows()) for group in found.groups] == groups
    assert [group.position for group in found.groups] == [place_of(7, sequence) for sequence in range(3)]
    assert [group.flushed for group in found.groups] == [0, 1, 2]
    assert (found.ended, found.size) == (False, SIZE)
    assert found.end == GROUPS_AT + segment.used
    assert segment.position == place_of(7, 3)


@pytest.mark.parametrize("groups", [[], [[1]]])
def test_an_end_that_was_interrupted_is_appended_again_where_it_is(
    segment: Segment, tmp_path: Path, plant: Plant, groups: list[list[int]]
) -> None:
    """No group takes its place, for who reads beside may have gone on to the next segment; nor is it empty."""
    for group in groups:
        segment.append(GroupContent.of([row(each) for each in group]), flush=True)
    plant(SegmentFile, "write_through", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        segment.end(flush=True)
    assert read_segment(tmp_path, 7, STORE_ID).ended
    assert (segment.fits(1), segment.is_empty, segment.ended) == (False, False, False)
    segment.end(flush=True)
    found = read_segment(tmp_path, 7, STORE_ID)
    assert (numbers(found.groups), found.ended, found.end) == (groups, True, GROUPS_AT + segment.used)


def test_groups_begin_at_sectors_of_a_file_that_is_as_long_as_it_was_made(segment: Segment, tmp_path: Path) -> None:
    """No sector is written twice, so nothing flushed is put at risk; the zeros that are written over are no hole."""
    for size in (0, 1, 470, 512, 2_000):
        assert segment.used % SECTOR == 0
        segment.append(GroupContent.of([row(1, bytes(size))]), flush=True)
    found = (tmp_path / file_name(7)).stat()
    assert found.st_size == SIZE
    assert found.st_blocks * 512 >= SIZE


def test_a_group_without_rows_ends_a_segment(tmp_path: Path) -> None:
    """Its file says that the log goes on; whole groups of that number behind it are none of the segment's."""
    file = make_segment(tmp_path, 7, [[1], [2], [3]])
    behind = file.read_bytes()[GROUPS_AT + 2 * SECTOR : GROUPS_AT + 3 * SECTOR]
    file.unlink()
    make_segment(tmp_path, 7, [[1]], ended=True)
    write_at(file, GROUPS_AT + 2 * SECTOR, behind)
    found = read_segment(tmp_path, 7, STORE_ID)
    assert (numbers(found.groups), found.ended) == ([[1]], True)


def test_what_a_segment_held_under_its_old_number_is_not_read(tmp_path: Path) -> None:
    """A file that is used again has whole groups of before behind the new ones, and at their places."""
    file = make_segment(tmp_path, 7, [[number] for number in range(6)], ended=True)
    file.rename(tmp_path / file_name(9))
    assert read_segment(tmp_path, 9, STORE_ID).groups == []
    make_segment(tmp_path, 9, [[91], [92]])
    found = read_segment(tmp_path, 9, STORE_ID)
    assert (numbers(found.groups), found.ended) == ([[91], [92]], False)


def test_a_group_is_taken_as_long_as_there_is_space(segment: Segment, tmp_path: Path) -> None:
    """`fits` says so, `capacity_of` what the first may have; the group that ends the segment has its own space."""
    most = capacity_of(SIZE)
    assert segment.fits(most)
    assert not segment.fits(most + 1)
    full = row(1, bytes(most - GroupContent.of([row(1, b"")]).size))
    assert GroupContent.of([full]).size == most
    segment.append(GroupContent.of([full]), flush=True)
    assert not segment.fits(GroupContent.of([row(2)]).size)
    segment.end(flush=True)
    found = read_segment(tmp_path, 7, STORE_ID)
    assert (numbers(found.groups), found.ended) == ([[1]], True)
    with pytest.raises(BrokenInvariant, match="does not fit"):
        segment.append(GroupContent.of([full]), flush=True)


def test_a_write_that_is_cut_short_is_an_error(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is not taken for written."""
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, at: len(content) - 1)
    monkeypatch.setattr(os, "pwritev", lambda descriptor, parts, at: len(parts[0]) - 1)
    with pytest.raises(OSError, match="cut short"):
        segment.append(GroupContent.of([row(1)]), flush=True)


def test_a_disk_without_direct_writes_has_groups_written_through_the_page_cache(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of sectors of 4 KiB refuses what is aligned to 512 bytes: the group is written and flushed."""
    monkeypatch.setattr(os, "pwritev", raising(OSError(errno.EINVAL, os.strerror(errno.EINVAL))))
    for number in (1, 2):
        segment.append(GroupContent.of([row(number)]), flush=True)
    assert segment.is_flushed
    assert numbers(read_segment(tmp_path, 7, STORE_ID).groups) == [[1], [2]]


@pytest.mark.parametrize("pieces", [0, 1])
def test_without_space_for_a_segment_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """And no half of one, however many pieces of it there was space for."""
    write, sizes = os.write, list[int]()

    def cut_short(descriptor: int, content: bytes) -> int:
        sizes.append(len(content))
        return write(descriptor, content if len(sizes) <= pieces else content[: len(content) // 2])

    monkeypatch.setattr(os, "write", cut_short)
    with pytest.raises(OSError, match="No space left"):
        Segment(tmp_path, 7, STORE_ID, 3 << 20)
    assert len(sizes) == pieces + 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [5_000, 1 << 20, (1 << 20) + 1, (3 << 20) - 1])
def test_a_file_that_is_made_is_zeros_behind_its_head(tmp_path: Path, size: int) -> None:
    """The file may be one piece, several, or end within one."""
    make_file(tmp_path / "made", b"head", size)
    assert (tmp_path / "made").read_bytes() == b"head".ljust(size, b"\0")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_numbers_of_segments_are_read_from_their_names(tmp_path: Path) -> None:
    """Other files are none; nor is there any where there is no directory."""
    for name in (file_name(12), file_name(3), "000000000004.tmp", "x.wal", "data.mdb"):
        (tmp_path / name).touch()
    assert numbers_in(tmp_path) == [3, 12]
    assert numbers_in(tmp_path / "nowhere") == []


def set_version(file: Path, version: int) -> None:
    """Give a segment the header of another version."""
    fields = struct.pack("<IQ16s", version, SIZE, STORE_ID)
    write_at(file, 0, struct.pack("<I", crc32(fields)) + fields)


def test_a_segment_of_another_store_or_of_a_later_version_is_refused(tmp_path: Path) -> None:
    """By reader and writer; a later version is told."""
    file = make_segment(tmp_path, 7, [[1]])
    refusing: list[Callable[[], object]] = [
        lambda: read_segment(tmp_path, 7, bytes(16)),
        lambda: Segment(tmp_path, 7, bytes(16), SIZE),
    ]
    for refuse in refusing:
        with pytest.raises(DamagedStore, match="another store"):
            refuse()
    set_version(file, 9)
    with pytest.raises(FormatMismatch, match="version is 9"):
        read_segment(tmp_path, 7, STORE_ID)


def test_a_segment_of_the_version_before_is_read_and_not_begun_again(tmp_path: Path) -> None:
    """Nothing is written into it that the version before does not know; its end may be."""
    set_version(make_segment(tmp_path, 7, [[1]]), 2)
    found = read_segment(tmp_path, 7, STORE_ID)
    assert numbers(found.groups) == [[1]]
    with pytest.raises(FormatMismatch, match="version is 2"):
        Segment(tmp_path, 7, STORE_ID, SIZE)
    with closing(Segment(tmp_path, 7, STORE_ID, SIZE, at=found.end, sequence=1)) as segment:
        segment.end(flush=True)
    assert read_segment(tmp_path, 7, STORE_ID).ended


def test_a_segment_that_was_cut_off_is_damaged(tmp_path: Path) -> None:
    """At any length, also behind its last group."""
    file = make_segment(tmp_path, 7, [[1]])
    content = file.read_bytes()
    for length in (0, 3, 31, 4_095, 4_096, 4_700, SIZE - 1):
        file.write_bytes(content[:length])
        with pytest.raises(DamagedStore):
            read_segment(tmp_path, 7, STORE_ID)


def test_a_damaged_group_before_one_that_was_flushed_after_it_is_damage(tmp_path: Path) -> None:
    """The last one is taken for torn: a power cut may leave it unreadable."""
    file = make_segment(tmp_path, 7, [[0], [1], [2]])
    whole = file.read_bytes()
    for number in range(2):
        flip(file, GROUPS_AT + number * SECTOR + 50)
        message = f"group {number} at byte {GROUPS_AT + number * SECTOR} cannot be read, and was flushed before group"
        with pytest.raises(DamagedStore, match=message):
            read_segment(tmp_path, 7, STORE_ID)
        file.write_bytes(whole)
    flip(file, GROUPS_AT + 2 * SECTOR + 50)
    found = read_segment(tmp_path, 7, STORE_ID)
    assert (numbers(found.groups), found.end) == ([[0], [1]], GROUPS_AT + 2 * SECTOR)


def test_a_damaged_group_before_the_end_of_a_segment_is_damage(tmp_path: Path) -> None:
    """All groups are on disk before the one without rows is."""
    file = make_segment(tmp_path, 7, [[0], [1]], ended=True)
    flip(file, GROUPS_AT + SECTOR + 50)
    with pytest.raises(DamagedStore, match="group 1 at byte"):
        read_segment(tmp_path, 7, STORE_ID)


def test_groups_that_were_not_flushed_may_be_lost_in_any_order(tmp_path: Path) -> None:
    """Groups after the first hole are not read, though they are whole; flushed groups must be there."""
    with closing(Segment(tmp_path, 7, STORE_ID, SIZE)) as made:
        for number in range(2):
            made.append(GroupContent.of([row(number)]), flush=False)
        assert not made.is_flushed
        made.flush()
        assert made.is_flushed
        for number in range(2, 6):
            made.append(GroupContent.of([row(number)]), flush=False)
    file = tmp_path / file_name(7)
    whole = file.read_bytes()
    for lost, left in ((3, [[0], [1], [2]]), (2, [[0], [1]])):
        flip(file, GROUPS_AT + lost * SECTOR + 50)
        assert numbers(read_segment(tmp_path, 7, STORE_ID).groups) == left
        file.write_bytes(whole)
    flip(file, GROUPS_AT + SECTOR + 50)
    with pytest.raises(DamagedStore, match="group 1 at byte"):
        read_segment(tmp_path, 7, STORE_ID)


def test_a_payload_that_holds_a_group_is_none(segment: Segment, tmp_path: Path) -> None:
    """Groups know their place: where the message that holds one is torn, it is not taken for a group after it."""
    segment.append(GroupContent.of([row(1)]), flush=True)
    segment.append(GroupContent.of([row(2)]), flush=True)
    file = tmp_path / file_name(7)
    content = file.read_bytes()
    inside = content[GROUPS_AT + SECTOR : GROUPS_AT + 2 * SECTOR]
    pad = SECTOR - GroupContent.of([row(3, b"")]).size % SECTOR
    segment.append(GroupContent.of([row(3, bytes(pad) + inside)]), flush=True)
    at = GROUPS_AT + 3 * SECTOR
    assert file.read_bytes()[at : at + SECTOR] == inside
    assert read_group(file.read_bytes(), at, STORE_ID, 7) is None
    flip(file, GROUPS_AT + 2 * SECTOR + 50)
    assert numbers(read_segment(tmp_path, 7, STORE_ID).groups) == [[1], [2]]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    ended=st.booleans(),
    at=st.integers(0, SIZE - 1),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_changes_no_row(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], ended: bool, at: int, bit: int
) -> None:
    """It is damage, or harms nothing, or takes the last group for torn."""
    path = tmp_path_factory.mktemp("wal")
    file = make_segment(path, 6, [[number] for number in range(12)])
    file.rename(path / file_name(7))
    groups = [[10 * number + each for each in range(size)] for number, size in enumerate(sizes)]
    file = make_segment(path, 7, groups, ended=ended)
    flip(file, at if at % 3 else min(SIZE - 1, GROUPS_AT + at % (SECTOR * (len(groups) + 2))), bit)
    try:
        found = read_segment(path, 7, STORE_ID)
    except (DamagedStore, FormatMismatch):
        return
    if ended:
        assert numbers(found.groups) == groups
    else:
        assert numbers(found.groups) in (groups, groups[:-1])
        assert not found.ended


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A segment of number 9 with five groups, over eight that it held as number 7."""
    file = make_segment(tmp_path, 7, [[number] for number in range(8)])
    file.rename(tmp_path / file_name(9))
    make_segment(tmp_path, 9, [[number] for number in range(8, 13)])
    return tmp_path


@pytest.mark.parametrize(
    ("at", "zeros", "size", "left"),
    [
        (0, 0, SIZE, range(5, 13)),  # the last groups of before come first
        (GROUPS_AT + 2 * SECTOR, SECTOR, SIZE, (*range(5, 10), 11, 12)),
        (0, GROUPS_AT, GROUPS_AT + 6 * SECTOR, (5, *range(8, 13))),  # a group says where it lies, and whose it is
    ],
    ids=["whole", "with a hole", "without a header and an end"],
)
def test_what_is_whole_and_not_written_over_is_salvaged_in_order(
    written: Path, at: int, zeros: int, size: int, left: Sequence[int]
) -> None:
    """Also where the segment cannot be read."""
    assert numbers(read_segment(written, 9, STORE_ID).groups) == [[8], [9], [10], [11], [12]]
    write_at(written / file_name(9), at, bytes(zeros))
    os.truncate(written / file_name(9), size)
    assert [number for group in numbers(salvage(written, 9, STORE_ID)) for number in group] == list(left)
    if zeros:
        with pytest.raises(DamagedStore):
            read_segment(written, 9, STORE_ID)


def test_nothing_is_salvaged_of_no_segment_or_of_another_stores(written: Path) -> None:
    """Also not of an empty file."""
    assert salvage(written, 9, bytes(16)) == []
    assert salvage(written, 4, STORE_ID) == []
    (written / file_name(9)).write_bytes(b"")
    assert salvage(written, 9, STORE_ID) == []


def test_a_copy_holds_what_it_is_given(tmp_path: Path) -> None:
    """Groups at their places, of a size that fits."""
    make_segment(tmp_path, 7, [[1, 2], [3], [4, 5, 6]])
    groups = read_segment(tmp_path, 7, STORE_ID).groups
    (tmp_path / "copy").mkdir()
    for ended in (True, False):
        file = write_segment(tmp_path / "copy", 7, STORE_ID, groups, ended=ended)
        found = read_segment(tmp_path / "copy", 7, STORE_ID)
        assert [list(group.rows()) for group in found.groups] == [list(group.rows()) for group in groups]
        assert [group.position for group in found.groups] == [group.position for group in groups]
        assert found.ended == ended
        file.unlink()
