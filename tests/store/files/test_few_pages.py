"""A data file of few pages read without LMDB: the same rows as LMDB finds, or none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.files import few_pages
from duelog.store.files.few_pages import FewPages, read_few

SEED = 20261123
LONG = few_pages._LONG_BYTES


def make(path: Path, seed: int, rows: int) -> None:
    """A file of rows with short and long values, some of them removed."""
    source = random.Random(seed)
    with closing(Environment(path, name="e", create=True, durability="none")) as environment:

        def work(transaction: Transaction) -> None:
            for number in range(rows):
                value = source.randbytes(source.choice((0, 9, 300, 3_000, 30_000)))
                transaction.raw.put(b"%05d" % source.randrange(100_000) + bytes(number % 3), value)

        def remove(transaction: Transaction) -> None:
            with transaction.raw.cursor() as cursor:
                for key in [bytes(key) for key in cursor.iternext(values=False)][::4]:
                    transaction.raw.delete(key)

        environment.write(work)
        environment.write(remove)


def keys_to_look_for(rows: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Every key, and keys before, between and after them."""
    yield from (b"\0", b"99999\xff")
    for key, _ in rows:
        yield from (key, key + b"\0", key[:-1])


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_that_lmdb_finds(tmp_path: Path, seed: int) -> None:
    """By key, and from any key on or before it; of a long value as much as is read."""
    make(tmp_path / "e", SEED + seed, seed)
    few = read_few(tmp_path / "e")
    with closing(lmdb.open(str(tmp_path / "e"), readonly=True, lock=False)) as opened, opened.begin() as raw:
        rows = [(bytes(key), bytes(value)) for key, value in raw.cursor()]
        assert few is not None
        assert few.rows == [(key, value if len(value) < 2_000 else value[:LONG]) for key, value in rows]
        for key in keys_to_look_for(rows):
            expected = raw.get(key)
            assert few.get(key) == (expected if expected is None or len(expected) < 2_000 else expected[:LONG])
            ours, theirs = few.cursor(), raw.cursor()
            assert ours.set_range(key) == theirs.set_range(key)
            if theirs.key():
                assert ours.key() == theirs.key()
            assert (ours.prev() if ours.set_range(key) else ours.last()) == (
                theirs.prev() if theirs.set_range(key) else theirs.last()
            )
            if theirs.key():
                assert (ours.key(), ours.value()) == (theirs.key(), few.get(theirs.key()))


def test_a_file_of_many_pages_or_none_is_left_to_lmdb(tmp_path: Path) -> None:
    """Which is faster there, and says what is wrong."""
    make(tmp_path / "many", SEED, 400)
    assert read_few(tmp_path / "many") is None
    assert read_few(tmp_path / "missing") is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "data.mdb").touch()
    assert read_few(tmp_path / "empty") is None


def test_what_does_not_hold_together_is_left_to_lmdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a bit of a page in use is flipped: what is found is every row, or nothing."""
    make(tmp_path / "e", SEED + 3, 12)
    whole = read_few(tmp_path / "e")
    assert whole is not None
    file = tmp_path / "e" / "data.mdb"
    content = file.read_bytes()
    source, refused = random.Random(SEED), 0
    for _ in range(600):
        at = source.randrange(len(content) // 4096) * 4096 + source.randrange(120)
        damaged = bytearray(content)
        damaged[at] ^= 1 << source.randrange(8)
        file.write_bytes(damaged)
        few = read_few(tmp_path / "e")
        refused += few is None
        if few is not None:
            assert [key for key, _ in few.rows] == [key for key, _ in whole.rows]
    assert refused > 20
    file.write_bytes(content)
    monkeypatch.setattr(few_pages, "FEW_PAGES", 0)
    assert read_few(tmp_path / "e") is None


def test_a_file_without_rows_has_none(tmp_path: Path) -> None:
    """A cursor finds nothing in it."""
    few = FewPages([])
    assert few.get(b"a") is None
    cursor = few.cursor()
    assert not cursor.set_range(b"a")
    assert not cursor.last()
