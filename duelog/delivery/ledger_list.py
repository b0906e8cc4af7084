"""The main log as acknowledging and dispatching see it: its ledgers, how long each is, and its messages.

Owns the questions, not the answers: the main log keeps the ledgers (``managed_ledger.py``), a reader its messages
(``due_reader.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pyroaring import BitMap

from duelog.markers.reader import Unacknowledged
from duelog.store.position import Position
from duelog.store.received_messages import ReceivedMessages


class LedgerList(Protocol):
    """A topic's ledgers: ids increase, each holds entries 0 to n - 1, only the last may be empty or still grow."""

    def entries_of(self, ledger_id: int) -> int | None:
        """Committed number of entries; None if there is no such ledger (it was trimmed or never existed)."""
        ...

    def following(self, ledger_id: int) -> int | None:
        """The least ledger id over ``ledger_id``, which may be any number; None if there is none."""
        ...


class LogReader(Protocol):
    """The engine's way to the messages of the main log; markers are resolved, ``redelivery_count`` is ignored."""

    def read(self, start: Position, max_entries: int, skip: Unacknowledged) -> tuple[ReceivedMessages, Position]:
        """The next messages in log order from ``start`` on, and one past the last entry that was looked at.

        At most ``max_entries`` messages, none that ``skip`` has acknowledged, none that cannot be read. ``start``
        may be past the end of its ledger. No messages and ``start`` itself: there is nothing more for now.
        A reader may pass over a message and return it later, from before ``start``; it returns each message once
        until a seek. If it raises, it has returned nothing.
        """
        ...

    def read_at(self, positions: Sequence[Position]) -> ReceivedMessages:
        """The messages at these ascending positions in the same order, without those that cannot be read."""
        ...

    def unseen(self, start: Position, limit: Position) -> Mapping[int, BitMap]:
        """Entries before ``limit``, by ledger id, that were not returned because they are, or were, not due yet.

        ``start`` is where the next ``read`` begins. No bitmap is empty.
        """
        ...
