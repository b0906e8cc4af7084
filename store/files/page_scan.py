"""A look at the trees of an LMDB data file before it is opened: do branch and leaf pages hold together?

LMDB believes its pages. One flipped bit in a branch page sends it to a page of another time, or past entries that are
there: whole logs are gone, without an error, until the partition is deleted as one in which nothing is left. One in the
number of a transaction brings back what the commit before left. So the meta pages are compared, and the two trees are
read as bytes, level by level, and held against what the meta page says of them: page numbers and kinds, nodes that fill
their page without a gap, keys in order and within the bounds that the page above gives, no page twice nor in the list
of free pages, as many pages and entries as were counted. What values hold is not read, nor the pages of long ones.

What `pages.py` does for `check`, page by page and with all that it finds, is done here for all pages of a level at
once, and the first problem ends it: some us a page. Of a file of more than `MOST_LEAVES` leaf pages only the branch
pages and the headers of leaf pages are read, of one of more than `MOST_HEADERS` not these either, unless asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import DamagedStore
from .few_pages import FEW_PAGES
from .lmdb_layout import (
    BRANCH,
    LEAF,
    LONG_VALUE,
    NO_PAGE,
    NODE_HEADER,
    PAGE_HEADER,
    PAGE_HEADERS,
    TreeRecord,
    meta_in_force,
    metas_disagree,
    open_file,
    other_settings,
    page_count,
)  # fmt: skip
from .page_tree import WHOLE, Tree
from .pages import find_in, free_pages
from .system_errors import explained

MOST_LEAVES = 256
"""Leaf pages that are read at every first opening: 1 MiB, some 10 ms where they are in the page cache."""

MOST_HEADERS = 16_384
"""Leaf pages of which at least the headers are read: a us each, where they are in the page cache."""

_PAGES_AT_ONCE = 256
_KEY_BYTES = 32
"""Of longer keys the beginning is compared."""
_HEADER_BYTES = PAGE_HEADER.size
_NODE_BYTES = NODE_HEADER.size
_MOST_FREE_LISTS = 1_000
"""Commits whose free pages are held against those in use."""

_Ints = npt.NDArray[np.int64]
_Keys = npt.NDArray[np.bytes_]


class _Broken(Exception):
    """Something does not hold together."""


def refuse_broken(directory: Path, *, every_header: bool = False) -> None:
    """Raise DamagedStore where the pages of `directory`/data.mdb do not hold together.

    every_header: count the entries of all leaf pages, however many there are. Beside a writing process: what is found
    counts only if nothing was committed meanwhile. A file without a meta page is not looked at. Also raises
    ResourceShortage.
    """
    problem: str | None = None
    before: object = None
    with explained(directory), open_file(directory) as descriptor:
        while problem is None or meta_in_force(descriptor) != before:
            before = page_bytes, metas = meta_in_force(descriptor)
            if not metas:
                return  # opening it says so
            try:
                if (found := metas_disagree(metas) or other_settings(metas[-1], page_bytes)) is not None:
                    raise _Broken(found)
                if metas[-1].main.branch_pages + metas[-1].main.leaf_pages <= FEW_PAGES:
                    for problem in find_in(descriptor, page_bytes, metas) or ():
                        raise _Broken(problem)
                    return
                _Scan(descriptor, page_bytes, metas[-1].last_page, every_header).run(metas[-1].main, metas[-1].free)
                return
            except _Broken as error:
                problem = str(error)
    raise DamagedStore(directory / "data.mdb", f"its pages do not hold together: {problem}")


class _Level:
    """Pages of one level of a tree, and the bounds that the level above gives their keys."""

    def __init__(self, numbers: _Ints, low: _Keys, high: _Keys, bounded: npt.NDArray[np.bool_]) -> None:
        self.numbers = numbers
        self.low = low
        self.high = high
        self.bounded = bounded
        """Whether `high` is one."""

    def pieces(self) -> Iterator[_Level]:
        """A bounded number of pages at a time."""
        for at in range(0, len(self.numbers), _PAGES_AT_ONCE):
            yield self.part(slice(at, at + _PAGES_AT_ONCE))

    def part(self, which: slice | _Ints) -> _Level:
        """Some of the pages."""
        return _Level(self.numbers[which], self.low[which], self.high[which], self.bounded[which])


class _Scan:
    def __init__(self, descriptor: int, page_bytes: int, last_page: int, every_header: bool) -> None:
        self._descriptor = descriptor
        self._page_bytes = page_bytes
        self._pages_there = min(last_page + 1, page_count(descriptor, page_bytes))
        self._every_header = every_header
        self._used: list[tuple[_Ints, _Ints]] = []
        """First pages, and how many of them follow each other."""

    def run(self, main: TreeRecord, free: TreeRecord) -> None:
        """Raises _Broken."""
        self._tree(main)
        begins = np.concatenate([np.empty(0, np.int64), *(begin for begin, _ in self._used)])
        counts = np.concatenate([np.empty(0, np.int64), *(count for _, count in self._used)])
        order = np.argsort(begins)
        begins, ends = begins[order], (begins + counts)[order]
        overlap = np.flatnonzero(begins[1:] < ends[:-1])
        if len(overlap):
            raise _Broken(f"page {begins[overlap[0] + 1]} hangs in the tree twice")
        if free.entries <= _MOST_FREE_LISTS:
            self._free(free, begins, ends)

    def _tree(self, record: TreeRecord) -> None:
        if record.root == NO_PAGE:
            if record.entries or record.depth:
                raise _Broken(f"there is no root, and {record.entries} entries")
            return
        nothing = np.zeros(1, dtype=f"S{_KEY_BYTES}")
        level = _Level(np.array([record.root], dtype=np.uint64).astype(np.int64), nothing, nothing, np.zeros(1, bool))
        branches = leaves = entries = 0
        for depth in range(1, record.depth + 1):
            self._claim(level.numbers, np.ones(len(level.numbers), np.int64))
            if depth < record.depth:
                branches += len(level.numbers)
                below = [self._branches(piece) for piece in level.pieces()]
                level = _Level(*(np.concatenate([getattr(each, name) for each in below]) for name in _FIELDS))
                if len(level.numbers) > max(record.leaf_pages, record.branch_pages):
                    raise _Broken(f"{len(level.numbers)} pages on level {depth + 1}")
                continue
            leaves = len(level.numbers)
            if leaves <= MOST_LEAVES:
                entries = sum(self._leaves(piece) for piece in level.pieces())
            elif self._every_header or leaves <= MOST_HEADERS:
                counts = _node_counts(self._read(level, _HEADER_BYTES), self._page_bytes, level, LEAF)
                entries = int(counts.sum())
            else:
                self._leaves(level.part(np.array([0, leaves - 1])))
                entries = record.entries
            if entries != record.entries:
                raise _Broken(f"{entries} entries are found, {record.entries} were counted")
        if (branches, leaves) != (record.branch_pages, record.leaf_pages):
            said = f"{record.branch_pages} and {record.leaf_pages} were counted"
            raise _Broken(f"{branches} branch pages and {leaves} leaf pages are found, {said}")

    def _claim(self, begins: _Ints, counts: _Ints) -> None:
        outside = (begins < 2) | (begins + counts > self._pages_there)
        if outside.any():
            raise _Broken(f"page {begins[outside][0]} lies outside the file")
        self._used.append((begins, counts))

    def _branches(self, level: _Level) -> _Level:
        nodes = self._nodes(level, BRANCH)
        children = nodes.words(0) | nodes.words(1) << 16 | nodes.words(2) << 32
        nodes.require_tiled(nodes.key_bytes + _NODE_BYTES)
        keys = nodes.keys.copy()
        first = nodes.at == 0
        keys[first] = level.low[nodes.page[first]]  # the first key of a branch page is implied
        last = np.append(first[1:], True)
        high = np.append(keys[1:], keys[:1])
        high[last] = level.high[nodes.page[last]]
        bounded = np.where(last, level.bounded[nodes.page], True)
        return _Level(children, keys, high, bounded)

    def _leaves(self, level: _Level) -> int:
        nodes = self._nodes(level, LEAF)
        size, flags = nodes.words(0) | nodes.words(1) << 16, nodes.words(2)
        if (flags & ~LONG_VALUE).any():
            raise _Broken("a leaf page has a node of no kind")
        long = flags == LONG_VALUE
        nodes.require_tiled(_NODE_BYTES + nodes.key_bytes + np.where(long, 8, size))
        if long.any():
            begins = nodes.long_at(long)
            self._claim(begins, (size[long] + _HEADER_BYTES - 1) // self._page_bytes + 1)
        return len(nodes.page)

    def _nodes(self, level: _Level, kind: int) -> _Nodes:
        return _Nodes(self._read(level, self._page_bytes), self._page_bytes, level, kind)

    def _read(self, level: _Level, size: int) -> npt.NDArray[np.uint8]:
        """The first bytes of each page of a level."""
        found = b"".join(os.pread(self._descriptor, size, at * self._page_bytes) for at in level.numbers.tolist())
        if len(found) != len(level.numbers) * size:
            raise _Broken("the file ends within a page")
        return np.frombuffer(found, np.uint8).reshape(-1, size)

    def _free(self, free: TreeRecord, begins: _Ints, ends: _Ints) -> None:
        tree = Tree(self._descriptor, self._page_bytes, self._pages_there - 1, free, integer_keys=True)
        problems: list[str] = []
        listed = [free_pages(value, problems) for _, value in tree.items(long_bytes=WHOLE)]
        problems += tree.problems
        if problems:
            raise _Broken(f"list of free pages: {problems[0]}")
        numbers = np.array([number for each in listed for number in each] + list(tree.pages), dtype=np.int64)
        if len(np.unique(numbers)) != len(numbers):
            raise _Broken("list of free pages: a page is in it twice")
        if len(begins) and len(numbers):
            at = np.searchsorted(begins, numbers, side="right") - 1
            taken = (at >= 0) & (numbers < ends[np.maximum(at, 0)])
            if taken.any():
                raise _Broken(f"page {numbers[taken][0]} is in use, and counts as free")


_FIELDS = ("numbers", "low", "high", "bounded")


def _heads(pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.void]:
    """The header of each page, by the names of its fields."""
    heads: npt.NDArray[np.void] = np.ascontiguousarray(pages[:, :_HEADER_BYTES]).view(PAGE_HEADERS)[:, 0]
    return heads


def _node_counts(pages: npt.NDArray[np.uint8], page_bytes: int, level: _Level, kind: int) -> _Ints:
    """How many nodes each page has, by headers that are what they should be. Raises _Broken."""
    heads = _heads(pages)
    lower, upper = heads["lower"].astype(np.int64), heads["upper"].astype(np.int64)
    bad = (heads["number"] != level.numbers.astype(np.uint64)) | (heads["kind"] != kind)
    bad |= (lower <= _HEADER_BYTES) | (lower % 2 == 1) | (lower > upper) | (upper > page_bytes) | (upper % 2 == 1)
    if bad.any():
        raise _Broken(f"page {level.numbers[bad][0]} is not what it should be")
    counts: _Ints = (lower - _HEADER_BYTES) // 2
    return counts


class _Nodes:
    """The nodes of some pages, in order. Raises _Broken for a page that is not what it should be."""

    def __init__(self, pages: npt.NDArray[np.uint8], page_bytes: int, level: _Level, kind: int) -> None:
        counts = _node_counts(pages, page_bytes, level, kind)
        self._page_bytes = page_bytes
        self._bytes = pages.reshape(-1)
        self._words = pages.view("<u2")
        self._level = level
        self._is_branch = kind == BRANCH
        upper = self._upper = _heads(pages)["upper"].astype(np.int64)
        self.page = np.repeat(np.arange(len(counts)), counts)
        """Which of the pages each node is on."""
        self.at = np.arange(len(self.page)) - np.repeat(np.cumsum(counts) - counts, counts)
        """Its place among them."""
        self._place = self._words[self.page, _HEADER_BYTES // 2 + self.at].astype(np.int64)
        wrong = (self._place < upper[self.page]) | (self._place > page_bytes - _NODE_BYTES) | (self._place % 2 == 1)
        self._require(~wrong, "a node lies outside its page")
        self.key_bytes = self.words(3)

    def _require(self, right: npt.NDArray[np.bool_], what: str) -> None:
        if not right.all():
            raise _Broken(f"page {self._level.numbers[self.page[~right][0]]}: {what}")

    def words(self, which: int) -> _Ints:
        """A field of each node's NODE_HEADER."""
        found: _Ints = self._words[self.page, self._place // 2 + which].astype(np.int64)
        return found

    def require_tiled(self, sizes: _Ints) -> None:
        """Nodes of these sizes fill the ends of their pages, each byte once; and keys are in order."""
        sizes = sizes + sizes % 2
        order = np.argsort(self.page * self._page_bytes + self._place)
        begins, ends = self._place[order], (self._place + sizes)[order]
        first = np.append(True, self.page[order][1:] != self.page[order][:-1])
        last = np.append(first[1:], True)
        follows = np.append(self._upper[self.page[order][:1]], ends[:-1])
        follows[first] = self._upper[self.page[order][first]]
        right = (begins == follows) & (~last | (ends == self._page_bytes))
        if not right.all():
            at = self.page[order][~right][0]
            raise _Broken(f"page {self._level.numbers[at]}: its nodes do not fill it")
        self._require_order()

    def _require_order(self) -> None:
        keys, level = self.keys, self._level
        same_page = (self.page[1:] == self.page[:-1]) & (self.at[1:] > (1 if self._is_branch else 0))
        right = np.ones(len(keys), np.bool_)
        after = keys[1:] > keys[:-1]
        after |= (keys[1:] == keys[:-1]) & (
            (self.key_bytes[1:] > self.key_bytes[:-1]) | (self.key_bytes[1:] > _KEY_BYTES)
        )
        right[1:] = after | ~same_page
        implied = self._is_branch & (self.at == 0)
        right &= implied | (keys >= level.low[self.page])
        right &= implied | ~level.bounded[self.page] | (keys <= level.high[self.page])
        self._require(right, "keys are out of order")

    @cached_property
    def keys(self) -> _Keys:
        """The first bytes of each key. REQUIRES: keys lie in their pages."""
        begins = self.page * self._page_bytes + self._place + _NODE_BYTES
        lengths = np.minimum(self.key_bytes, _KEY_BYTES)
        found: _Keys = np.zeros(len(begins), dtype=f"S{_KEY_BYTES}")
        for length in np.flatnonzero(np.bincount(lengths)).tolist():  # most tables have keys of one length
            which = np.flatnonzero(lengths == length)
            if length:
                windows = np.ndarray((len(self._bytes) - length + 1, length), np.uint8, self._bytes, strides=(1, 1))
                found[which] = np.ascontiguousarray(windows[begins[which]]).view(f"S{length}")[:, 0]
        return found

    def long_at(self, which: npt.NDArray[np.bool_]) -> _Ints:
        """Where the long values of some nodes begin: numbers of pages."""
        begins = (self.page * self._page_bytes + self._place + _NODE_BYTES + self.key_bytes)[which]
        found = np.zeros(len(begins), np.uint64)
        for at in range(8):
            found |= self._bytes[begins + at].astype(np.uint64) << np.uint64(8 * at)
        return np.minimum(found, np.uint64(1 << 62)).astype(np.int64)
