"""A due column in memory; what a delay index holds, and its buckets in the form in which a start restores them."""

from collections.abc import Iterable

import numpy as np
from pyroaring import BitMap

from duelog.partitions.index.buckets import PackedBucket
from duelog.partitions.index.delay_index import DelayIndex
from duelog.partitions.index.window import Dues, Ids


class Column:
    """A due column in memory: counts what is read of it, and can be damaged or made to fail."""

    def __init__(self) -> None:
        self.due_ms: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.reads = 0
        self.good_calls: int | None = None  # then every call raises; None: never

    def __call__(self, ids: Ids) -> Dues:
        if self.good_calls is not None:
            if not self.good_calls:
                raise OSError("the column cannot be read")
            self.good_calls -= 1
        assert (ids[1:] > ids[:-1]).all()
        self.reads += len(ids)
        return np.array([-1 if i in self.damaged else self.due_ms[i] for i in ids.tolist()], dtype=np.int64)

    def put(self, first: int, dues: Iterable[int]) -> tuple[Ids, Dues]:
        """Append entries from ``first`` on."""
        listed = list(dues)
        self.due_ms.update(enumerate(listed, first))
        return np.arange(first, first + len(listed), dtype=np.uint32), np.array(listed, dtype=np.int64)


def pairs(taken: tuple[Ids, Dues]) -> list[tuple[int, int]]:
    """The entries taken, as (due_ms, entry_id)."""
    ids, dues = taken
    assert ids.dtype == np.uint32
    assert dues.dtype == np.int64
    return list(zip(dues.tolist(), ids.tolist(), strict=True))


def drain(index: DelayIndex, now_ms: int, limit: int) -> list[tuple[int, int]]:
    """Everything due by now, in the order taken."""
    every: list[tuple[int, int]] = []
    while more := pairs(index.take(now_ms, limit)):
        index._check()
        every += more
    return every


def buckets_of(index: DelayIndex) -> list[tuple[int, BitMap]]:
    """All entries by bucket of the grid, those of the window included; the index is as it was."""
    cutting = index.cut(1 << 32)
    cutting.arrange()
    whole: dict[int, BitMap] = {}
    for piece in cutting.more(1 << 40):
        whole[piece.start_ms] = whole.get(piece.start_ms, BitMap()) | BitMap.deserialize(piece.bitmap)
    return sorted(whole.items())


def as_packed(buckets: Iterable[tuple[int, BitMap]], limit_id: int) -> list[tuple[int, BitMap | PackedBucket]]:
    """The same buckets packed, as in the parts of a snapshot."""
    return [(start_ms, PackedBucket(ids.serialize(), len(ids), limit_id)) for start_ms, ids in buckets]


def pack_all(index: DelayIndex) -> int:
    """Have every bucket but the earliest packed; how many slices that took."""
    slices, after_ms = 1, index.pack()
    while after_ms is not None:
        slices, after_ms = slices + 1, index.pack(after_ms)
    return slices


def packed_in(index: DelayIndex) -> list[int]:
    """Where the buckets of an index start that are packed."""
    return [start_ms for start_ms, kept in index._buckets._bitmaps.items() if isinstance(kept, PackedBucket)]
