"""One delayed message after another under a record of the caller's: recurring messages, and those that replace others.

The next message is appended to its partition as a conditional entry, on disk before anything points at it. Then one
main transaction changes the caller's record, admits the entry, and cancels the message before where it is still to be
replaced. A crash in between leaves an entry that never fires and the record as it was: none is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable

from ..partitions.partition import Partition
from ..store.clock import Clock
from ..store.codec.sent_ids import IN_MAIN
from ..store.env.environment import Environment
from ..store.env.reader_gate import ReaderGate
from ..store.env.transaction import Transaction
from ..store.log.managed_ledger import ManagedLedger
from ..store.position import MessageId
from .pending_entries import Outcome, PendingEntries
from .withdrawal import append_due

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

    def replace(
        self,
        log: ManagedLedger,
        old: MessageId,
        known: Partition,
        due_ms: int,
        body: bytes,
        record: Callable[[Transaction, int, MessageId], None],
    ) -> tuple[MessageId, bool]:
        """Cancel `old`, of the partition `known`, where it has not fired, and send another in its place; atomic.

        `record` is a unit of work, given the start of the partition of the new message, IN_MAIN where it is due, and
        its id. Returns that, and whether `old` was cancelled. Raises StoreFull, StoreFailed, and what `record` does;
        then nothing is done.
        """
        with self._gate.reading():
            now_ms = self._clock.now_ms()
            with (
                self._entries.located(log, [old], known) as (logs, outcomes),
                self._entries.appended(log.topic_id, [old], [due_ms], {0: body}, now_ms) as new,
            ):
                self._entries.sync(logs)

                def work(transaction: Transaction) -> tuple[MessageId, bool]:
                    for found in logs:
                        self._entries.cancel(transaction, log.topic_id, found, outcomes)
                    start_ms = new[0].partition.start_ms if new else IN_MAIN
                    if new:
                        new_id = self._entries.admit(transaction, log.topic_id, new[0], {0})[0]
                    else:
                        new_id = append_due(transaction, log, [0], {0: body}, now_ms)[0]
                    record(transaction, start_ms, new_id)
                    return new_id, outcomes[0] is Outcome.CANCELLED

                return self._main.write(work)
