"""What acknowledgements and dispatching ask of a topic's main log: its ledgers, and how long each is.

Owns the question, not the answer: the main log keeps the ledgers (``managed_ledger.py``).
"""

from __future__ import annotations

from typing import Protocol


class LedgerList(Protocol):
    """A topic's ledgers: ids increase, each holds entries 0 to n - 1, only the last may be empty or still grow."""

    def entries_of(self, ledger_id: int) -> int | None:
        """Committed number of entries; None if there is no such ledger (it was trimmed or never existed)."""
        ...

    def following(self, ledger_id: int) -> int | None:
        """The least ledger id over ``ledger_id``, which may be any number; None if there is none."""
        ...
