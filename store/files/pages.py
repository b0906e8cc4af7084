"""The pages of an LMDB data file read as bytes, without LMDB: is the tree whole, and is every page where it should be?

LMDB has no checksums and believes its pages: a flipped bit in one may hide keys, make it overwrite pages in use later,
or kill the process that reads them. Here every page is read with `pread` and held against what LMDB keeps beside it:
page numbers and kinds, node sizes, the order of keys, the counts of entries and pages of each tree, and that every
page is in one tree or in the list of free pages, and in one of them only. So a key that cannot be found any more is a
number that does not add up. What the values hold is not looked at: they carry checksums of their own.

Nothing here can kill a process or hang, whatever the file holds. Costs O(pages); of a long value its first page.

Source: the layout of LMDB 0.9 (MDB_page, MDB_node, MDB_meta, MDB_db in mdb.c).
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pyroaring import BitMap64

from ..errors import DamagedStore, NoPermission, ResourceShortage
from .page_tree import Tree, TreeRecord
from .system_errors import explain

_KIND = struct.Struct("<10xH")
_META = struct.Struct("<16xII16x")  # magic, version; then the two trees
_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_END = struct.Struct("<QQ")  # last page, transaction
_U64 = struct.Struct("<Q")

_TREES_AT = _META.size
_END_AT = _TREES_AT + 2 * _TREE.size
_HEAD_BYTES = _END_AT + _END.size

_MAGIC = 0xBEEFC0DE
_META_PAGE = 8
_INTEGER_KEYS = 8
_MOST_PROBLEMS = 50


class MetaPage(NamedTuple):
    """One of the two meta pages; the one of the later transaction is in force."""

    number: int
    free: TreeRecord
    main: TreeRecord
    last_page: int
    transaction: int


@contextmanager
def open_file(directory: Path) -> Iterator[int]:
    """A descriptor of `directory`/data.mdb.

    Also for a file that this process has open: LMDB's locks, which go with any descriptor, lie on lock.mdb.
    """
    descriptor = os.open(directory / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_metas(descriptor: int, page_bytes: int) -> list[MetaPage]:
    """The meta pages that are valid in themselves, the one in force last."""
    found = []
    for number in (0, 1):
        page = os.pread(descriptor, _HEAD_BYTES, number * page_bytes)
        if len(page) < _HEAD_BYTES:
            continue
        (kind,) = _KIND.unpack_from(page)
        magic, version = _META.unpack_from(page)
        if magic != _MAGIC or version != 1 or not kind & _META_PAGE:
            continue
        free = TreeRecord(*_TREE.unpack_from(page, _TREES_AT))
        main = TreeRecord(*_TREE.unpack_from(page, _TREES_AT + _TREE.size))
        found.append(MetaPage(number, free, main, *_END.unpack_from(page, _END_AT)))
    return sorted(found, key=lambda meta: meta.transaction)


def metas_disagree(metas: list[MetaPage]) -> str | None:
    """Why the two meta pages cannot be those of the last two commits; None: they can.

    Transaction n writes meta page n modulo 2, so the pages are of n and n - 1, and a flipped bit in a number, which
    would bring an older state back or let the next commit overwrite the newest, is seen. One flip is not: the one that
    makes n into n - 2, which leaves what the commit before left, whole. After a power cut with durability "none"
    the pages may be further apart; then commits are lost indeed.
    """
    if len(metas) < 2:
        return "a meta page cannot be read"
    older, newer = metas
    said = f"the meta pages are of transactions {older.transaction} and {newer.transaction}"
    if newer.transaction and newer.number != newer.transaction & 1:
        return f"{said}, and lie the wrong way"
    if newer.transaction and newer.transaction - older.transaction != 1:
        return f"{said}: a commit is lost, or one of them is damaged"
    return None


def find_problems(directory: Path, transaction: int | None = None) -> list[str] | None:
    """What is wrong with the pages of `directory`/data.mdb; at most about 50, an empty list for a whole file.

    transaction: of a read transaction that the caller holds meanwhile, so that what is in it is not overwritten; None
    where nobody writes. The answer is None if that transaction's meta page is gone: begin another and try again.
    Raises DamagedStore when the file is missing or cannot be read at all; ResourceShortage, NoPermission.
    """
    try:
        with open_file(directory) as descriptor:
            return _find(descriptor, transaction)
    except OSError as error:
        told = explain(directory / "data.mdb", error)
        if isinstance(told, (NoPermission, ResourceShortage)):
            raise told from error
        raise DamagedStore(directory / "data.mdb", f"cannot be read: {error}") from error


def read_values(directory: Path) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of everything that can still be reached in a damaged file that nobody has open; each key once.

    A value whose pages are cut off or not its own comes as far as it is there: its checksum tells.
    """
    with open_file(directory) as descriptor:
        page_bytes = _page_bytes(descriptor)
        for meta in reversed(read_metas(descriptor, page_bytes)):
            tree = Tree(descriptor, page_bytes, _pages(descriptor, page_bytes) - 1, meta.main, integer_keys=False)
            seen: set[bytes] = set()
            for key, value in tree.items(values=True):
                if key not in seen:
                    seen.add(key)
                    yield key, value
            if seen:
                return


def _page_bytes(descriptor: int) -> int:
    """The size of a page, from either meta page."""
    for candidate in (4096, 8192, 16384, 32768, 65536):
        for meta in read_metas(descriptor, candidate):
            if meta.free.pad == candidate:
                return candidate
    return 4096


def meta_in_force(descriptor: int) -> tuple[int, list[MetaPage]]:
    """The size of a page, and the valid meta pages as of one instant, the one in force last."""
    page_bytes = _page_bytes(descriptor)
    return page_bytes, _metas_at_once(descriptor, page_bytes)


def _metas_at_once(descriptor: int, page_bytes: int) -> list[MetaPage]:
    """Both meta pages as of one instant, though another process commits between two reads."""
    found = read_metas(descriptor, page_bytes)
    while (again := read_metas(descriptor, page_bytes)) != found:
        found = again
    return found


def _pages(descriptor: int, page_bytes: int) -> int:
    return -(-os.fstat(descriptor).st_size // page_bytes)


def _find(descriptor: int, transaction: int | None) -> list[str] | None:
    page_bytes = _page_bytes(descriptor)
    metas = _metas_at_once(descriptor, page_bytes)
    if not metas:
        return ["no valid meta page"]
    meta = metas[-1]
    problems: list[str] = []
    if transaction is not None:
        chosen = [each for each in metas if each.transaction == transaction]
        if not chosen:
            return None
        meta = chosen[0]
    if (disagreement := metas_disagree(metas)) is not None:
        problems.append(disagreement)
    if meta.free.pad != page_bytes or not meta.free.flags & _INTEGER_KEYS or meta.main.flags or meta.main.pad:
        problems.append("the settings in the meta page are not those of a store")
    used = BitMap64([0, 1])
    pages_there = _pages(descriptor, page_bytes)
    free: list[int] = []
    for name, record, integer_keys in (("tree", meta.main, False), ("list of free pages", meta.free, True)):
        tree = Tree(descriptor, page_bytes, min(meta.last_page, pages_there - 1), record, integer_keys=integer_keys)
        for _, value in tree.items(values=integer_keys):
            if integer_keys:
                free += free_pages(value, problems)
        problems += [f"{name}: {problem}" for problem in tree.problems[:_MOST_PROBLEMS]]
        if not used.isdisjoint(tree.pages):
            problems.append(f"{name}: a page of it is in use elsewhere: {min(used & tree.pages)}")
        used |= tree.pages
    for number in free:
        if number in used:
            problems.append(f"page {number} counts as free, and is in use or free already")
        elif number > meta.last_page:
            problems.append(f"page {number} counts as free and lies outside the file")
        used.add(number)
    missing = meta.last_page + 1 - len(used)
    if missing > 0 and not problems:
        problems.append(f"{missing} pages are neither in use nor free")
    return problems[:_MOST_PROBLEMS]


def free_pages(value: bytes, problems: list[str]) -> list[int]:
    """The pages that a record of the list of free pages names; what is wrong with it is added to `problems`."""
    numbers = [number for (number,) in _U64.iter_unpack(value[: len(value) // 8 * 8])]
    if not numbers or numbers[0] != len(numbers) - 1:
        problems.append("list of free pages: a list is not as long as it says")
        return []
    if any(after >= before for before, after in itertools.pairwise(numbers[1:])):
        problems.append("list of free pages: a list is out of order")
    return numbers[1:]
