"""The pages of an LMDB data file, walked as bytes without LMDB: are its trees whole, is every page in its place?

LMDB has no checksums and believes its pages. One flipped bit in a branch page sends it to a page of another time, or
past entries that are there: whole logs are gone, without an error, until the partition is deleted as one in which
nothing is left. One in the number of a transaction brings back the state before the last commit. Others make it
overwrite pages in use, or kill the process. So pages are read with `pread` and held against what LMDB keeps beside
them: page numbers and kinds, nodes that fill their page without a gap, keys in order and within the bounds that the
page above gives, the counts of pages and entries of each tree, and that every page is in one tree or in the list of
free pages, and in one of them only. A key that cannot be found any more is a number that does not add up. Values carry
checksums of their own and are not looked at.

LMDB opened for writing also turns a missing or empty file into an empty database silently, and a truncated one kills
the process (SIGBUS) at the first page that is not there. So `inspect` and `verify` look at a file before it is opened.

Nothing here can kill a process or hang, whatever the file holds. A page of few nodes, as runs make it, costs some us,
one of a hundred small ones 50.
"""

import os
import struct
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import repeat
from operator import lt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pyroaring import BitMap64

from ..errors import DamagedStore, NoPermission, ResourceShortage
from .system_errors import explain, explained

# -- the layout: MDB_page, MDB_node, MDB_meta, MDB_db in mdb.c of LMDB 0.9 ------------------------
#
# Little-endian. A page begins with PAGE_HEADER. A branch or leaf page goes on with the places of its nodes, 16 bits
# each, up to `lower`, and has the nodes from `upper` to its end; a node is NODE_HEADER, its key, and in a leaf its
# value, or the number of the page where a long value begins. A long value fills pages of its own, with one header
# before it.

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

_META = struct.Struct(
    "<10xH4xII8xQ IHHQQQQQ IHHQQQQQ QQ"
)  # kind, magic, version, map size, trees, last page, transaction
_META_BYTES = _META.size
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
    page_bytes, pages, metas = _read_metas(descriptor)
    while [os.pread(descriptor, _META_BYTES, at) for at in (0, page_bytes)] != pages:
        page_bytes, pages, metas = _read_metas(descriptor)
    return page_bytes, sorted(metas, key=lambda meta: meta.transaction)


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


def _read_metas(descriptor: int) -> tuple[int, list[bytes], list[MetaPage]]:
    """The size of a page, from either meta page, what lies where the meta pages are, and those that are valid."""
    first = os.pread(descriptor, _META_BYTES, 0)
    for page_bytes in (*_PAGE_SIZES, _PAGE_SIZES[0]):
        pages = [first, os.pread(descriptor, _META_BYTES, page_bytes)]
        metas = [meta for meta in map(_parse_meta, (0, 1), pages) if meta is not None]
        if any(meta.free.pad == page_bytes for meta in metas):
            break
    return page_bytes, pages, metas


def _parse_meta(number: int, page: bytes) -> MetaPage | None:
    """The meta page that `page` begins with; None: it is not valid in itself."""
    if len(page) < _META_BYTES:
        return None
    kind, magic, version, map_bytes, *trees, last_page, transaction = _META.unpack(page)
    if (magic, version) != (_MAGIC, _VERSION) or not kind & META:
        return None
    return MetaPage(number, map_bytes, TreeRecord(*trees[:8]), TreeRecord(*trees[8:]), last_page, transaction)


# -- the walk ------------------------------------------------------------------------------------

MOST_LEAVES = 256
"""Leaf pages that are read at every first opening: 1 MiB, some 10 ms where they are in the page cache."""

MOST_HEADERS = 16_384
"""Leaf pages of which at least the headers are read: 2 us each, where they are in the page cache."""

FEW_PAGES = 3
"""Branch and leaf pages of a tree whose rows are read without LMDB, which takes several times as long to open it."""

_MOST_FREE_LISTS = 1_000
"""Commits whose free pages are held against those in use before a file is opened."""

_LONG_BYTES = 8_176
"""The bytes of a long value that `read_few` reads: of a run the header, and the columns of 678 messages."""

_WHOLE = 1 << 32
_MOST_PROBLEMS = 50


class Leaves(Enum):
    """How much of a tree's leaf pages is read."""

    WHOLE = "each page, and the first page of each long value"
    NODES = "each page"
    HEADERS = "the header of each page"
    UNREAD = "none"


class _Broken(Exception):
    """A page is not what it should be; what hangs from it cannot be reached."""


class PageWalk:
    """A walk over the trees of one file. What hangs from a broken page cannot be reached; the walk goes on after it."""

    def __init__(self, descriptor: int, page_bytes: int, last_page: int) -> None:
        self._descriptor = descriptor
        self._page_bytes = page_bytes
        self._last_page = last_page
        self._file_bytes = os.fstat(descriptor).st_size
        self._pages = min(last_page + 1, -(-self._file_bytes // page_bytes))
        self.used = BitMap64([0, 1])
        """The pages that were met."""
        self.claims = 2
        """How often one was met."""
        self.problems: list[str] = []

    def rows(
        self, record: TreeRecord, *, leaves: Leaves = Leaves.WHOLE, long_bytes: int = 0
    ) -> Iterator[tuple[bytes, bytes]]:
        """(key, value) in order, of a long value the first `long_bytes`; none unless leaf pages are read whole.

        `problems` and `used` are complete when this is exhausted.
        """
        if record.root == NO_PAGE:
            if record.entries or record.depth:
                self._tell(record, "it has entries and no root")
            return
        whole = leaves is Leaves.WHOLE
        branch_pages = leaf_pages = long_pages = entries = 0
        ahead: list[tuple[int, int, bytes, bytes | None]] = [(record.root, 1, b"", None)]
        while ahead:
            number, depth, low, limit = ahead.pop()
            is_leaf = depth >= record.depth
            try:
                if depth > record.depth or not 1 < number < self._pages or number in self.used:
                    raise _Broken(f"page {number} is in use twice, lies outside the file, or too deep")
                self.used.add(number)
                self.claims += 1
                page = self._read(number, self._page_bytes)
                nodes, ends, keys = self._nodes(page, number, LEAF if is_leaf else BRANCH)
            except _Broken as error:
                self._tell(record, str(error))
                continue
            ordered = keys if is_leaf else keys[1:]  # the first key of a branch page is implied
            if record.flags & INTEGER_KEYS:
                ordered = [key[::-1] for key in ordered]
            if not all(map(lt, ordered, ordered[1:])) or (
                ordered and (ordered[0] < low or (limit is not None and ordered[-1] >= limit))
            ):
                self._tell(record, f"page {number}: keys out of order")
            if not is_leaf:
                branch_pages += 1
                children = [first | second << 16 | third << 32 for first, second, third, _ in nodes]
                if depth + 1 == record.depth and leaves in (Leaves.HEADERS, Leaves.UNREAD):
                    leaf_pages += len(children)
                    entries += self._count_entries(record, children, leaves)
                    continue
                ahead += reversed([*zip(children, repeat(depth + 1), [low, *ordered], [*ordered, limit])])
                continue
            leaf_pages += 1
            entries += len(nodes)
            for key, (first, second, is_long, _), end in zip(keys, nodes, ends, strict=True):
                size = first | second << 16
                if is_long:
                    begin = PAGE_NUMBER.unpack_from(page, end - PAGE_NUMBER.size)[0]
                    try:
                        long_pages += self._claim_long(begin, size, look=whole)
                    except _Broken as error:
                        self._tell(record, str(error))
                        continue
                if whole:
                    value = self._long_value(record, begin, size, long_bytes) if is_long else page[end - size : end]
                    yield key, value
        counts = [
            ("branch pages", branch_pages, record.branch_pages),
            ("leaf pages", leaf_pages, record.leaf_pages),
            ("pages of long values", long_pages, record.long_pages if whole else long_pages),
            ("entries", entries, entries if leaves is Leaves.UNREAD else record.entries),
        ]
        wrong = [f"{found} {name} instead of {counted}" for name, found, counted in counts if found != counted]
        if wrong:
            self._tell(record, f"it has {', '.join(wrong)}")

    def _read(self, number: int, size: int) -> bytes:
        page = os.pread(self._descriptor, size, number * self._page_bytes)
        if len(page) < size:
            raise _Broken(f"page {number} lies past the end of the file")
        return page

    def _count_entries(self, record: TreeRecord, numbers: list[int], leaves: Leaves) -> int:
        """Claim leaf pages; how many nodes they have by their headers, or 0 where these are not read."""
        if not all(1 < number < self._pages for number in numbers):
            self._tell(record, f"a page of {min(numbers)} to {max(numbers)} lies outside the file")
            return 0
        self.used.update(numbers)
        self.claims += len(numbers)
        if leaves is Leaves.UNREAD:
            return 0
        read = b"".join([os.pread(self._descriptor, PAGE_HEADER.size, at * self._page_bytes) for at in numbers])
        heads = np.frombuffer(read[: len(read) // PAGE_HEADER.size * PAGE_HEADER.size], PAGE_HEADERS)
        expected = np.array(numbers[: len(heads)], np.uint64)
        lower, upper = heads["lower"], heads["upper"]
        right = (heads["number"] == expected) & (heads["kind"] == LEAF) & (lower > PAGE_HEADER.size)
        right &= (lower <= upper) & (upper <= self._page_bytes) & ((lower | upper) % 2 == 0)
        if not right.all() or len(heads) < len(numbers):
            self._tell(record, f"page {[*expected[~right], *numbers[len(heads) :]][0]} is not what it should be")
        return int((lower.astype(np.int64) - PAGE_HEADER.size).sum()) // 2

    def _nodes(
        self, page: bytes, number: int, kind: int
    ) -> tuple[list[tuple[int, int, int, int]], list[int], list[bytes]]:
        """The nodes of a branch or leaf page in the order of their keys: headers, ends, keys."""
        found, _, found_kind, lower, upper = PAGE_HEADER.unpack_from(page)
        if (found, found_kind) != (number, kind):
            raise _Broken(f"page {number} says that it is page {found} of kind {found_kind}, expected kind {kind}")
        if not PAGE_HEADER.size < lower <= upper <= self._page_bytes or lower % 2 or upper % 2:
            raise _Broken(f"page {number} has its nodes from {lower} to {upper}")
        count = (lower - PAGE_HEADER.size) // 2
        places = struct.unpack_from(f"<{count}H", page, PAGE_HEADER.size)
        if max(places) > self._page_bytes - NODE_HEADER.size:
            raise _Broken(f"page {number} has a node at {max(places)}")
        nodes = list(map(NODE_HEADER.unpack_from, repeat(page), places))
        if kind == LEAF:
            if not {node[2] for node in nodes} <= {0, LONG_VALUE}:
                raise _Broken(f"page {number} has a node of no kind")
            ends = [
                place + NODE_HEADER.size + key_bytes + (PAGE_NUMBER.size if is_long else first | second << 16)
                for place, (first, second, is_long, key_bytes) in zip(places, nodes)  # noqa: B905 - as many
            ]
        else:
            ends = [place + NODE_HEADER.size + node[3] for place, node in zip(places, nodes)]  # noqa: B905
        # From `upper` each node ends where another begins, and the last with the page: they fill it, each byte once.
        if len({*places}) < count or {*places, self._page_bytes} != {upper, *(end + end % 2 for end in ends)}:
            raise _Broken(f"page {number}: its nodes do not fill it")
        return nodes, ends, [page[place + 8 : place + 8 + node[3]] for place, node in zip(places, nodes)]  # noqa: B905

    def _claim_long(self, number: int, size: int, *, look: bool) -> int:
        """Claim the pages of a long value, and count them: more than it needs if one that was longer was replaced."""
        count = (PAGE_HEADER.size - 1 + size) // self._page_bytes + 1
        if not 1 < number <= self._pages - count:
            raise _Broken(f"page {number} lies outside the file")
        if look:
            head, needed = self._read(number, PAGE_HEADER.size), count
            found, _, kind, _, _ = PAGE_HEADER.unpack(head)
            (count,) = LONG_PAGES.unpack(head)
            if found != number or kind != LONG or not needed <= count <= self._pages - number:
                raise _Broken(f"page {number} is not that of a long value of {size} bytes")
        self.used.add_range(number, number + count)
        self.claims += count
        return count

    def _long_value(self, record: TreeRecord, number: int, size: int, wanted: int) -> bytes:
        """The first bytes of a long value, as far as the file has them."""
        at = number * self._page_bytes + PAGE_HEADER.size
        if at + size > self._file_bytes:
            self._tell(record, f"a long value at page {number} is cut off")
        return os.pread(self._descriptor, min(size, wanted), at) if wanted else b""

    def claim_free(self, record: TreeRecord) -> None:
        for _, value in self.rows(record, long_bytes=_WHOLE):
            numbers = [number for (number,) in PAGE_NUMBER.iter_unpack(value[: len(value) // 8 * 8])]
            if not numbers or numbers[0] != len(numbers) - 1:
                self._tell(record, "a list is not as long as it says")
                continue
            if not all(map(lt, numbers[2:], numbers[1:])):
                self._tell(record, "a list is out of order")
            if not all(1 < number <= self._last_page for number in numbers[1:]):
                self._tell(record, "a list has a page outside the file")
                continue
            self.used.update(numbers[1:])
            self.claims += len(numbers) - 1

    def _tell(self, record: TreeRecord, problem: str) -> None:
        name = "list of free pages" if record.flags & INTEGER_KEYS else "tree"
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"{name}: {problem}")


def find_problems(directory: Path, transaction: int | None = None) -> list[str] | None:
    """Find what is wrong with the pages of `directory`/data.mdb: at most 50 problems, none for a whole file.

    transaction: of a read transaction that the caller holds meanwhile, so that what is in it is not overwritten; None
    where no process writes. The answer is None if that transaction's meta page is gone: begin another and try again.
    Raises DamagedStore when the file is missing or cannot be read at all; ResourceShortage, NoPermission. O(pages).
    """
    try:
        with open_file(directory) as descriptor:
            page_bytes, metas = meta_in_force(descriptor)
            meta = next((meta for meta in reversed(metas) if transaction in (None, meta.transaction)), None)
            if meta is None and metas:
                return None
            return _problems(descriptor, page_bytes, metas, meta)
    except OSError as error:
        told = explain(directory / "data.mdb", error)
        if isinstance(told, (NoPermission, ResourceShortage)):
            raise told from error
        raise DamagedStore(directory / "data.mdb", f"cannot be read: {error}") from error


def refuse_broken(directory: Path, *, every_header: bool = False) -> "DataFile":
    """Refuse, before it is opened, what `verify` refuses, and a file whose pages do not hold together.

    Of a file of more than `MOST_LEAVES` leaf pages only the branch pages and the headers of leaf pages are read, of one
    of more than `MOST_HEADERS` not these either, unless every_header asks for them. The pages of long values are not
    read. Beside a writing process: a problem counts only if nothing was committed meanwhile. Raises DamagedStore,
    ResourceShortage.
    """
    problems: list[str] = []
    before: object = None
    with explained(directory), open_file(directory) as descriptor:
        while not problems or meta_in_force(descriptor) != before:
            before = page_bytes, metas = meta_in_force(descriptor)
            data = _facts(directory, descriptor, page_bytes, metas)
            tree = metas[-1].main
            if tree.branch_pages + tree.leaf_pages <= FEW_PAGES:
                leaves = Leaves.WHOLE
            elif tree.leaf_pages <= MOST_LEAVES:
                leaves = Leaves.NODES
            else:
                leaves = Leaves.HEADERS if every_header or tree.leaf_pages <= MOST_HEADERS else Leaves.UNREAD
            problems = _problems(descriptor, page_bytes, metas, metas[-1], leaves=leaves)
            if not problems:
                return _with_all_pages(directory, data)
    raise DamagedStore(directory / "data.mdb", f"its pages do not hold together: {problems[0]}")


def read_values(directory: Path) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of everything that can still be reached in a damaged file that no process has open; each key once.

    A value whose pages are cut off or not its own comes as far as it is there: its checksum tells.
    """
    with open_file(directory) as descriptor:
        page_bytes, metas = meta_in_force(descriptor)
        for meta in reversed(metas):
            walk = PageWalk(descriptor, page_bytes, page_count(descriptor, page_bytes))
            seen: set[bytes] = set()
            for key, value in walk.rows(meta.main, long_bytes=_WHOLE):
                if key not in seen:
                    seen.add(key)
                    yield key, value
            if seen:
                return


class FewPages:
    """The rows of a file, or none, read like a transaction of LMDB; of a long value the first bytes."""

    def __init__(self, rows: list[tuple[bytes, bytes]]) -> None:
        self.rows = rows
        self._by_key = dict(rows)

    def get(self, key: bytes, default: Any = None) -> Any:
        return self._by_key.get(key, default)

    def cursor(self) -> "RowCursor":
        return RowCursor(self.rows)

    def id(self) -> int:
        return 0

    def abort(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> "FewPages":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""


class RowCursor:
    """A cursor over the rows, with those methods of LMDB's that readers use."""

    def __init__(self, rows: list[tuple[bytes, bytes]]) -> None:
        self._rows = rows
        self._at = -1

    def set_range(self, key: bytes) -> bool:
        """Go to the first row from `key` on; False: there is none."""
        self._at = bisect_left(self._rows, (key, b""))
        return self._at < len(self._rows)

    def first(self) -> bool:
        """Go to the first row; False: there is none."""
        return self.set_range(b"")

    def last(self) -> bool:
        """Go to the last row; False: there is none."""
        self._at = len(self._rows) - 1
        return self._at >= 0

    def prev(self) -> bool:
        """Go back a row; False: there is none."""
        self._at -= 1
        return self._at >= 0

    def next(self) -> bool:
        """Go on a row; False: there is none."""
        self._at += 1
        return self._at < len(self._rows)

    def item(self) -> tuple[bytes, bytes]:
        return self._rows[self._at]

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return iter(self._rows)

    def key(self) -> bytes:
        return self._rows[self._at][0]

    def value(self) -> bytes:
        return self._rows[self._at][1]


def read_few(directory: Path) -> FewPages | None:
    """The rows of `directory`/data.mdb, which no process writes: recovery reads one for each partition.

    None: of one that has more pages, cannot be read, or does not hold together, which opening it says.
    """
    rows: list[tuple[bytes, bytes]] = []
    with suppress(OSError), open_file(directory) as descriptor:
        page_bytes, metas = meta_in_force(descriptor)
        tree = metas[-1].main if metas else None
        if tree is None or tree.branch_pages + tree.leaf_pages > FEW_PAGES:
            return None
        if not _problems(descriptor, page_bytes, metas, metas[-1], rows=rows, long_bytes=_LONG_BYTES):
            return FewPages(rows)
    return None


def _problems(
    descriptor: int,
    page_bytes: int,
    metas: list[MetaPage],
    meta: MetaPage | None,
    *,
    leaves: Leaves = Leaves.WHOLE,
    rows: list[tuple[bytes, bytes]] | None = None,
    long_bytes: int = 0,
) -> list[str]:
    """Walk both trees of one meta page; what is wrong with them. rows: gets the rows, as `PageWalk.rows` gives them."""
    if meta is None:
        return ["no valid meta page"]
    walk = PageWalk(descriptor, page_bytes, meta.last_page)
    walk.problems += filter(None, (metas_disagree(metas), other_settings(meta, page_bytes)))
    found = walk.rows(meta.main, leaves=leaves, long_bytes=long_bytes)
    if rows is None:
        for _ in found:
            pass
    else:
        rows += found
    if leaves is Leaves.WHOLE or meta.free.entries <= _MOST_FREE_LISTS:
        walk.claim_free(meta.free)
    if walk.claims > len(walk.used):
        walk.problems.append(f"{walk.claims - len(walk.used)} pages are in use twice, or count as free")
    missing = meta.last_page + 1 - len(walk.used)
    if leaves is Leaves.WHOLE and missing > 0 and not walk.problems:
        walk.problems.append(f"{missing} pages are neither in use nor free")
    return walk.problems


class DataFile(NamedTuple):
    """The facts in the newer of the two meta pages."""

    page_bytes: int
    map_bytes: int
    last_page: int
    transaction: int
    rows: int
    file_bytes: int

    @property
    def short(self) -> bool:
        """True where pages that were once allocated lie past the end of the file.

        Such a page may be free (allocated and freed by one commit, never written) or lost.
        """
        return (self.last_page + 1) * self.page_bytes > self.file_bytes


def _facts(directory: Path, descriptor: int, page_bytes: int, metas: list[MetaPage]) -> DataFile:
    file_bytes = os.fstat(descriptor).st_size
    if not metas:
        raise DamagedStore(directory / "data.mdb", f"no LMDB data file ({file_bytes} bytes)")
    newest = metas[-1]
    rows = newest.main.entries
    return DataFile(page_bytes, newest.map_bytes, newest.last_page, newest.transaction, rows, file_bytes)


def inspect(directory: Path) -> DataFile:
    """Read the meta pages of `directory`/data.mdb. Raises DamagedStore when no valid one is there, and as `explain`."""
    with explained(directory), open_file(directory) as descriptor:
        return _facts(directory, descriptor, *meta_in_force(descriptor))


def verify(directory: Path) -> DataFile:
    """Refuse what would be opened as empty or kill the process. Raises DamagedStore.

    Of a short file every page that is in use is looked for, O(file); beside a writing process what is missing counts
    only if nothing was committed meanwhile.
    """
    return _with_all_pages(directory, inspect(directory))


def _with_all_pages(directory: Path, data: DataFile) -> DataFile:
    while data.short and (problems := find_problems(directory)):
        before, data = data, inspect(directory)
        if data == before:
            raise DamagedStore(directory / "data.mdb", f"is {data.file_bytes} bytes, truncated: {problems[0]}")
    return data
