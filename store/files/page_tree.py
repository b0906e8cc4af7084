"""One tree of an LMDB data file, walked page by page as bytes: its entries, its pages, and what is wrong with it.

What hangs from a broken page cannot be reached; the walk goes on after it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

from pyroaring import BitMap64

from .lmdb_layout import (
    BRANCH,
    LEAF,
    LONG,
    LONG_PAGES,
    LONG_VALUE,
    NO_PAGE,
    NODE_HEADER,
    PAGE_HEADER,
    PAGE_NUMBER,
    TreeRecord,
)  # fmt: skip


class _Broken(Exception):
    """A page is not what it should be; what hangs from it cannot be reached."""


WHOLE = 1 << 32
"""Bytes of a long value: all that there are."""


class Tree:
    """One tree, walked once; `problems` and `pages` are complete when `items` is exhausted."""

    def __init__(
        self, descriptor: int, page_bytes: int, last_page: int, record: TreeRecord, *, integer_keys: bool
    ) -> None:
        self._descriptor = descriptor
        self._page_bytes = page_bytes
        self._last_page = last_page
        self._record = record
        self._integer_keys = integer_keys
        self._kinds = {BRANCH: 0, LEAF: 0, LONG: 0}
        self._entries = 0
        self.problems: list[str] = []
        self.pages = BitMap64()

    def items(self, *, long_bytes: int) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) in order, of a long value the first `long_bytes`; goes on after what is broken."""
        record = self._record
        if record.root == NO_PAGE:
            if record.entries or record.depth:
                self.problems.append("it has entries and no root")
            return
        yield from self._page(record.root, 1, None, None, long_bytes)
        found = (self._kinds[BRANCH], self._kinds[LEAF], self._kinds[LONG], self._entries)
        said = (record.branch_pages, record.leaf_pages, record.long_pages, record.entries)
        if found != said:
            names = ("branch pages", "leaf pages", "pages of long values", "entries")
            wrong = [f"{a} {name} instead of {b}" for name, a, b in zip(names, found, said, strict=True) if a != b]
            self.problems.append("it has " + ", ".join(wrong))

    def _page(
        self, number: int, depth: int, low: bytes | None, high: bytes | None, long_bytes: int
    ) -> Iterator[tuple[bytes, bytes]]:
        try:
            page, kind, places = self._read(number, depth)
        except _Broken as error:
            self.problems.append(str(error))
            return
        previous = low
        nodes = []
        for at, place in enumerate(places):
            first, second, third, key_bytes = NODE_HEADER.unpack_from(page, place)
            key = page[place + NODE_HEADER.size : place + NODE_HEADER.size + key_bytes]
            implied = kind == BRANCH and at == 0
            # The first key of a branch page is implied; every other one lies in the bounds that the parent gives.
            if not implied and not self._in_order(previous, key, high, strict=at > (kind == BRANCH)):
                self.problems.append(f"page {number}: keys out of order")
            if implied:
                key = low or b""
            previous = key
            nodes.append((key, first | second << 16, third, place + NODE_HEADER.size + key_bytes))
        if kind == BRANCH:
            for at, (key, low_bits, high_bits, _) in enumerate(nodes):
                limit = nodes[at + 1][0] if at + 1 < len(nodes) else high
                yield from self._page(low_bits | high_bits << 32, depth + 1, key or None, limit, long_bytes)
            return
        for key, size, flags, at in nodes:
            self._entries += 1
            if flags == 0:
                yield key, page[at : at + size]
                continue
            try:
                yield key, self._long_value(PAGE_NUMBER.unpack_from(page, at)[0], size, long_bytes)
            except _Broken as error:
                self.problems.append(str(error))

    def _in_order(self, low: bytes | None, key: bytes, high: bytes | None, *, strict: bool) -> bool:
        number = self._order(key)
        if low is not None and (number <= self._order(low) if strict else number < self._order(low)):
            return False
        return high is None or number < self._order(high)

    def _order(self, key: bytes) -> bytes:
        return key[::-1] if self._integer_keys else key

    def _claim(self, number: int, count: int) -> None:
        if number < 2 or number + count - 1 > self._last_page:
            raise _Broken(f"page {number} lies outside the file")
        claimed = BitMap64(range(number, number + count))
        if not claimed.isdisjoint(self.pages):
            raise _Broken(f"page {number} hangs in the tree twice")
        self.pages |= claimed

    def _read(self, number: int, depth: int) -> tuple[bytes, int, tuple[int, ...]]:
        """A branch or leaf page: its bytes, kind, and where its nodes are."""
        if depth > self._record.depth:
            raise _Broken(f"page {number} hangs deeper than {self._record.depth}")
        self._claim(number, 1)
        page = os.pread(self._descriptor, self._page_bytes, number * self._page_bytes)
        if len(page) < self._page_bytes:
            raise _Broken(f"page {number} lies past the end of the file")
        found, _, kind, lower, upper = PAGE_HEADER.unpack_from(page)
        wanted = LEAF if depth == self._record.depth else BRANCH
        if found != number or kind != wanted:
            raise _Broken(f"page {number} says that it is page {found} of kind {kind}, expected kind {wanted}")
        self._kinds[kind] += 1
        if not PAGE_HEADER.size <= lower <= upper <= self._page_bytes or lower % 2 or lower == PAGE_HEADER.size:
            raise _Broken(f"page {number} has its nodes from {lower} to {upper}")
        count = (lower - PAGE_HEADER.size) // 2
        places: tuple[int, ...] = struct.unpack_from(f"<{count}H", page, PAGE_HEADER.size)
        size = 0
        for place in places:
            if place < upper or place + NODE_HEADER.size > self._page_bytes:
                raise _Broken(f"page {number} has a node at {place}")
            first, second, flags, key_bytes = NODE_HEADER.unpack_from(page, place)
            node_bytes = NODE_HEADER.size + key_bytes
            if kind == LEAF:
                if flags not in (0, LONG_VALUE):
                    raise _Broken(f"page {number} has a node of kind {flags}")
                node_bytes += PAGE_NUMBER.size if flags else first | second << 16
            if place + node_bytes > self._page_bytes:
                raise _Broken(f"page {number} has a node of {node_bytes} bytes at {place}")
            size += node_bytes + node_bytes % 2
        if size != self._page_bytes - upper:
            raise _Broken(f"page {number} has nodes of {size} bytes in {self._page_bytes - upper}")
        return page, kind, places

    def _long_value(self, number: int, size: int, wanted: int) -> bytes:
        needed = (PAGE_HEADER.size - 1 + size) // self._page_bytes + 1
        head = os.pread(self._descriptor, PAGE_HEADER.size, number * self._page_bytes)
        if len(head) < PAGE_HEADER.size:
            raise _Broken(f"page {number} of a long value lies past the end of the file")
        found, _, kind, _, _ = PAGE_HEADER.unpack(head)
        (count,) = LONG_PAGES.unpack(head)
        if found != number or kind != LONG or count < needed:
            raise _Broken(f"page {number} is not that of a long value of {size} bytes")
        self._claim(number, count)
        self._kinds[LONG] += count
        end = number * self._page_bytes + PAGE_HEADER.size + size
        if os.fstat(self._descriptor).st_size < end:
            self.problems.append(f"a long value at page {number} is cut off")
        if not wanted:
            return b""
        return os.pread(self._descriptor, min(size, wanted), number * self._page_bytes + PAGE_HEADER.size)
