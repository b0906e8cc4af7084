"""Which message a consumer is handed next. Here: any, in log order; ``key_order.py`` adds order by key.

Owns the positions that are ready: due for redelivery, or read from the log and kept back. The dispatcher tells it of
every change of a message's place; a message is ready, held by a consumer, awaiting redelivery, or gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyroaring import BitMap

from duelog.store.position import Position
from duelog.store.received_messages import ReceivedMessages

from .key_slots import Ranges
from .position_set import PositionSet


class DeliveryOrder:
    """Exclusive, failover and shared subscriptions: redeliveries in log order to the first consumer that asks."""

    def __init__(self) -> None:
        self._anyone = PositionSet()

    def __len__(self) -> int:
        """Number of positions that are ready, whether or not they may be handed out just now."""
        return len(self._anyone)

    @property
    def kept_back(self) -> int:
        """How many of them were read from the log and never handed out."""
        return 0

    def set_consumers(self, consumers: Sequence[int], ranges: Mapping[int, Ranges] | None = None) -> None:
        """These are the consumers now; ranges: of keys, where consumers have any."""

    def peek(self, consumer_id: int, count: int) -> list[Position]:
        """The first ``count`` ready positions that this consumer may have now; they stay where they are."""
        return self._anyone.first(count)

    def look_ahead(self, count: int) -> int:
        """How many of ``count`` messages may be read from the log now."""
        return count

    def admit(self, consumer_id: int, messages: ReceivedMessages) -> ReceivedMessages:
        """New messages from the log, asked for by this consumer: those that it may have; the rest becomes ready."""
        return messages

    def handed_out_before(self, messages: ReceivedMessages) -> Sequence[int]:
        """Which of these ready messages were handed out before, by their places in the batch."""
        return range(len(messages))

    def hand_out(self, consumer_id: int, messages: ReceivedMessages) -> None:
        """The consumer has these now, which ``admit`` or ``peek`` allowed it."""
        if self._anyone:
            for position in messages.positions:
                self._anyone.discard(position)

    def taken_back(self, ledger_id: int, entries: BitMap) -> None:
        """Entries that a consumer held await redelivery now."""

    def fell_due(self, ledger_id: int, entries: BitMap) -> None:
        """Entries that waited for their time are ready now."""
        self._anyone.update(ledger_id, entries)

    def forget(self, ledger_id: int, entries: BitMap) -> None:
        """Entries are acknowledged or cannot be read, wherever they were."""
        self._anyone.remove(ledger_id, entries)

    def forget_through(self, position: Position) -> None:
        """Everything at or before ``position`` is acknowledged or gone, wherever it was."""
        self._anyone.remove_through(position)

    def clear(self) -> None:
        """Nothing is ready, held or awaiting redelivery; the consumers stay."""
        self._anyone.clear()

    def ready(self) -> set[Position]:
        """A copy of what is ready, for checks and tests. O(positions)."""
        return set(self._anyone)

    def _check(self) -> None:
        self._anyone._check()
