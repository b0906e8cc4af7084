"""Which consumer of a key-shared subscription a key, or a number that stands for it, belongs to.

Unless consumers name ranges, a number falls into one of 4,096 slots, and a slot belongs to the consumer with the
highest score for it (rendezvous hashing). When a consumer comes or goes, only the slots that it takes or leaves move.
Stable across processes and restarts: the same keys and consumer ids give the same owners.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from duelog.store.errors import InvalidArgument

SLOTS = 4096
_AT_ONCE = 16
"""Consumers whose scores are in memory at once: half a MB."""

NUMBERS = 65_536
"""Numbers count modulo this in ranges; a multiple of SLOTS."""


class Parts(str):
    """A key of messages of which one is of use with the others only: they stay with the consumer that holds one.

    Other keys move when consumers come and go, as soon as nothing of them is held; one of which a consumer awaits the
    rest would never. Where no consumer's ranges have it, some consumer gets it.
    """

    __slots__ = ()


class PartsOfKey(int):
    """The number of a key, of a message of which the parts are of use together only: the key stays as `Parts` do."""

    __slots__ = ()


Ranges = Sequence[tuple[int, int]]
OrderBy = Callable[[bytes, str | None], int | str | None]


@dataclass(frozen=True, slots=True)
class KeyShared:
    """How a consumer takes part in a key-shared subscription, or a shared one that keeps some messages together.

    order_by: given a message's payload and key, the number or text that stands for its key, always the same for one
    message, or None for a message that goes to any consumer; None: the key itself. It is called inside the store's
    locks and calls nothing of the store; a message for which it raises goes to any consumer. ranges: inclusive ranges
    of numbers within 0 to 65,535 that are this consumer's, of numbers modulo 65,536; the number of a text is its
    BLAKE2b hash (8 bytes, big-endian). What is in no consumer's range waits for one. None: the consumers share all
    numbers out among themselves. out_of_order: the messages of a key go to its owner while another
    consumer holds earlier ones, so that a key moves at once. may_order: given the payloads of some messages, False if
    `order_by` gives None for each of them, which is quicker than to ask it of each. All consumers of a subscription
    have the same `order_by` and `out_of_order`, and either all have ranges, none of which overlap, or none has.

    A shared subscription takes `order_by` alone: messages for which it gives the same go to one consumer at a time, in
    order, all others to any. Consumers that name none leave that to those that do.
    """

    order_by: OrderBy | None = None
    ranges: Ranges | None = None
    out_of_order: bool = False
    may_order: Callable[[Sequence[bytes]], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("order_by", "may_order"):
            called = getattr(self, name)
            if called is not None and not callable(called):
                raise InvalidArgument(name, called, "expected something to be called, or None")
        if not isinstance(self.out_of_order, bool):
            raise InvalidArgument("out_of_order", self.out_of_order, "expected a bool")
        if self.ranges is not None:
            object.__setattr__(self, "ranges", _checked(self.ranges))

    def goes_with(self, other: KeyShared) -> bool:
        """Return True if one subscription may have consumers of both; overlapping ranges are not checked here."""
        return (
            self.order_by == other.order_by
            and self.out_of_order == other.out_of_order
            and (self.ranges is None) == (other.ranges is None)
        )


def _checked(ranges: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(ranges, Iterable):
        raise InvalidArgument("ranges", ranges, "expected (first, last) pairs, or None")
    found = tuple(tuple(each) if isinstance(each, Iterable) else () for each in ranges)
    for each in found:
        if len(each) != 2 or set(map(type, each)) != {int} or not 0 <= each[0] <= each[1] < NUMBERS:
            raise InvalidArgument("ranges", ranges, f"expected (first, last) pairs, 0 <= first <= last < {NUMBERS}")
    if not found:
        raise InvalidArgument("ranges", ranges, "expected at least one")
    pairs = tuple(sorted((first, last) for first, last in found))
    check_apart(pairs, ())
    return pairs


def check_apart(ranges: Ranges, others: Ranges) -> None:
    """Raise InvalidArgument where ranges overlap each other, or those of `others`, which do not overlap each other."""
    last_pair = (-1, -1)
    for pair in sorted([*ranges, *others]):
        if pair[0] <= last_pair[1]:
            raise InvalidArgument("ranges", list(ranges), f"{pair} and {last_pair} overlap")
        last_pair = pair


class KeySlots:
    """The owner of every key, for one list of consumers."""

    def __init__(
        self, consumers: Sequence[int] = (), ranges: Mapping[int, Ranges] | None = None, before: KeySlots | None = None
    ) -> None:
        """consumers: ids from 0 to 2**63 - 1, in any order.

        ranges: those of each consumer, where they have any. before: the owners for another list of consumers: then
        O(slots) for each consumer that is new, and for all that are gone together; else for every consumer, some 30 us.
        """
        self.consumers = frozenset(consumers)
        self._ranges = sorted((*pair, each) for each in consumers for pair in (ranges or {}).get(each, ()))
        self._best = np.zeros(SLOTS, np.uint64)
        self._owner_of = np.zeros(SLOTS, np.int64)
        known: frozenset[int] = frozenset()
        if not self._ranges:
            if before is not None and not before._ranges:
                known = before.consumers
                self._best, self._owner_of = before._best.copy(), before._owner_of.copy()
            lost = np.flatnonzero(np.isin(self._owner_of, list(known - self.consumers)))
            self._best[lost] = 0
            self._compete(known & self.consumers, lost)
            self._compete(self.consumers - known, np.arange(SLOTS))
        self._owners: list[int] = self._owner_of.tolist()

    def _compete(self, consumers: frozenset[int], slots: npt.NDArray[np.intp]) -> None:
        """Give each of these slots to the consumer with the highest score for it, if it is higher than the best yet."""
        ids = np.array(sorted(consumers), np.uint64)
        for start in range(0, len(ids) if len(slots) else 0, _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            scores = _scores(some, slots)
            at = scores.argmax(axis=0)
            best = scores[at, np.arange(len(slots))]
            higher = best >= self._best[slots]
            self._best[slots[higher]] = best[higher]
            self._owner_of[slots[higher]] = some[at[higher]]

    def owner_of(self, name: str | int) -> int | None:
        """The consumer that a key belongs to; None if it is no consumer's. O(1), with ranges O(log of them)."""
        if not self.consumers:
            return None
        number = name if isinstance(name, int) else int.from_bytes(blake2b(name.encode(), digest_size=8).digest())
        if not self._ranges:
            return self._owners[number % SLOTS]
        number %= NUMBERS
        at = bisect_right(self._ranges, (number, NUMBERS, 0)) - 1
        return self._ranges[at][2] if at >= 0 and number <= self._ranges[at][1] else None


def _scores(consumers: npt.NDArray[np.uint64], slots: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
    """A 64-bit score of each consumer (rows) for each slot, as good as random: SplitMix64, of two multiples."""
    by_slot = slots.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed: npt.NDArray[np.uint64] = (consumers * np.uint64(0x9E3779B97F4A7C15))[:, None] + by_slot
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed
