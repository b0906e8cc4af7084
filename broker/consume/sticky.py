"""How a Key_Shared subscription divides sticky hashes among its consumers: by itself, or by ranges that they name.

Source of the rules: Apache Pulsar, HashRangeExclusiveStickyKeyConsumerSelector and KeySharedMeta.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..protocol.entry import HASH_RANGE
from ..protocol.failures import Refused, ServerError
from ..protocol.parts import KeySharedMeta, KeySharedMode

Range = tuple[int, int]
"""First and last sticky hash."""


class KeySharing(NamedTuple):
    """What a consumer asks for."""

    ranges: tuple[Range, ...] | None
    """The sticky hashes that it is to have; None: the subscription divides them."""
    out_of_order: bool
    """Messages of one key may be with several consumers."""

    @classmethod
    def of(cls, asked: KeySharedMeta | None) -> KeySharing:
        """What SUBSCRIBE says. Raises Refused."""
        if asked is None:
            return cls(None, False)
        if asked.mode == KeySharedMode.AUTO_SPLIT:
            return cls(None, asked.allow_out_of_order)
        if not asked.ranges:
            raise Refused(ServerError.CONSUMER_ASSIGN, "sticky ranges are asked for, and none is named")
        ranges = tuple(sorted((each.start, each.end) for each in asked.ranges))
        for start, end in ranges:
            if not 0 <= start <= end < HASH_RANGE:
                raise Refused(ServerError.CONSUMER_ASSIGN, f"{start} to {end} is no range of 0 to {HASH_RANGE - 1}")
        _check_apart(ranges, ranges[1:])
        return cls(ranges, asked.allow_out_of_order)

    def check_beside(self, others: Iterable[KeySharing]) -> None:
        """Raise Refused where consumers that are there do not go with it."""
        for other in others:
            if (self.ranges is None) != (other.ranges is None) or self.out_of_order != other.out_of_order:
                raise Refused(ServerError.CONSUMER_BUSY, "the subscription's consumers divide keys in another way")
            if self.ranges is not None and other.ranges is not None:
                for start, end in self.ranges:
                    for first, last in other.ranges:
                        if start <= last and first <= end:
                            message = f"{start} to {end} overlaps {first} to {last} of another consumer"
                            raise Refused(ServerError.CONSUMER_ASSIGN, message)


def _check_apart(ranges: Iterable[Range], following: Iterable[Range]) -> None:
    for (start, end), (first, last) in zip(ranges, following, strict=False):
        if first <= end:
            raise Refused(ServerError.CONSUMER_ASSIGN, f"{start} to {end} overlaps {first} to {last}")
