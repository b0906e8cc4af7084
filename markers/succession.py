"""One delayed message after another under a record of the caller's: recurring messages, and those that replace others.

The next message is appended to its partition as a conditional entry, on disk before anything points at it. Then one
main transaction changes the caller's record, admits the entry, cancels the message before where it is still to be
replaced, and appends those to the main log whose time has passed. A crash in between leaves an entry that never fires
and the record as it was: none is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

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

Record = Callable[[Transaction, tuple[MessageId, int] | None, bool], bool]
"""A unit of work that changes the caller's record; False: nothing is to happen.

It is given the new message's id and due time, and whether the message before is withdrawn, that is, had not fired.
"""


class Passed(NamedTuple):
    """A message whose due time has passed."""

    due_ms: int
    body: bytes


class Succession:
    """Lets messages follow one another. Thread-safe."""

    def __init__(self, main: Environment, gate: ReaderGate, clock: Clock, entries: PendingEntries) -> None:
        """`gate`: the one that firing is alone in."""
        self._main = main
        self._gate = gate
        self._clock = clock
        self._entries = entries

    def is_pending(self, log: ManagedLedger, message_id: MessageId) -> bool:
        """Whether a message has neither fired nor been cancelled."""
        with self._gate.reading(), self._entries.located(log, [message_id]) as (logs, outcomes):
            return self._entries.states(log.topic_id, logs, outcomes)[0] is None

    def succeed(
        self,
        log: ManagedLedger,
        old: MessageId | None,
        due_ms: int | None,
        body: bytes,
        record: Record,
        passed: Sequence[Passed] = (),
    ) -> bool:
        """Cancel `old` where it has not fired, schedule a message with `body` at `due_ms`, and `record` it; atomic.

        old None: nothing is cancelled. due_ms None: nothing is scheduled; a time that has passed meanwhile is at once.
        passed: messages that are appended to the main log with it, for their time has passed. False, with nothing
        done: `record` said so. Raises StoreFull, StoreFailed; then nothing is done either.
        """
        olds = [] if old is None else [old]
        bodies = {} if due_ms is None else {0: body}
        with self._gate.reading():
            now_ms = self._clock.now_ms()
            dues = [] if due_ms is None else [max(due_ms, now_ms + 1)]
            with (
                self._entries.located(log, olds) as (logs, outcomes),
                self._entries.appended(log.topic_id, olds or [NOTHING], dues, bodies, now_ms) as new,
            ):
                added = (MessageId(new[0].ledger_id, new[0].first_entry), dues[0]) if new else None
                withdrawn = None in self._entries.states(log.topic_id, logs, outcomes) if olds else False
                self._entries.sync(logs)

                def work(transaction: Transaction) -> bool:
                    goes = record(transaction, added, withdrawn)
                    if goes:
                        for found in logs:
                            self._entries.cancel(transaction, log.topic_id, found, outcomes)
                    for appended in new:
                        self._entries.admit(transaction, log.topic_id, appended, {0} if goes else set())
                    if goes and passed:
                        dues_passed = np.array([each.due_ms for each in passed], dtype=np.int64)
                        log.append_messages(transaction, dues_passed, [each.body for each in passed], now_ms)
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
