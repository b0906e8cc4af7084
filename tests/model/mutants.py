"""Wrong engines, patched in for the length of a test, that the model test must find out.

Each breaks one rule of delivery, and wraps the engine instead of copying it.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap, BitMap64

from duelog import opening
from duelog.delivery import dispatcher
from duelog.delivery.attempt_counts import AttemptCounts
from duelog.delivery.delivery_log import DeliveryLog
from duelog.delivery.delivery_order import DeliveryOrder
from duelog.delivery.dispatcher import Dispatcher, SubscriptionType
from duelog.delivery.due_reader import DueReader
from duelog.delivery.outstanding import Outstanding
from duelog.delivery.position_set import group_by_ledger
from duelog.markers import reader
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.pending_log import PendingLog
from duelog.markers.pending_entries import PendingEntries
from duelog.markers.reader import MessageMaker
from duelog.metrics import StoreMetrics
from duelog.partitions import producer_numbers as producers
from duelog.partitions.partition import Partition
from duelog.sending import withdrawal
from duelog.sending.delay_policies import DelayPolicies
from duelog.sending.keyed_messages import TopicKeys
from duelog.stats import Figures
from duelog.store.codec.frontier import HELD
from duelog.store.codec.run import fields_of_message
from duelog.store.errors import TransactionConflict
from duelog.store.log.managed_ledger import ManagedLedger, Segment, _StagedLog
from duelog.store.policy.pending_quotas import PendingQuotas
from duelog.store.policy.policies import EffectivePolicies, of_config
from duelog.store.policy.policy_records import STORE_SCOPE
from duelog.store.position import MessageId
from duelog.store.wal.write_batch import WriteBatch
from duelog.subscription import Subscription
from duelog.topics import seeking
from duelog.topics.dead_letters import DeadLetters
from duelog.topics.inline import InlineMessages
from duelog.topics.producer_state import ProducerState
from duelog.topics.topic_list import Topics
from duelog.topics.topic_state import SubscriptionState, TopicState
from duelog.transactions import _Units
from duelog.upkeep.recurring import Recurring
from duelog.upkeep.schedule import Timetable

from .drawing import HANDING_OUT, INLINE_DELAYS, STORING, TAKING_BACK

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
MUTANTS: dict[str, tuple[Mutant, str]] = {}
"""Each wrong engine, and what the runs are about that find it out."""


def broken(theme: str) -> Callable[[Mutant], Mutant]:
    """A wrong engine that runs about `theme` find out."""

    def add(mutant: Mutant) -> Mutant:
        MUTANTS[mutant.__name__] = mutant, theme
        return mutant

    return add


@broken(TAKING_BACK)
def cancels_what_has_fired(patch: Patch) -> None:
    """The frontier is not asked: a message in the main log is said to be cancelled."""
    patch.setattr(PendingEntries, "_fired", lambda *_: BitMap())


@broken(TAKING_BACK)
def fires_what_was_cancelled(patch: Patch) -> None:
    """The index does not hear of cancellations."""
    patch.setattr(Firing, "withdraw", lambda *_: None)


@broken(TAKING_BACK)
def forgets_what_was_rescheduled(patch: Patch) -> None:
    """The index does not hear of the entry that takes the place of another."""
    add_message, add = Partition.add_message, Partition.add

    alone = len(fields_of_message(0, 0, b""))

    def added_one(self: Partition, rows: Any, log: Any, heard_ms: int, fields: bytes, body: bytes) -> int:
        return add_message(self, rows, log, HELD if len(fields) > alone else heard_ms, fields, body)

    def added(self: Partition, *arguments: Any) -> int:
        if len(arguments) > 5:
            arguments = (*arguments[:6], np.full(len(arguments[2]), HELD))
        return add(self, *arguments)

    patch.setattr(Partition, "add_message", added_one)
    patch.setattr(Partition, "add", added)


@broken(TAKING_BACK)
def leaves_keys_with_what_was_rescheduled(patch: Patch) -> None:
    """The record of a key stays of the id that a message had before."""
    patch.setattr(withdrawal, "_move", lambda *_: None)


@broken(TAKING_BACK)
def keeps_keys_of_what_was_cancelled(patch: Patch) -> None:
    """A key whose message was cancelled holds as long as was asked."""
    patch.setattr(withdrawal, "_free", lambda *_: None)


@broken(TAKING_BACK)
def replaces_without_cancelling(patch: Patch) -> None:
    """A message that replaces another comes beside it."""
    patch.setattr(TopicKeys, "_pending", lambda *_: {})


@broken(TAKING_BACK)
def answers_numbers_with_other_ids(patch: Patch) -> None:
    """A known number is answered with the id after its own."""
    plain = ProducerState.ids

    def ids(self: ProducerState, first: int, count: int) -> list[MessageId | None]:
        return [each and MessageId(each.ledger_id, each.entry_id + 1) for each in plain(self, first, count)]

    patch.setattr(ProducerState, "ids", ids)


@broken(HANDING_OUT)
def ignores_keys(patch: Patch) -> None:
    """Key-shared hands out as shared does."""
    patch.setattr(dispatcher, "KeyOrder", lambda *_: DeliveryOrder())


@broken(INLINE_DELAYS)
def takes_back_acknowledgements_at_a_seek(patch: Patch) -> None:
    """A seek past a message that is not due unacknowledges it, though it was received before the clock was set back."""
    plain = SubscriptionState.seek

    def seek(self: SubscriptionState, mark_delete: Any, not_due: Any, ledgers: Any) -> None:
        waiting = {info.ledger_id: BitMap(range(info.entries)) for info in ledgers.ledgers() if info.entries}
        plain(self, mark_delete, not_due and {**waiting, **not_due}, ledgers)

    patch.setattr(SubscriptionState, "seek", seek)


@broken(HANDING_OUT)
def waits_for_a_clock_that_was_set_back(patch: Patch) -> None:
    """A message given back at once comes when the clock shows the time at which it was given back."""

    def take_back(self: Dispatcher, ledger_id: int, entries: Any, at_ms: int, now_ms: int, failed: bool = True) -> None:
        self.outstanding.counts.note_failed(ledger_id, entries, now_ms)
        self._redeliveries.add(ledger_id, entries, at_ms)
        self._order.taken_back(ledger_id, entries)

    patch.setattr(Dispatcher, "_take_back", take_back)


@broken(HANDING_OUT)
def serves_every_failover_consumer(patch: Patch) -> None:
    """Not only the first."""
    patch.setattr(Dispatcher, "may_receive", lambda self, consumer: True)


@broken(HANDING_OUT)
def redelivers_without_delay(patch: Patch) -> None:
    """A message that is given back comes at once."""
    nack = Dispatcher.nack
    patch.setattr(
        Dispatcher, "nack", lambda self, consumer, positions, _, now_ms: nack(self, consumer, positions, 0, 0)
    )


@broken(HANDING_OUT)
def never_takes_back(patch: Patch) -> None:
    """The acknowledgement timeout does nothing."""
    patch.setattr(Outstanding, "take_overdue", lambda self, now_ms: [])


@broken(HANDING_OUT)
def delivers_what_has_expired(patch: Patch) -> None:
    """A message has no time to live of its own."""
    made = MessageMaker.messages

    def received(maker: Any) -> Any:
        batch = made(maker)
        batch.facts = {place: facts._replace(expires_ms=None) for place, facts in batch.facts.items()}
        return batch

    patch.setattr(MessageMaker, "messages", received)


@broken(HANDING_OUT)
def ignores_quotas(patch: Patch) -> None:
    """Any number of messages may be pending."""
    patch.setattr(PendingQuotas, "sending", lambda *_, **__: nullcontext())


@broken(HANDING_OUT)
def finds_no_place_when_messages_have_fired(patch: Patch) -> None:
    """Messages that have fired are still counted as pending."""
    patch.setattr(PendingQuotas, "fired", lambda *_: None)


@broken(HANDING_OUT)
def hands_out_without_limit(patch: Patch) -> None:
    """A consumer may hold any number of messages."""
    patch.setattr(SubscriptionState, "max_in_flight", 0)


@broken(HANDING_OUT)
def forgets_failed_deliveries_at_a_restart(patch: Patch) -> None:
    """The records of counts are not read."""
    patch.setattr(AttemptCounts, "load", lambda *_: None)


@broken(HANDING_OUT)
def counts_nothing_at_a_crash(patch: Patch) -> None:
    """The delivery log is not read."""
    patch.setattr(opening, "recount", lambda *_: None)


@broken(HANDING_OUT)
def counts_what_is_in_flight_at_a_close(patch: Patch) -> None:
    """The delivery log is left behind, as by a crash."""
    patch.setattr(DeliveryLog, "discard", lambda self: None)


@broken(HANDING_OUT)
def loses_dead_letters(patch: Patch) -> None:
    """They are acknowledged, and written nowhere."""

    def bury(_: Any, __: Any, topic: Any, state: Any, messages: Any) -> None:
        state.acknowledge(group_by_ledger([message.position for message in messages]), topic.log)

    patch.setattr(DeadLetters, "bury", bury)


@broken(HANDING_OUT)
def retries_for_everybody(patch: Patch) -> None:
    """A postponed message has no addressee."""
    made = MessageMaker.messages

    def received(maker: Any) -> Any:
        batch = made(maker)
        batch.facts = {place: facts._replace(addressee=None) for place, facts in batch.facts.items()}
        return batch

    patch.setattr(MessageMaker, "messages", received)


@broken(HANDING_OUT)
def seeks_past_the_first(patch: Patch) -> None:
    """A seek by time goes to what was due later than asked, not then."""
    found = seeking.due_at

    def due_at(main: Any, log: Any, time_ms: int) -> Any:
        return found(main, log, time_ms + 1)

    patch.setattr(seeking, "due_at", due_at)


@broken(TAKING_BACK)
def keeps_old_policies(patch: Patch) -> None:
    """Delays worked out for a topic stay when policies change."""
    patch.setattr(DelayPolicies, "changed", lambda self: self._look())


@broken(TAKING_BACK)
def rounds_down(patch: Patch) -> None:
    """A tick of policies makes messages early."""
    apply = EffectivePolicies.apply

    def down(self: EffectivePolicies, dues: Any, now_ms: int) -> Any:
        tick_ms = max(self.tick_time_ms, 1)
        given = apply(self, dues, now_ms)
        return np.where(given > now_ms, given - (tick_ms - 1), given)

    patch.setattr(EffectivePolicies, "apply", down)


@broken(TAKING_BACK)
def forgets_numbers(patch: Patch) -> None:
    """A producer starts from nothing when the store is opened again."""
    patch.setattr(producers, "read", lambda *_: BitMap64())


@broken(TAKING_BACK)
def loses_step(patch: Patch) -> None:
    """An interval is counted from when its occurrence was followed, not from when it was due."""
    after = Timetable.after
    patch.setattr(Timetable, "after", lambda self, now_ms, anchor_ms: after(self, now_ms, now_ms))


@broken(TAKING_BACK)
def recurs_once(patch: Patch) -> None:
    """An occurrence is not followed by another."""
    patch.setattr(Recurring, "run", lambda *_, **__: False)
    patch.setattr(Recurring, "next_due_ms", lambda *_: None)


@broken(INLINE_DELAYS)
def delivers_early_inline(patch: Patch) -> None:
    """A message in the main log is visible a millisecond before it is due."""
    due_entries = reader._due_entries
    patch.setattr(reader, "_due_entries", lambda run, now_ms: due_entries(run, now_ms + 1))


@broken(HANDING_OUT)
def reads_what_was_written_ahead(patch: Patch) -> None:
    """All of the main log may be read at any time."""
    patch.setattr(ManagedLedger, "visible", lambda self, now_ms: self.snapshot())


@broken(INLINE_DELAYS)
def forgets_what_it_passed_over(patch: Patch) -> None:
    """A subscription whose last consumer has left does not come back to what it passed over."""
    patch.setattr(DueReader, "reopen", lambda self, position: None)


@broken(TAKING_BACK)
def drops_what_comes_in_behind_the_frontier(patch: Patch) -> None:
    """An entry that comes in behind the frontier is taken for fired."""
    hear = PendingLog.hear

    def ahead_alone(self: PendingLog, first_entry: int, dues: Any) -> None:
        entries = np.arange(first_entry, first_entry + len(dues), dtype=np.uint32)
        hear(self, first_entry, np.where(self.frontier.passes(entries, dues), HELD, dues))

    patch.setattr(PendingLog, "hear", ahead_alone)


@broken(TAKING_BACK)
def takes_gaps_for_stored(patch: Patch) -> None:
    """When the store is opened, every number below the highest that is stored is taken for stored."""
    read = producers.read

    def without_gaps(*arguments: Any) -> Any:
        numbers = read(*arguments)
        return BitMap64(range(int(numbers.max()) + 1)) if numbers else numbers

    patch.setattr(producers, "read", without_gaps)


@broken(INLINE_DELAYS)
def acknowledges_what_nobody_was_given(patch: Patch) -> None:
    """A cumulative acknowledgement takes along what was passed over."""
    patch.setattr(DueReader, "unseen", lambda self, start, limit: {})


@broken(INLINE_DELAYS)
def trims_what_waits(patch: Patch) -> None:
    """A ledger that is closed is complete, though messages in it are not due."""
    took = _StagedLog.took

    def forgetful(self: _StagedLog, count: int, size: int) -> Segment:
        self.due_by_ms = 0
        return took(self, count, size)

    patch.setattr(_StagedLog, "took", forgetful)


@broken(HANDING_OUT)
def goes_by_what_its_opener_says(patch: Patch) -> None:
    """Opening a store replaces what it keeps by the program's settings."""

    patch.setattr(DelayPolicies, "record", lambda self, config: self.set(STORE_SCOPE, of_config(config)))


@broken(HANDING_OUT)
def keeps_no_dead_letters(patch: Patch) -> None:
    """A dead-letter topic has no keeper."""
    add = Topics.add_subscription

    def without_keeper(*arguments: Any, keeper: bool = False, **more: Any) -> Any:
        return None if keeper else add(*arguments, **more)

    patch.setattr(Topics, "add_subscription", without_keeper)


@broken(HANDING_OUT)
def buries_the_dead_again(patch: Patch) -> None:
    """A dead letter that is delivered again and again is dead-lettered too."""
    patch.setattr(TopicState, "keeps_dead_letters", property(lambda self: False))


@broken(HANDING_OUT)
def requeues_for_later_without_effect(patch: Patch) -> None:
    """A dead letter that is requeued for later is gone from its keeper, and is never let fire."""
    requeue = DeadLetters.requeue

    def without_admitting(self: DeadLetters, letters: Any, delay_ms: int = 0) -> int:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(PendingEntries, "_append", lambda *_: 0)
            return requeue(self, letters, delay_ms)

    patch.setattr(DeadLetters, "requeue", without_admitting)


def _blind_to_what_waits(patch: Patch, owner: type, name: str) -> None:
    """Within a method, nothing in the main log is seen to wait."""
    method = getattr(owner, name)

    def blind(*arguments: Any, **more: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(InlineMessages, "waiting", lambda *_: {})
            return method(*arguments, **more)

    patch.setattr(owner, name, blind)


@broken(INLINE_DELAYS)
def forgets_what_waits_at_the_latest(patch: Patch) -> None:
    """A subscription that begins, or is sought, at the latest has acknowledged what is not due."""
    _blind_to_what_waits(patch, Topics, "add_subscription")
    _blind_to_what_waits(patch, Subscription, "seek")


@broken(INLINE_DELAYS)
def counts_what_waits_as_backlog(patch: Patch) -> None:
    """A message that is not yet visible in the main log is not pending, and is backlog."""
    _blind_to_what_waits(patch, Figures, "of_topic")
    _blind_to_what_waits(patch, StoreMetrics, "_look")


@broken(STORING)
def stores_half_of_a_transaction(patch: Patch) -> None:
    """Where one operation cannot be, the others are stored."""

    def go_on(self: _Units, group: WriteBatch) -> None:
        for unit in self:
            with suppress(TransactionConflict):
                unit(group)

    patch.setattr(_Units, "__call__", go_on)


KINDS: dict[str, SubscriptionType] = {"ignores_keys": "key_shared", "serves_every_failover_consumer": "failover"}
"""The type of subscription that a wrong engine gets wrong."""
