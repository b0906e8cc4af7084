"""The pages of an LMDB data file read as bytes, without LMDB: is the tree whole, and is every page where it should be?

LMDB has no checksums and believes its pages: a flipped bit in one may hide keys, make it overwrite pages in use later,
or kill the process that reads them. Here every page is read with `pread` and held against what LMDB keeps beside it:
page numbers and kinds, node sizes, the order of keys, the counts of entries and pages of each tree, and that every
page is in one tree or in the list of free pages, and in one of them only. So a key that cannot be found any more is a
number that does not add up. What the values hold is not looked at: they carry checksums of their own.

Nothing here can kill a process or hang, whatever the file holds. Costs O(pages); of a long value its first page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from pyroaring import BitMap64

from ..errors import DamagedStore, NoPermission, ResourceShortage
from .lmdb_layout import PAGE_NUMBER, MetaPage, meta_in_force, metas_disagree, open_file, other_settings, page_count
from .page_tree import WHOLE, Tree
from .system_errors import explain

_MOST_PROBLEMS = 50


def find_problems(directory: Path, transaction: int | None = None) -> list[str] | None:
    """What is wrong with the pages of `directory`/data.mdb; at most about 50, an empty list for a whole file.

    transaction: of a read transaction that the caller holds meanwhile, so that what is in it is not overwritten; None
    where no process writes. The answer is None if that transaction's meta page is gone: begin another and try again.
    Raises DamagedStore when the file is missing or cannot be read at all; ResourceShortage, NoPermission.
    """
    try:
        with open_file(directory) as descriptor:
            return find_in(descriptor, *meta_in_force(descriptor), transaction)
    except OSError as error:
        told = explain(directory / "data.mdb", error)
        if isinstance(told, (NoPermission, ResourceShortage)):
            raise told from error
        raise DamagedStore(directory / "data.mdb", f"cannot be read: {error}") from error


def read_values(directory: Path) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of everything that can still be reached in a damaged file that no process has open; each key once.

    A value whose pages are cut off or not its own comes as far as it is there: its checksum tells.
    """
    with open_file(directory) as descriptor:
        page_bytes, metas = meta_in_force(descriptor)
        for meta in reversed(metas):
            tree = Tree(descriptor, page_bytes, page_count(descriptor, page_bytes) - 1, meta.main, integer_keys=False)
            seen: set[bytes] = set()
            for key, value in tree.items(long_bytes=WHOLE):
                if key not in seen:
                    seen.add(key)
                    yield key, value
            if seen:
                return


def find_in(
    descriptor: int,
    page_bytes: int,
    metas: list[MetaPage],
    transaction: int | None = None,
    *,
    rows: list[tuple[bytes, bytes]] | None = None,
    long_bytes: int = 0,
) -> list[str] | None:
    """As `find_problems`, of an open file whose meta pages were read (`meta_in_force`).

    rows: gets (key, value) of what the tree has, in order; of a long value the first `long_bytes`.
    """
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
    if (settings := other_settings(meta, page_bytes)) is not None:
        problems.append(settings)
    used = BitMap64([0, 1])
    pages_there = page_count(descriptor, page_bytes)
    free: list[int] = []
    for name, record, integer_keys in (("tree", meta.main, False), ("list of free pages", meta.free, True)):
        tree = Tree(descriptor, page_bytes, min(meta.last_page, pages_there - 1), record, integer_keys=integer_keys)
        for row in tree.items(long_bytes=WHOLE if integer_keys else long_bytes):
            if integer_keys:
                free += free_pages(row[1], problems)
            elif rows is not None:
                rows.append(row)
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
    numbers = [number for (number,) in PAGE_NUMBER.iter_unpack(value[: len(value) // 8 * 8])]
    if not numbers or numbers[0] != len(numbers) - 1:
        problems.append("list of free pages: a list is not as long as it says")
        return []
    if any(after >= before for before, after in itertools.pairwise(numbers[1:])):
        problems.append("list of free pages: a list is out of order")
    return numbers[1:]
