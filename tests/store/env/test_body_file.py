"""Body files: bodies begin at pages, are on disk with their names before a call ends, and are taken back where not."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from duelog.store.env import body_file
from duelog.store.env.body_file import BodyMaps, BodyReader, StagedBodies, append_bodies, body_files, end_of
from tests.conftest import BodyMapsMade


def append(path: Path, at: int, *bodies: bytes, named: bool = False) -> None:
    """Append to one file."""
    staged = StagedBodies(at)
    for each in bodies:
        staged.add(each)
    append_bodies({str(path): staged}, {str(path)} if named else set())


def test_bodies_begin_at_pages_and_are_read_back(tmp_path: Path) -> None:
    """More pieces than one call of the system takes; what is not there is no bytes."""
    path = body_file.body_file(tmp_path, 7)
    assert end_of(str(path)) == 0
    first = [b"%d," % number for number in range(3_000)]
    append(path, 0, *first)
    assert end_of(str(path)) % 4096 == 0
    at = end_of(str(path))
    append(path, at, b"second", named=True)
    read = BodyReader(BodyMaps(str(tmp_path)))
    assert read(7, 0, 13_890) == b"".join(first)
    assert bytes(read(7, at + 2, 100)) == b"cond"
    assert bytes(read(7, end_of(str(path)), 1)) == bytes(read(8, 0, 1)) == b""
    assert body_files(tmp_path) == {7: path}


@pytest.mark.parametrize("call", ["pwritev", "sync_all"])
def test_what_cannot_be_written_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A full disk, or one that fails: the file has what it had."""
    path = body_file.body_file(tmp_path, 7)
    append(path, 0, b"first")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(body_file if call == "sync_all" else os, call, full)
    with pytest.raises(OSError, match="space"):
        append(path, 4096, b"second", named=True)
    monkeypatch.undo()
    assert path.read_bytes().rstrip(b"\0") == b"first"


def test_a_write_that_is_cut_short_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes what there is space for, and says so only with the next call."""
    monkeypatch.setattr(os, "pwritev", lambda descriptor, pieces, at: os.pwrite(descriptor, pieces[0][:3], at))
    with pytest.raises(OSError, match="space"):
        append(body_file.body_file(tmp_path, 7), 0, b"first")
    assert end_of(body_file.body_path(tmp_path, 7)) == 0


def test_a_map_outlives_the_transaction_that_made_it(tmp_path: Path, body_maps: BodyMapsMade) -> None:
    """Until the file has grown past it."""
    path = body_file.body_file(tmp_path, 7)
    append(path, 0, b"first")
    maps = BodyMaps(str(tmp_path))
    assert [bytes(BodyReader(maps)(7, 0, 5)) for _ in range(3)] == [b"first"] * 3
    assert len(body_maps.made) == 1
    append(path, 4096, b"second", named=True)
    assert bytes(BodyReader(maps)(7, 4096, 6)) == bytes(BodyReader(maps)(7, 4096, 6)) == b"second"
    assert (len(body_maps.made), body_maps.alive()) == (2, 1)


def test_few_maps_outlive_a_transaction_and_none_that_may_be_removed_elsewhere(
    tmp_path: Path, body_maps: BodyMapsMade
) -> None:
    """Each holds a descriptor, and the space of a file that another process has removed."""
    for ledger_id in range(10):
        append(body_file.body_file(tmp_path, ledger_id), 0, b"%d" % ledger_id)
    maps = BodyMaps(str(tmp_path))
    assert [bytes(BodyReader(maps)(ledger_id, 0, 1)) for ledger_id in range(10)] == [b"%d" % n for n in range(10)]
    assert body_maps.alive() == body_file._MOST_KEPT
    maps.forget()
    assert bytes(BodyReader(BodyMaps(str(tmp_path), is_read_only=True))(3, 0, 1)) == b"3"
    assert body_maps.alive() == 0


def test_a_transaction_has_what_it_has_read_of_a_file_that_is_removed(tmp_path: Path, body_maps: BodyMapsMade) -> None:
    """It ends, and the space is given back; what begins then finds nothing."""
    append(body_file.body_file(tmp_path, 7), 0, b"first")
    maps = BodyMaps(str(tmp_path))
    read = BodyReader(maps)
    assert bytes(read(7, 0, 2)) == b"fi"
    maps.remove(7)
    assert bytes(read(7, 2, 3)) == b"rst"
    assert (bytes(BodyReader(maps)(7, 0, 5)), body_files(tmp_path)) == (b"", {})
    del read
    assert body_maps.alive() == 0
