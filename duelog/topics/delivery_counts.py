"""How many messages a subscription was handed, acknowledged and lost to other ends since its store was opened.

Counted by the batch, with the subscription's lock in hand; statistics and metrics read the same numbers.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

from duelog.store.received_messages import ReceivedMessages


@dataclass(slots=True)
class DeliveryCounts:
    """received: handed to consumers, each time again. redelivered: those of them that had been handed out before.

    acknowledged: by consumers, and skipped. dead_lettered: moved to the dead-letter topic. expired: acknowledged
    because their time to live was over. None counts twice among the last three.
    """

    received: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    dead_lettered: int = 0
    expired: int = 0

    def hand_out(self, batch: ReceivedMessages) -> None:
        """A consumer is handed a batch."""
        self.received += len(batch)
        counts = batch.redelivery_counts
        if any(counts):
            self.redelivered += len(counts) - counts.count(0)

    def __add__(self, other: DeliveryCounts) -> DeliveryCounts:
        return DeliveryCounts(*map(operator.add, astuple(self), astuple(other)))
