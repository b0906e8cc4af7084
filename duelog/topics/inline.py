"""What waits inline in a topic's main log: for subscriptions that begin behind it, for figures and for lists.

A topic whose consumers have passed something over has a tracker, which is asked. For another one the ledgers that have
something to wait for are read, and nothing is kept in memory. Where nothing waits, nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING

from pyroaring import BitMap

from duelog.delivery.acks import AckSet
from duelog.markers.lookup import read_entry, scheduled
from duelog.store.errors import CorruptEntry
from duelog.store.log.scan import find_run
from duelog.store.message import ScheduledMessage
from duelog.store.position import MessageId, Position

from .subscription_state import SubscriptionState
from .topic_state import TopicState

if TYPE_CHECKING:
    from ..engine import Engine

_DUE = attrgetter("due_ms")


def waiting(engine: Engine, topic: TopicState, now_ms: int) -> dict[int, BitMap]:
    """Entries of the topic's main log that are not due at `now_ms`, by ledger id; no bitmap is empty."""
    start = topic.log.first_undue(now_ms)
    if start is None:
        return {}
    return (topic.tracker or engine.tracker(topic)).waiting(start, now_ms)


def count(engine: Engine, topic: TopicState, now_ms: int) -> int:
    """How many those are."""
    start = topic.log.first_undue(now_ms)
    return 0 if start is None else (topic.tracker or engine.tracker(topic)).count(start, now_ms)


def unacknowledged(acks: AckSet, not_due: Mapping[int, BitMap]) -> int:
    """How many of the entries that `waiting` gave a subscription has not acknowledged."""
    found = 0
    for ledger_id, entries in not_due.items():
        found += len(acks.unacked(ledger_id, entries.min(), entries.max() + 1) & entries)
    return found


def clear(engine: Engine, topic: TopicState, subscription: SubscriptionState) -> int:
    """Acknowledge, for one subscription, what waits inline by now, durably; how many it had not acknowledged."""
    not_due = waiting(engine, topic, engine.clock.now_ms())
    count = 0
    with subscription.lock:
        for ledger_id, entries in not_due.items():
            if subscription.dispatcher is not None:
                count += subscription.dispatcher.ack(None, [Position(ledger_id, entry_id) for entry_id in entries])
            else:
                count += subscription.acks.ack(ledger_id, entries, topic.log)
    if count:
        engine.acknowledged(topic, subscription, moved_ledger=True)
        engine.flusher.flush()
    return count


def is_hidden(engine: Engine, topic: TopicState, message_id: MessageId) -> bool:
    """Whether the message is in the topic's main log and not visible yet. O(log n)."""
    now_ms = engine.clock.now_ms()
    if topic.log.first_undue(now_ms) is None or topic.log.entries_of(message_id.ledger_id) is None:
        return False
    with engine.main.read() as raw, suppress(CorruptEntry):
        run = find_run(raw.cursor(), engine.main.name, message_id.ledger_id, message_id.entry_id)
        return run is not None and run.early and run.due(message_id.entry_id - run.first_entry) > now_ms
    return False


def scheduled_messages(engine: Engine, topic: TopicState, start_ms: int, limit_ms: int) -> Iterator[ScheduledMessage]:
    """Messages of the topic that are not due yet, or have not fired, due in [start_ms, limit_ms), by due time.

    Of those due at one instant the ones in a partition come first. Bodies are read as they are asked for.
    """
    in_partitions = scheduled(
        engine.main,
        engine.partitions,
        topic.topic_id,
        str(topic.name),
        start_ms=start_ms,
        limit_ms=limit_ms,
        quarantine=engine.note_unreadable,
    )
    now_ms = engine.clock.now_ms()
    start = topic.log.first_undue(now_ms)
    if start is None:
        return in_partitions
    positions = (topic.tracker or engine.tracker(topic)).listed(start, now_ms, start_ms, limit_ms)
    return merge(in_partitions, _messages(engine, topic, positions), key=_DUE)


def _messages(engine: Engine, topic: TopicState, positions: Sequence[Position]) -> Iterator[ScheduledMessage]:
    for position in positions:
        try:
            found = read_entry(engine.main, position, str(topic.name))
        except CorruptEntry as error:
            engine.note_unreadable(CorruptEntry(error.environment, *position, error.reason))
            continue
        if found is not None:
            yield found
