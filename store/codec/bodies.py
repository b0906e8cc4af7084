"""The encoded bodies of a batch, as columns.

The bodies of bare messages that are of one size begin alike (body.py): the beginning is kept once, and joined to each
payload only in the value of the run that it is written in. So a payload is copied once on its way to LMDB.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import itemgetter
from typing import overload

import numpy as np
import numpy.typing as npt

from .checksum import crc32

Buffer = bytes | bytearray | memoryview
"""Bytes to read, in any buffer."""

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]


class Bodies(Sequence[bytes]):
    """Bodies in order: each is `head`, then what stands in `rests`.

    each: bytes of a body, where all are known to be of one size.
    """

    __slots__ = ("each", "head", "rests")

    def __init__(self, rests: list[bytes], head: bytes = b"", each: int | None = None) -> None:
        self.rests = rests
        self.head = head
        self.each = each

    @classmethod
    def of(cls, bodies: Sequence[bytes]) -> "Bodies":
        return bodies if isinstance(bodies, Bodies) else cls(list(bodies))

    def __len__(self) -> int:
        return len(self.rests)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> "Bodies": ...

    def __getitem__(self, index: int | slice) -> "bytes | Bodies":
        if isinstance(index, slice):
            return Bodies(self.rests[index], self.head, self.each)
        return self.head + self.rests[index]

    def __iter__(self) -> Iterator[bytes]:
        return map(self.head.__add__, self.rests) if self.head else iter(self.rests)

    def pick(self, rows: Sequence[int]) -> "Bodies":
        rests = list(itemgetter(*rows)(self.rests)) if len(rows) > 1 else [self.rests[row] for row in rows]
        return Bodies(rests, self.head, self.each)

    def total(self) -> int:
        if self.each is not None:
            return self.each * len(self.rests)
        return sum(map(len, self.rests)) + len(self.head) * len(self.rests)

    def sizes(self) -> Int64s:
        if self.each is not None:
            return np.full(len(self.rests), self.each, dtype=np.int64)
        sizes = np.fromiter(map(len, self.rests), dtype=np.int64, count=len(self.rests))
        return sizes + len(self.head) if self.head else sizes

    def ends(self) -> UInt32s:
        """The end of each body, counted from where the first begins."""
        if self.each:
            return np.arange(self.each, self.each * (len(self.rests) + 1), self.each, dtype="<u4")
        return np.cumsum(self.sizes()).astype("<u4")

    def checksums(self) -> bytes:
        """The CRC-32 of each body, as a column of little-endian u32."""
        rests = self.rests
        found = map(crc32, rests, repeat(crc32(self.head))) if self.head else map(crc32, rests)
        return struct.pack(f"<{len(rests)}I", *found)  # numpy takes half as long again to gather them

    def parts(self) -> list[bytes]:
        """The pieces that give all bodies when joined, one after the other."""
        if not self.head:
            return self.rests
        parts = [self.head] * (2 * len(self.rests))
        parts[1::2] = self.rests
        return parts
