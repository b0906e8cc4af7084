"""The layout of an LMDB data file: headers of pages and nodes, and its two meta pages, read without LMDB.

Little-endian. A page begins with PAGE_HEADER. A branch or leaf page goes on with the places of its nodes, 16 bits
each, up to `lower`, and has the nodes from `upper` to its end; a node is NODE_HEADER, its key, and in a leaf its value,
or the number of the page where a long value begins. A long value fills pages of its own, with one header before it.

Source: MDB_page, MDB_node, MDB_meta, MDB_db in mdb.c of LMDB 0.9.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

PAGE_HEADER = struct.Struct("<QHHHH")  # page number, pad, kind, lower, upper
PAGE_HEADERS = np.dtype([("number", "<u8"), ("pad", "<u2"), ("kind", "<u2"), ("lower", "<u2"), ("upper", "<u2")])
LONG_PAGES = struct.Struct("<12xI")  # in the header of a long value: number of pages, in place of lower and upper
NODE_HEADER = struct.Struct("<HHHH")  # size or child (low, high), flags or child (highest), size of the key
PAGE_NUMBER = struct.Struct("<Q")

BRANCH, LEAF, LONG, META = 1, 2, 4, 8
"""Kinds of pages."""

LONG_VALUE = 1
"""Flag of a node whose value lies in pages of its own."""

INTEGER_KEYS = 8
"""Flag of a tree whose keys are numbers: that of the free pages."""

NO_PAGE = 2**64 - 1
"""Root of a tree without a page."""

_META = struct.Struct("<II8xQ")  # magic, version, address, map size; then the two trees
_TREE = struct.Struct("<IHHQQQQQ")
_END = struct.Struct("<QQ")  # last page, transaction
_META_AT = PAGE_HEADER.size
_FREE_AT = _META_AT + _META.size
_MAIN_AT = _FREE_AT + _TREE.size
_END_AT = _MAIN_AT + _TREE.size
_META_BYTES = _END_AT + _END.size
_MAGIC = 0xBEEFC0DE
_VERSION = 1
_PAGE_SIZES = (4096, 8192, 16384, 32768, 65536)


class TreeRecord(NamedTuple):
    """The record of a tree in a meta page. `pad` of the tree of free pages is the size of a page."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    long_pages: int
    entries: int
    root: int


class MetaPage(NamedTuple):
    """One of the two meta pages; the one of the later transaction is in force."""

    number: int
    map_bytes: int
    free: TreeRecord
    main: TreeRecord
    last_page: int
    transaction: int


@contextmanager
def open_file(directory: Path) -> Iterator[int]:
    """A descriptor of `directory`/data.mdb.

    Also for a file that this process has open: LMDB's locks, which go with any descriptor, lie on lock.mdb.
    """
    descriptor = os.open(f"{directory}/data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def meta_in_force(descriptor: int) -> tuple[int, list[MetaPage]]:
    """The size of a page, and the meta pages that are valid in themselves, the one in force last.

    As of one instant, though another process commits between two reads.
    """
    page_bytes, pages = _read_metas(descriptor)
    while [os.pread(descriptor, _META_BYTES, at) for at in (0, page_bytes)] != pages:
        page_bytes, pages = _read_metas(descriptor)
    found = [meta for number, page in enumerate(pages) if (meta := _parse_meta(number, page)) is not None]
    return page_bytes, sorted(found, key=lambda meta: meta.transaction)


def metas_disagree(metas: list[MetaPage]) -> str | None:
    """Why the two meta pages cannot be those of the last two commits; None: they can.

    Transaction n writes meta page n modulo 2, so the pages are of n and n - 1, and a flipped bit in a number, which
    would bring an older state back or let the next commit overwrite the newest, is found. One flip is not: the one that
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


def other_settings(meta: MetaPage, page_bytes: int) -> str | None:
    """Why a meta page is not one of a store: sizes and flags of its trees are always the same. None: it can be one.

    Each flag is another layout of pages to LMDB, which ends the process over one that is not so.
    """
    if (meta.free.pad, meta.free.flags, meta.main.pad, meta.main.flags) == (page_bytes, INTEGER_KEYS, 0, 0):
        return None
    return "the settings in the meta page are not those of a store"


def page_count(descriptor: int, page_bytes: int) -> int:
    """How many pages the file has, one that is cut off counted."""
    return -(-os.fstat(descriptor).st_size // page_bytes)


def _read_metas(descriptor: int) -> tuple[int, list[bytes]]:
    """The size of a page, from either meta page, and what lies where the meta pages are."""
    first = os.pread(descriptor, _META_BYTES, 0)
    for page_bytes in _PAGE_SIZES:
        pages = [first, os.pread(descriptor, _META_BYTES, page_bytes)]
        if any(meta.free.pad == page_bytes for meta in map(_parse_meta, (0, 1), pages) if meta is not None):
            return page_bytes, pages
    return _PAGE_SIZES[0], [first, os.pread(descriptor, _META_BYTES, _PAGE_SIZES[0])]


def _parse_meta(number: int, page: bytes) -> MetaPage | None:
    """The meta page that `page` begins with; None: it is not valid in itself."""
    if len(page) < _META_BYTES:
        return None
    _, _, kind, _, _ = PAGE_HEADER.unpack_from(page)
    magic, version, map_bytes = _META.unpack_from(page, _META_AT)
    if (magic, version) != (_MAGIC, _VERSION) or not kind & META:
        return None
    free = TreeRecord(*_TREE.unpack_from(page, _FREE_AT))
    main = TreeRecord(*_TREE.unpack_from(page, _MAIN_AT))
    return MetaPage(number, map_bytes, free, main, *_END.unpack_from(page, _END_AT))
