"""The look at a file's pages before it is opened: whole files pass, and a flipped bit in a branch page never does."""

from __future__ import annotations

import random
import shutil
import struct
from contextlib import closing
from pathlib import Path

import pytest

from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import DamagedStore
from duelog.store.files import lmdb_layout, page_scan, pages
from duelog.store.files.page_scan import refuse_broken
from duelog.store.files.page_tree import Tree

PAGE = 4096
SEED = 20261122


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three levels, with short and long keys and values, and pages that were freed."""
    path = tmp_path_factory.mktemp("scan") / "wide"
    source = random.Random(SEED)
    with closing(Environment(path, name="wide", durability="none", create=True)) as environment:
        for batch in range(12):

            def work(transaction: Transaction, batch: int = batch) -> None:
                for number in range(700):
                    key = source.randbytes(4) + b"%d" % number + bytes(source.choice((0, 3, 40, 200)))
                    transaction.raw.put(key, source.randbytes(source.choice((0, 20, 300, 2_500, 9_000 * (batch == 0)))))

            environment.write(work)

        def remove(transaction: Transaction) -> None:
            with transaction.raw.cursor() as cursor:
                keys = [bytes(key) for key in cursor.iternext(values=False)]
            for key in keys[::3]:
                transaction.raw.delete(key)

        environment.write(remove)
    return path


def flipped(wide: Path, target: Path, at: int, bit: int) -> Path:
    """A copy with one bit flipped."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    content = bytearray((wide / "data.mdb").read_bytes())
    content[at] ^= 1 << bit
    (target / "data.mdb").write_bytes(content)
    return target


def tree_pages(wide: Path, kind: int) -> list[int]:
    """Numbers of the branch (1) or leaf (2) pages that are in use."""
    content = (wide / "data.mdb").read_bytes()
    with lmdb_layout.open_file(wide) as descriptor:
        _, metas = lmdb_layout.meta_in_force(descriptor)
        tree = Tree(descriptor, PAGE, len(content) // PAGE, metas[-1].main, integer_keys=False)
        for _ in tree.items(long_bytes=0):
            pass
    kinds = {number: struct.unpack_from("<QHH", content, number * PAGE) for number in tree.pages}
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
        monkeypatch.setattr(page_scan, "MOST_LEAVES", most_leaves)
        monkeypatch.setattr(page_scan, "MOST_HEADERS", most_headers)
        refuse_broken(wide)
        refuse_broken(wide, every_header=True)
    monkeypatch.undo()
    assert len(tree_pages(wide, 1)) > 3
    assert len(tree_pages(wide, 2)) > 300 > page_scan.MOST_LEAVES


def test_an_empty_file_and_one_of_a_single_page_pass(tmp_path: Path) -> None:
    """A new environment has no root page."""
    with closing(Environment(tmp_path / "new", name="new", create=True)) as environment:
        refuse_broken(tmp_path / "new")
        environment.write(lambda transaction: transaction.raw.put(b"key", b"value"))
        refuse_broken(tmp_path / "new", every_header=True)


def test_every_flipped_bit_in_what_a_branch_page_says_is_refused(wide: Path, tmp_path: Path) -> None:
    """Numbers, kinds, bounds, pointers to nodes and to pages, in however large a file."""
    source = random.Random(SEED)
    branches = tree_pages(wide, 1)
    for _ in range(150):
        number = source.choice(branches)
        at, bit = source.choice(places(wide, number)), source.randrange(8)
        with pytest.raises(DamagedStore, match="do not hold together"):
            refuse_broken(flipped(wide, tmp_path / "copy", at, bit))


def test_every_flipped_bit_in_what_a_leaf_page_says_is_refused_where_all_are_read(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for those that change nothing that is read, as `check` sees it, too."""
    monkeypatch.setattr(page_scan, "MOST_LEAVES", 10_000)
    source = random.Random(SEED)
    leaves = tree_pages(wide, 2)
    refused = 0
    for _ in range(80):
        number = source.choice(leaves)
        at, bit = source.choice(places(wide, number)), source.randrange(8)
        copy = flipped(wide, tmp_path / "copy", at, bit)
        try:
            refuse_broken(copy)
        except DamagedStore:
            refused += 1
        else:
            assert pages.find_problems(copy) == [], f"bit {bit} of byte {at}"
    assert refused > 70


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


def test_a_flipped_bit_in_the_number_of_a_transaction_is_refused(wide: Path, tmp_path: Path) -> None:
    """It would bring back what was there before the newest commit, or have the next one write over that.

    But for the bit that makes two less of it: what is left then is a whole file without its last commit.
    """
    for page in (0, 1):
        for bit in (0, *range(2, 40, 3)):
            copy = flipped(wide, tmp_path / "copy", page * PAGE + 144 + bit // 8, bit % 8)
            with pytest.raises(DamagedStore, match="transactions"):
                refuse_broken(copy)


def test_a_flipped_bit_in_the_flags_of_a_tree_is_refused(wide: Path, tmp_path: Path) -> None:
    """In the meta page in force. LMDB ended the process over a list of free pages that it took for another kind."""
    with lmdb_layout.open_file(wide) as descriptor:
        _, metas = lmdb_layout.meta_in_force(descriptor)
    for tree in (40, 88):  # where those of the free pages, and of the records, begin
        for bit in range(48):  # the size of a page, flags
            copy = flipped(wide, tmp_path / "copy", metas[-1].number * PAGE + tree + bit // 8, bit % 8)
            with pytest.raises(DamagedStore, match="settings"):
                refuse_broken(copy)
            assert any("settings" in problem for problem in pages.find_problems(copy) or ())


def test_an_entry_that_a_leaf_page_hides_is_missing_in_the_count(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of a page's nodes is one too small: the last of them is gone, and no other page knows."""
    middle = sorted(tree_pages(wide, 2))[100]
    content = bytearray((wide / "data.mdb").read_bytes())
    (lower,) = struct.unpack_from("<H", content, middle * PAGE + 12)
    struct.pack_into("<H", content, middle * PAGE + 12, lower - 2)
    (tmp_path / "data.mdb").write_bytes(content)
    with pytest.raises(DamagedStore, match="5599 entries are found, 5600 were counted"):
        refuse_broken(tmp_path)
    monkeypatch.setattr(page_scan, "MOST_HEADERS", 10)
    refuse_broken(tmp_path)
    with pytest.raises(DamagedStore, match="5599 entries are found, 5600 were counted"):
        refuse_broken(tmp_path, every_header=True)
