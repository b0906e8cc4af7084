"""Entries that could not be read: counted, kept with their reasons, never delivered and never acknowledged.

A quarantined entry holds its ledger and its partition, so that nothing is removed before an operator
has looked: `duelog check` lists them, `duelog repair` discards them.
"""

import logging
import threading
from collections.abc import Sequence

from ..store.codec import format as fmt
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.errors import CorruptEntry
from ..store.limited_log import LimitedLog
from ..store.listener import StoreListener, tell

_log = logging.getLogger("duelog.maintenance")


class Quarantine:
    """The quarantined entries met while a store is open; written to the main environment by `flush`."""

    def __init__(self, main: Environment, listeners: Sequence[StoreListener] = ()) -> None:
        self._main = main
        self._listeners = listeners
        self._lock = threading.Lock()
        self._log = LimitedLog(_log)
        self._known: dict[tuple[int, int], str] = {}
        self._unwritten: dict[tuple[int, int], str] = {}

    def add(self, error: CorruptEntry) -> bool:
        """Note an unreadable entry; False when it was known."""
        address = (error.ledger_id, error.entry_id)
        with self._lock:
            if address in self._known:
                return False
            self._known[address] = self._unwritten[address] = f"{error.environment}: {error.reason}"
        tell(self._listeners, StoreListener.quarantined)
        text = "%s: quarantined, not delivered and not acknowledged (`duelog check` lists it): %s"
        self._log.log(logging.WARNING, text, self._main.path.parent, error)
        return True

    def items(self) -> list[tuple[int, int, str]]:
        with self._lock:
            return [(ledger_id, entry_id, reason) for (ledger_id, entry_id), reason in self._known.items()]

    def flush(self) -> None:
        """Write the new entries. Raises StoreFull, StoreFailed; then the next call writes them."""
        with self._lock:
            unwritten = dict(self._unwritten)
        if not unwritten:
            return

        def work(transaction: Transaction) -> None:
            for (ledger_id, entry_id), reason in unwritten.items():
                transaction.put(fmt.quarantine_key(ledger_id, entry_id), reason.encode()[:1000])

        self._main.write(work)
        with self._lock:
            for address in unwritten:
                del self._unwritten[address]
