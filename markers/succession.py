"""One delayed message after another under a record of the caller's: recurring messages.

The next message is appended to its partition as a conditional entry, on disk before anything points at it. Then one
main transaction changes the caller's record, admits the entry, and cancels the message before where it is still to be
replaced. A crash in between leaves an entry that never fires and the record as it was: none is lost or doubled.
"""

from __future__ import annotations

from collections.abc import Callable

from ..partitions.partition import Partition
from ..store.env.transaction import Transaction
from ..store.log.managed_ledger import ManagedLedger
from ..store.position import MessageId
from .withdrawal import Outcome, Withdrawals, _Log

NOBODY = MessageId(0, 0)
"""What a conditional entry replaces that replaces nothing: no ledger has this id."""

Record = Callable[[Transaction, MessageId | None], bool]
"""A unit of work that changes the caller's record, given the new message's id; False: nothing is to happen."""


class Succession(Withdrawals):
    """Lets messages follow one another. Thread-safe."""

    def succeed(
        self, log: ManagedLedger, old: MessageId | None, due_ms: int | None, body: bytes, record: Record
    ) -> bool:
        """Cancel `old` where it has not fired, schedule a message with `body` at `due_ms`, and `record` it; atomic.

        old None: nothing is cancelled. due_ms None: nothing is scheduled. False, with nothing done: `due_ms` has
        passed meanwhile, or `record` said so. Raises StoreFull, StoreFailed; then nothing is done either.
        """
        with self._firing.gate.reading():
            now_ms = self._clock.now_ms()
            if due_ms is not None and due_ms <= now_ms:
                return False
            logs: list[_Log] = []
            outcomes: list[Outcome] = []
            if old is not None:
                logs, outcomes = self._locate(log, [old])
            leased: list[Partition] = []
            try:
                new = []
                if due_ms is not None:
                    bodies = {0: body}
                    new = self._append_conditional(log.topic_id, [old or NOBODY], [due_ms], bodies, now_ms, leased)
                new_id = MessageId(new[0].ledger_id, new[0].first_entry) if new else None
                self._sync(logs)

                def work(transaction: Transaction) -> bool:
                    goes = record(transaction, new_id)
                    if goes:
                        for found in logs:
                            self._cancel_in(transaction, log.topic_id, found, outcomes)
                    for appended in new:
                        self._admit_in(transaction, log.topic_id, appended, {0} if goes else set(), {})
                    return goes

                return self._main.write(work)
            finally:
                self._give_back(logs)
                for partition in leased:
                    self._partitions.release(partition)
