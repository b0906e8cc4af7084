"""The WAL: what can be read of a damaged one, and an append that was interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog.store.errors import DamagedStore
from duelog.store.wal import wal_file
from duelog.store.wal.wal_file import FILE_NAME, WalFile, WalRecord, read_wal, salvage

STORE = bytes(range(16))
SIZE = 24 << 10


def record(entry_id: int, body: bytes = b"body") -> WalRecord:
    """A message of the one log that these tests have."""
    return WalRecord(1_000, 7, 1_500 + entry_id, entry_id, body)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A WAL with an older epoch of eight groups, and a newer one of five over it."""
    opened = WalFile(tmp_path, STORE, SIZE)
    opened.restart()
    for entry_id in range(8):
        opened.append([record(entry_id)])
    opened.restart()
    for entry_id in range(8, 13):
        opened.append([record(entry_id)])
    opened.close()
    return tmp_path


def zero(path: Path, at: int, count: int) -> None:
    """Overwrite bytes of the WAL in `path` with zeros."""
    with (path / FILE_NAME).open("r+b") as file:
        file.seek(at)
        file.write(bytes(count))


def entries(path: Path) -> list[int]:
    """Entries of what is salvaged."""
    return [found.entry_id for found in salvage(path, STORE)]


def test_what_is_not_written_over_is_salvaged_in_order(written: Path) -> None:
    """The older epoch's last groups come before the newer epoch's."""
    assert [found.entry_id for found in read_wal(written, STORE)] == [8, 9, 10, 11, 12]
    assert entries(written) == [5, 6, 7, 8, 9, 10, 11, 12]
    assert record(9) in salvage(written, STORE)


def test_groups_after_a_hole_are_salvaged(written: Path) -> None:
    """All but the one that is gone."""
    zero(written, 8192 + 2 * 512, 512)
    with pytest.raises(DamagedStore):
        read_wal(written, STORE)
    assert entries(written) == [5, 6, 7, 8, 9, 11, 12]


def test_groups_are_salvaged_without_slots_and_without_an_end(written: Path) -> None:
    """A group says by itself where it lies, and whose it is."""
    zero(written, 0, 8192)
    with (written / FILE_NAME).open("r+b") as file:
        file.truncate(8192 + 6 * 512)
    assert entries(written) == [5, 8, 9, 10, 11, 12]


def test_nothing_is_salvaged_of_no_wal_or_of_another_stores(written: Path, tmp_path: Path) -> None:
    """Also not of an empty file."""
    assert salvage(written, bytes(16)) == []
    assert salvage(tmp_path / "nowhere", STORE) == []
    (written / FILE_NAME).write_bytes(b"")
    assert salvage(written, STORE) == []


def test_an_append_interrupted_after_its_write_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a group and its place move together: the next takes the same place with the same number."""
    opened = WalFile(tmp_path, STORE, SIZE)
    opened.restart()
    opened.append([record(0)])
    synced = False
    aligned, write = wal_file._aligned, WalFile._write

    def note(self: WalFile, content: bytes, at: int) -> None:
        nonlocal synced
        write(self, content, at)
        synced = True

    def interrupt(at: int) -> int:
        if synced:
            raise KeyboardInterrupt
        return aligned(at)

    with monkeypatch.context() as patched:
        patched.setattr(WalFile, "_write", note)
        patched.setattr(wal_file, "_aligned", interrupt)
        try:
            opened.append([record(1)])
            again = False
        except KeyboardInterrupt:
            again = True
    if again:
        opened.append([record(1)])
    opened.append([record(2)])
    opened.close()
    assert [found.entry_id for found in read_wal(tmp_path, STORE)] == [0, 1, 2]
