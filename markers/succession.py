"""One delayed message after another under a record of the caller's: recurring messages.

The next message is appended to its partition as a conditional entry, on disk before anything points at it. Then one
main transaction changes the caller's record, admits the entry, and cancels the message before where it is still to be
replaced. A crash in between leaves an entry that never fires and the record as it was: none is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable

from ..store.clock import Clock
from ..store.env.environment import Environment
from ..store.env.reader_gate import ReaderGate
from ..store.env.transaction import Transaction
from ..store.log.managed_ledger import ManagedLedger
from ..store.position import MessageId
from .pending_entries import PendingEntries

NOTHING = MessageId(0, 0)
"""What a conditional entry replaces that replaces nothing: no ledger has this id."""

Record = Callable[[Transaction, MessageId | None], bool]
"""A unit of work that changes the caller's record, given the new message's id; False: nothing is to happen."""


class Succession:
    """Lets messages follow one another. Thread-safe."""

    def __init__(self, main: Environment, gate: ReaderGate, clock: Clock, entries: PendingEntries) -> None:
        """`gate`: the one that firing is alone in."""
        self._main = main
        self._gate = gate
        self._clock = clock
        self._entries = entries

    def succeed(
        self, log: ManagedLedger, old: MessageId | None, due_ms: int | None, body: bytes, record: Record
    ) -> bool:
        """Cancel `old` where it has not fired, schedule a message with `body` at `due_ms`, and `record` it; atomic.

        old None: nothing is cancelled. due_ms None: nothing is scheduled. False, with nothing done: `due_ms` has
        passed meanwhile, or `record` said so. Raises StoreFull, StoreFailed; then nothing is done either.
        """
        olds = [] if old is None else [old]
        dues = [] if due_ms is None else [due_ms]
        bodies = {} if due_ms is None else {0: body}
        with self._gate.reading():
            now_ms = self._clock.now_ms()
            if due_ms is not None and due_ms <= now_ms:
                return False
            with (
                self._entries.located(log, olds) as (logs, outcomes),
                self._entries.appended(log.topic_id, olds or [NOTHING], dues, bodies, now_ms) as new,
            ):
                new_id = MessageId(new[0].ledger_id, new[0].first_entry) if new else None
                self._entries.sync(logs)

                def work(transaction: Transaction) -> bool:
                    goes = record(transaction, new_id)
                    if goes:
                        for found in logs:
                            self._entries.cancel(transaction, log.topic_id, found, outcomes)
                    for appended in new:
                        self._entries.admit(transaction, log.topic_id, appended, {0} if goes else set())
                    return goes

                return self._main.write(work)
