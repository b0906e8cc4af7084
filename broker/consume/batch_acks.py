"""Batches of which some messages are acknowledged: kept in memory, until all are.

A set has a bit for each message of a batch that is *not* acknowledged, as 64-bit words on the wire. Acknowledgements
cross on their way, so that sets are joined by AND.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_BATCHES = 50_000
"""Batches kept for a subscription; of what is over, the oldest is delivered whole when it comes again."""

MOST_WORDS = 1_024
"""Words of a set; a longer one is passed over."""

MOST_KEPT = 1_000
"""Subscriptions without a consumer whose sets are kept; of what is over, the one is forgotten that was left first."""

_WORD = 1 << 64


class BatchAcks:
    """Of one subscription, by place (`ledger_id << 32 | entry_id`)."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._left)

    def take(self, place: int, words: Sequence[int], messages: int | None) -> int:
        """Some messages of a batch are acknowledged; how many are left. messages: of the batch, where that is known."""
        if len(words) > MOST_WORDS:
            return messages or 1
        left = 0
        for at, word in enumerate(words):
            left |= word % _WORD << 64 * at
        if messages is not None:
            left &= (1 << min(messages, 64 * len(words))) - 1  # the size is what a client says
        before = self._left.get(place)
        if before is not None:
            left &= before
        if not left:
            self._left.pop(place, None)
            return 0
        if before is None and len(self._left) >= MOST_BATCHES:
            del self._left[next(iter(self._left))]
        self._left[place] = left
        return left.bit_count()

    def words(self, place: int) -> Sequence[int]:
        """The set of a batch for the wire; empty: nothing of it is acknowledged."""
        left = self._left.get(place)
        if left is None:
            return ()
        words = []
        while left:
            word = left & _WORD - 1
            words.append(word - _WORD if word >> 63 else word)
            left >>= 64
        return words

    def left(self, place: int) -> int | None:
        """How many messages of a batch are left; None: nothing of it is acknowledged."""
        found = self._left.get(place)
        return None if found is None else found.bit_count()

    def forget(self, place: int) -> None:
        """The entry is acknowledged."""
        self._left.pop(place, None)

    def forget_through(self, place: int) -> None:
        """All entries up to this one are acknowledged. O(batches kept)."""
        if self._left:
            self._left = {each: left for each, left in self._left.items() if each > place}

    def clear(self) -> None:
        """The subscription has moved."""
        self._left.clear()


class KeptBatchAcks:
    """Sets of subscriptions that have no consumer for now, by topic and subscription."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], BatchAcks] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: tuple[str, str], batches: BatchAcks) -> None:
        """The last consumer is gone."""
        if not batches:
            return
        self._kept[key] = batches
        if len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]

    def take(self, key: tuple[str, str]) -> BatchAcks:
        """A first consumer comes."""
        return self._kept.pop(key, None) or BatchAcks()
