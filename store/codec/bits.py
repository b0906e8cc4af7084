"""Records that are roaring bitmaps, and changes of them.

The members of SEQUENCE are numbers of 64 bits, those of other tables entry ids. One without members is no record.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from pyroaring import BitMap, BitMap64

from .format import Table

Bits: TypeAlias = Any
"""A BitMap, or in SEQUENCE a BitMap64: they have no type in common."""


_SEQUENCE: int = Table.SEQUENCE
_NONE, _NONE_64 = BitMap(), BitMap64()


def bits_of(key: bytes, fields: bytes | None) -> Bits:
    """The members of the record of a key; None: it has none. Not to be changed."""
    if key[0] == _SEQUENCE:
        return _NONE_64 if fields is None else BitMap64.deserialize(fields)
    return _NONE if fields is None else BitMap.deserialize(fields)


def bitmap(members: Sequence[int]) -> BitMap:
    """A bitmap with these members: a sequence of one is read in less time than BitMap takes. Raises OverflowError."""
    if len(members) != 1:
        return BitMap(members)
    one = BitMap()
    one.add(members[0])
    return one


class BitChange(NamedTuple):
    """A change of a bitmap: members of `taken` are taken from it, those of `united` come in. No member is in both.

    whole: no others are left in it. Bitmaps are not changed once they are in one.
    """

    united: Bits
    taken: Bits
    whole: bool = False

    def then(self, later: "BitChange") -> "BitChange":
        """This change and one behind it, as one."""
        if later.whole:
            return later
        united, taken = self.united, self.taken
        if later.taken:
            united, taken = united - later.taken, taken | later.taken
        if later.united:
            united, taken = united | later.united, taken - later.united if taken else taken
            united.run_optimize()  # numbers that follow each other are a run, which costs nothing to copy
        return BitChange(united, taken, self.whole)

    def members(self, before: Bits) -> Bits:
        """The members of the bitmap that had `before`."""
        if self.whole:
            return self.united
        return (before - self.taken) | self.united if self.taken else before | self.united

    def fields(self, key: bytes, before: bytes | None) -> bytes | None:
        """The fields of the record of a key that had `before`; None: there is none any more."""
        after = self.members(bits_of(key, None if self.whole else before)).copy()
        after.run_optimize()
        return bytes(after.serialize()) if after else None
