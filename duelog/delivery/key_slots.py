"""Which consumer a key belongs to.

A key falls into one of 4,096 slots by its BLAKE2b hash; a slot belongs to the consumer with the highest score for it
(rendezvous hashing). When a consumer comes or goes, only the slots that it takes or leaves move. Stable across
processes and restarts: the same keys and consumer ids give the same owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

SLOTS = 4096


class KeySlots:
    """The owner of every slot, for one list of consumers."""

    def __init__(self, consumers: Sequence[int] = ()) -> None:
        """consumers: ids from 0 to 2**63 - 1, in any order. O(slots * consumers), some 50 us for each."""
        self.consumers = frozenset(consumers)
        best = np.zeros(SLOTS, np.uint64)
        owners = np.zeros(SLOTS, np.int64)
        for consumer_id in consumers:
            scores = _scores(consumer_id)
            higher = scores >= best
            best[higher] = scores[higher]
            owners[higher] = consumer_id
        self._owners: list[int] = owners.tolist()

    def owner_of(self, name: str) -> int | None:
        """The consumer that a key belongs to; None if there are no consumers. O(1)."""
        if not self.consumers:
            return None
        return self._owners[int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) % SLOTS]


def _scores(consumer_id: int) -> npt.NDArray[np.uint64]:
    """A 64-bit score for each slot, as good as random and always the same for one consumer id."""
    scores: npt.NDArray[np.uint64] = np.random.Philox(key=consumer_id).random_raw(SLOTS)
    return scores
