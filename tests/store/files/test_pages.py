"""The walk over a file's pages: whole files pass, a flipped bit in a branch page never does, few pages are all rows."""

import os
import random
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import lmdb
import pytest

from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.errors import DamagedStore
from duelog.store.files import pages
from duelog.store.files.pages import PageWalk, read_few, refuse_broken
from tests.conftest import present
from tests.proof import length

PAGE = 4096
SEED = 20261122
LONG = pages._LONG_BYTES


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three levels, with short and long keys and values, and pages that were freed."""
    path = tmp_path_factory.mktemp("scan") / "wide"
    source = random.Random(SEED)
    with closing(Environment(path, name="wide", durability="none", create=True)) as environment:
        for batch in range(12):

            def work(transaction: LmdbTransaction, batch: int = batch) -> None:
                for number in range(700):
                    key = source.randbytes(4) + b"%d" % number + bytes(source.choice((0, 3, 40, 200)))
                    transaction.raw.put(key, source.randbytes(source.choice((0, 20, 300, 2_500, 9_000 * (batch == 0)))))

            environment.commit(work)

        def remove(transaction: LmdbTransaction) -> None:
            with transaction.raw.cursor() as cursor:
                keys = [bytes(key) for key in cursor.iternext(values=False)]
            for key in keys[::3]:
                transaction.raw.delete(key)

        environment.commit(remove)
    return path


@contextmanager
def flipped(wide: Path, at: int, bit: int) -> Iterator[None]:
    """Have one bit of the file flipped inside the block."""
    with (wide / "data.mdb").open("r+b", buffering=0) as file:
        before = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([before[0] ^ 1 << bit]), at)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), before, at)


def tree_pages(wide: Path, kind: int) -> list[int]:
    """Numbers of the branch (1) or leaf (2) pages that are in use."""
    content = (wide / "data.mdb").read_bytes()
    with pages.open_file(wide) as descriptor:
        _, metas = pages.meta_in_force(descriptor)
        walk = PageWalk(descriptor, PAGE, len(content) // PAGE)
        assert len(list(walk.rows(metas[-1].main))) == metas[-1].main.entries
    kinds = {number: struct.unpack_from("<QHH", content, number * PAGE) for number in walk.used}
    return [number for number, (own, _, found) in kinds.items() if own == number and found == kind]


def places(wide: Path, number: int) -> list[int]:
    """Bytes of a page's header, of its pointers and of the headers of its nodes; the two that LMDB does not use not."""
    content = (wide / "data.mdb").read_bytes()[number * PAGE : (number + 1) * PAGE]
    lower = struct.unpack_from("<H", content, 12)[0]
    nodes = struct.unpack_from(f"<{(lower - 16) // 2}H", content, 16)
    found = [*range(8), *range(10, lower), *(place + at for place in nodes for at in range(8))]
    return [number * PAGE + at for at in found]


def test_a_whole_file_passes(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it is read; and the harness has something to flip."""
    assert pages.find_problems(wide) == []
    for most_leaves, most_headers in ((256, 16_384), (10, 10), (10_000, 10_000)):
        monkeypatch.setattr(pages, "MOST_LEAVES", most_leaves)
        monkeypatch.setattr(pages, "MOST_HEADERS", most_headers)
        refuse_broken(wide)
        refuse_broken(wide, every_header=True)
    monkeypatch.undo()
    assert len(tree_pages(wide, 1)) > 3
    assert len(tree_pages(wide, 2)) > 300 > pages.MOST_LEAVES


def test_an_empty_file_and_one_of_a_single_page_pass(tmp_path: Path) -> None:
    """A new environment has no root page."""
    with closing(Environment(tmp_path / "new", name="new", create=True)) as environment:
        refuse_broken(tmp_path / "new")
        environment.commit(lambda transaction: transaction.raw.put(b"key", b"value"))
        refuse_broken(tmp_path / "new", every_header=True)


def test_every_flipped_bit_in_what_a_branch_page_says_is_refused(wide: Path) -> None:
    """Numbers, kinds, bounds, pointers to nodes and to pages, in however large a file."""
    source = random.Random(SEED)
    branches = tree_pages(wide, 1)
    for _ in range(150):
        number = source.choice(branches)
        at, bit = source.choice(places(wide, number)), source.randrange(8)
        with flipped(wide, at, bit), pytest.raises(DamagedStore, match="do not hold together"):
            refuse_broken(wide)


@pytest.mark.series
def test_every_flipped_bit_in_what_a_leaf_page_says_is_refused_where_all_are_read(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that change nothing that is read, as `check` sees it, too."""
    monkeypatch.setattr(pages, "MOST_LEAVES", 10_000)
    source = random.Random(SEED)
    leaves = tree_pages(wide, 2)
    refused, rounds = 0, length("DUELOG_LEAVES", 20, 80)
    for _ in range(rounds):
        number = source.choice(leaves)
        at, bit = source.choice(places(wide, number)), source.randrange(8)
        with flipped(wide, at, bit):
            try:
                refuse_broken(wide)
            except DamagedStore:
                refused += 1
            else:
                assert pages.find_problems(wide) == [], f"bit {bit} of byte {at}"
    assert refused > rounds * 7 // 8


def test_a_page_of_another_time_is_refused(wide: Path, tmp_path: Path) -> None:
    """A branch page that leads to a page that was freed: whole in itself, with keys of the right kind."""
    content = bytearray((wide / "data.mdb").read_bytes())
    in_use = {*tree_pages(wide, 1), *tree_pages(wide, 2)}
    given_up = [
        number
        for number in range(2, len(content) // PAGE)
        if number not in in_use and struct.unpack_from("<QHH", content, number * PAGE)[::2] == (number, 2)
    ]
    assert given_up
    branch = max(tree_pages(wide, 1))
    (place,) = struct.unpack_from("<H", content, branch * PAGE + 16)
    for number in given_up[:20]:
        struct.pack_into("<HHH", content, branch * PAGE + place, number & 0xFFFF, number >> 16, 0)
        (tmp_path / "data.mdb").write_bytes(content)
        with pytest.raises(DamagedStore, match="do not hold together"):
            refuse_broken(tmp_path)


def test_a_flipped_bit_in_the_number_of_a_transaction_is_refused(wide: Path) -> None:
    """It would bring back what was there before the newest commit, or have the next one write over that.

    But for the bit that makes two less of it: what is left then is a whole file without its last commit.
    """
    for page in (0, 1):
        for bit in (0, *range(2, 40, 3)):
            at = page * PAGE + 144 + bit // 8
            with flipped(wide, at, bit % 8), pytest.raises(DamagedStore, match="transactions"):
                refuse_broken(wide)


def test_a_flipped_bit_in_the_flags_of_a_tree_is_refused(wide: Path) -> None:
    """In the meta page in force. LMDB ended the process over a list of free pages that it took for another kind."""
    with pages.open_file(wide) as descriptor:
        _, metas = pages.meta_in_force(descriptor)
    for tree in (40, 88):  # where those of the free pages, and of the records, begin
        for bit in range(48):  # the size of a page, flags
            with flipped(wide, metas[-1].number * PAGE + tree + bit // 8, bit % 8):
                with pytest.raises(DamagedStore, match="settings"):
                    refuse_broken(wide)
                if not bit % 8:
                    assert any("settings" in problem for problem in pages.find_problems(wide) or ())


def test_an_entry_that_a_leaf_page_hides_is_missing_in_the_count(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of a page's nodes is one too small: the last of them is gone, and no other page knows."""
    middle = sorted(tree_pages(wide, 2))[100]
    content = bytearray((wide / "data.mdb").read_bytes())
    (lower,) = struct.unpack_from("<H", content, middle * PAGE + 12)
    struct.pack_into("<H", content, middle * PAGE + 12, lower - 2)
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(DamagedStore, match="5599 entries instead of 5600"):
        refuse_broken(tmp_path)
    monkeypatch.setattr(pages, "MOST_HEADERS", 10)
    refuse_broken(tmp_path)
    with pytest.raises(DamagedStore, match="5599 entries instead of 5600"):
        refuse_broken(tmp_path, every_header=True)


def make(path: Path, seed: int, rows: int) -> None:
    """A file of rows with short and long values, some of them removed."""
    source = random.Random(seed)
    with closing(Environment(path, name="e", create=True, durability="none")) as environment:

        def work(transaction: LmdbTransaction) -> None:
            for number in range(rows):
                value = source.randbytes(source.choice((0, 9, 300, 3_000, 30_000)))
                transaction.raw.put(b"%05d" % source.randrange(100_000) + bytes(number % 3), value)

        def remove(transaction: LmdbTransaction) -> None:
            with transaction.raw.cursor() as cursor:
                for key in [bytes(key) for key in cursor.iternext(values=False)][::4]:
                    transaction.raw.delete(key)

        environment.commit(work)
        environment.commit(remove)


def keys_to_look_for(rows: list[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """Every key, and keys before, between and after them."""
    yield from (b"\0", b"99999\xff")
    for key, _ in rows:
        yield from (key, key + b"\0", key[:-1])


@pytest.mark.parametrize("rows", range(0, 20, 3))
def test_rows_are_those_that_lmdb_finds(tmp_path: Path, rows: int) -> None:
    """By key, and from any key on or before it; of a long value as much as is read."""
    make(tmp_path / "e", SEED + rows, rows)
    few = read_few(tmp_path / "e")
    with closing(lmdb.open(str(tmp_path / "e"), readonly=True, lock=False)) as opened, opened.begin() as raw:
        found = [(bytes(key), bytes(value)) for key, value in raw.cursor()]
        assert few is not None
        assert few.rows == [(key, value if len(value) < 2_000 else value[:LONG]) for key, value in found]
        for key in keys_to_look_for(found):
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
    whole = present(read_few(tmp_path / "e"))
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
    monkeypatch.setattr(pages, "FEW_PAGES", 0)
    assert read_few(tmp_path / "e") is None
