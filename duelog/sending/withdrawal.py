"""Cancelling and rescheduling: what has not fired is taken back, with a truthful answer.

The answer comes from the transaction that records it: the entry is cancelled if the frontier in that
transaction has not passed it, and nothing is on its way into the main log meanwhile (pending_entries.py).

What has a deduplication key takes its record along: the transaction that cancels a message frees its key, or points it
to the message that takes its place.

Rescheduling cancels the old entry and appends the message to the partition of its new due time in one transaction; a
new due time that has come already needs no partition, the message goes into the main log.

Recurring messages, and those that replace others, follow one another under a record of the caller's: one transaction
changes the record, cancels the message before where it is still to be replaced, and appends the next one (`replacing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duelog.markers.lookup import find_marker
from duelog.markers.pending_entries import FoundEntries, Outcome, PendingEntries, Placed, Successors
from duelog.partitions.partition import Partition
from duelog.store.clock import Clock
from duelog.store.codec import format as fmt
from duelog.store.codec.format import Table
from duelog.store.codec.sent_ids import KeyRecord, dedup_key_of, sent_key
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction, Work
from duelog.store.errors import checked_list
from duelog.store.held import Held
from duelog.store.listener import StoreListener, tell
from duelog.store.log import catalog
from duelog.store.message import AnyId, id_of
from duelog.store.position import MessageId, Position

from ..topics.inline import InlineMessages
from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies

_STATES = {
    None: "scheduled",
    Outcome.ALREADY_CANCELLED: "cancelled",
    Outcome.FIRED: "fired",
    Outcome.UNKNOWN: "unknown",
}


@dataclass(eq=False, repr=False)
class Withdrawals:
    """Takes messages back from the partition logs of a store, as the methods of `Topic` document. Thread-safe."""

    _main: Environment
    _clock: Clock
    _entries: PendingEntries
    _policies: DelayPolicies
    _inline: InlineMessages
    _listeners: Sequence[StoreListener]

    def fetch(
        self, topic: TopicState, ids: Sequence[MessageId], *, moved: bool = False, keyed: bool | None = None
    ) -> None:
        """Fetch what is away and cancelling messages reads, or moving them. The firing gate is not held.

        keyed: as of `cancelling`.
        """
        self._entries.fetch(topic.log, ids, bodies=moved or (self._has_keys(topic) if keyed is None else keyed))

    def _has_keys(self, topic: TopicState) -> bool:
        """Return True if a message with a key was ever sent to the topic, as far as records show."""
        if topic.has_keys is None:
            prefix = fmt.prefix(Table.KEY, topic.topic_id)
            with self._main.read() as raw:
                topic.has_keys = topic.has_keys or any(True for _ in catalog.keys(raw, prefix))
        return topic.has_keys

    def cancel(self, topic: TopicState, message_ids: Sequence[AnyId]) -> list[Outcome]:
        """Cancel messages and return the outcome of each."""
        ids = list(map(id_of, checked_list("message_ids", message_ids, "ids of messages")))
        with Held() as held:
            return self._main.write(self.cancelling(held, topic, ids), makes_space=True)

    def cancelling(
        self,
        held: Held,
        topic: TopicState,
        ids: Sequence[MessageId],
        known: Partition | None = None,
        *,
        keyed: bool | None = None,
    ) -> Work[list[Outcome]]:
        """The unit of work of `cancel`, written before `held` ends; listeners hear of it then.

        known: the partition that all are in. keyed: some may have deduplication keys, which are free then; None: if
        any was sent to the topic.

        CANCELLED and ALREADY_CANCELLED: it is never delivered. FIRED: it is in the main log. UNKNOWN: the
        topic has no such message, or none any more.
        """
        keyed, log = self._has_keys(topic) if keyed is None else keyed, topic.log
        self._entries.fetch(log, ids, known, bodies=keyed)
        self._entries.enter_gate(held)
        logs, outcomes = self._entries.located(held, log, ids, known, bodies=keyed)
        # a key whose message cannot be read holds no more once that is cancelled, recorded or not
        keys = _keys(_bodies(logs)) if keyed else {}

        def told() -> None:
            tell(self._listeners, StoreListener.cancelled, topic.name, outcomes.count(Outcome.CANCELLED))

        def work(transaction: Transaction) -> list[Outcome]:
            for found in logs:
                self._entries.cancel(transaction, log.topic_id, found, outcomes)
            for row, key in keys.items():
                if outcomes[row] is Outcome.CANCELLED:
                    _free(transaction, sent_key(log.topic_id, key), ids[row])
            return outcomes

        held.stored.append(told)
        return work

    def states(
        self, topic: TopicState, ids: Sequence[MessageId], known: Partition | None = None
    ) -> list[Outcome | None]:
        """Return the outcomes that `cancel` would give, None for a message that it would cancel. Changes nothing."""
        self._entries.fetch(topic.log, ids, known)
        with Held() as held:
            self._entries.enter_gate(held)
            return self._entries.states(topic.topic_id, *self._entries.located(held, topic.log, ids, known))

    def state(self, topic: TopicState, message_id: AnyId) -> str:
        """Return "scheduled", "cancelled", "fired" or "unknown"."""
        checked = id_of(message_id)
        outcome = self.states(topic, [checked])[0]
        return "scheduled" if self._inline.is_hidden(topic, checked) else _STATES[outcome]

    def position_of(self, topic: TopicState, message_id: AnyId) -> Position | None:
        """Return the position of a message in the main log, of its marker if it has fired; None: it has none."""
        log, checked = topic.log, id_of(message_id)
        in_main = log.entries_of(checked.ledger_id)
        if in_main is not None:
            return checked if 0 <= checked.entry_id < in_main else None
        self._entries.fetch(log, [checked], dues=True)
        with Held() as held:
            self._entries.enter_gate(held)
            logs, _ = self._entries.located(held, log, [checked], dues=True)
            fired = self._entries.fired(log.topic_id, logs)
        if fired is None:  # or it was cancelled, or is gone
            return None
        due_ms, last = fired
        return find_marker(self._main, log, checked, due_ms - self._clock.lead_ms, last)

    def reschedule(
        self, topic: TopicState, message_ids: Sequence[AnyId], asked_ms: int | None, now_ms: int
    ) -> list[MessageId | None]:
        """Give messages another due time, under the delay policies; None: now. Returns the new ids."""
        ids = list(map(id_of, checked_list("message_ids", message_ids, "ids of messages")))
        with Held() as held:
            return self._main.write(self.rescheduling(held, topic, ids, asked_ms, now_ms))

    def fire_now(self, topic: TopicState, message_id: AnyId, now_ms: int) -> MessageId | None:
        """Make a message due now, whatever the delay policies. Returns its new id."""
        with Held() as held:
            work = self.rescheduling(held, topic, [id_of(message_id)], None, now_ms, policies=False)
            return self._main.write(work)[0]

    def rescheduling(
        self,
        held: Held,
        topic: TopicState,
        ids: Sequence[MessageId],
        asked_ms: int | None,
        now_ms: int,
        *,
        policies: bool = True,
    ) -> Work[list[MessageId | None]]:
        """The unit of work of `reschedule`, written before `held` ends; listeners hear of it then.

        Gives the new ids, None where it is too late. Each message is then delivered once, under one of its two ids.
        policies: whether delay policies apply. Raises CorruptEntry (a body cannot be read).
        """
        log, due_ms, overridden = topic.log, now_ms if asked_ms is None else asked_ms, False
        if policies:
            due_ms, overridden = self._policies.apply_one(topic.name, due_ms, now_ms, len(ids))
        self._entries.fetch(log, ids, bodies=True)
        self._entries.enter_gate(held)
        logs, outcomes = self._entries.located(held, log, ids, bodies=True)
        now_ms = self._clock.now_ms()
        for found in logs:
            if found.unreadable:
                raise found.unreadable[0]
        due_ms, bodies = max(due_ms, now_ms), _bodies(logs)
        keys, place = _keys(bodies), self._entries.place(held, log.topic_id, due_ms, now_ms) if bodies else None
        new = Successors(log, [due_ms] * len(ids), bodies, {row: (ids[row], None) for row in bodies})

        def told() -> None:
            count = outcomes.count(Outcome.CANCELLED)
            tell(self._listeners, StoreListener.rescheduled, topic.name, count)
            if overridden:
                self._policies.stored(topic.name, count)

        def work(transaction: Transaction) -> list[MessageId | None]:
            for found in logs:
                self._entries.cancel(transaction, log.topic_id, found, outcomes)
            rows = [row for row in bodies if outcomes[row] is Outcome.CANCELLED]
            moved: list[MessageId | None] = [None] * len(ids)
            for row, placed in zip(rows, self._entries.append(transaction, place, new, rows, now_ms), strict=True):
                moved[row] = placed.message_id
                if row in keys:
                    _move(transaction, sent_key(log.topic_id, keys[row]), ids[row], placed)
            return moved

        held.stored.append(told)
        return work

    def replacing(self, held: Held, batches: Sequence[Successors]) -> Work[list[tuple[dict[int, Placed], int]]]:
        """The unit that cancels messages of several topics where they have not fired, and sends others in their place.

        Written before `held` ends. Gives for each batch where its messages are, by row, and how many of its `olds`
        were cancelled.
        """
        for new in batches:
            for known, ids in new.olds_by_partition().items():
                self._entries.fetch(new.log, ids, known)
        self._entries.enter_gate(held)
        now_ms, steps = self._clock.now_ms(), []
        for new in batches:
            olds = new.olds_by_partition()
            found = [self._entries.located(held, new.log, ids, known) for known, ids in olds.items()]
            steps.append((new, found, self._entries.places(held, new, now_ms)))

        def work(transaction: Transaction) -> list[tuple[dict[int, Placed], int]]:
            done = []
            for new, found, places in steps:
                for logs, outcomes in found:
                    for each in logs:
                        self._entries.cancel(transaction, new.log.topic_id, each, outcomes)
                placed: dict[int, Placed] = {}
                for place, rows in places:
                    appended = self._entries.append(transaction, place, new, rows, now_ms)
                    placed.update(zip(rows, appended, strict=True))
                done.append((placed, sum(outcomes.count(Outcome.CANCELLED) for _, outcomes in found)))
            return done

        return work


def _bodies(logs: Sequence[FoundEntries]) -> dict[int, bytes]:
    return {row: body for found in logs for row, body in found.bodies.items()}


def _keys(bodies: Mapping[int, bytes]) -> dict[int, str]:
    return {row: key for row, body in bodies.items() if (key := dedup_key_of(body)) is not None}


def _free(transaction: Transaction, key: bytes, old: MessageId) -> None:
    """Remove a key's record if it is of message `old`, and would hold although that is cancelled.

    Another one has no effect any more; it is left, since removing it dirties pages far from each other.
    """
    fields = transaction.get(key)
    if fields is not None and (record := KeyRecord.unpack(fields)).until_ms and record.message_id == old:
        transaction.delete(key)


def _move(transaction: Transaction, key: bytes, old: MessageId, new: Placed) -> None:
    """Have a key's record, if it is of message `old`, be of the one that takes its place."""
    fields = transaction.get(key)
    if fields is not None and (record := KeyRecord.unpack(fields)).message_id == old:
        transaction.put(key, KeyRecord(new.start_ms, *new.message_id, record.until_ms).pack())
