"""What the twin of test_dispatcher_model.py cannot show: restarts, bad arguments, memory, and a log that is late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from duelog.delivery.acks import AckSet
from duelog.delivery.dispatcher import Dispatcher
from duelog.delivery.key_slots import KeySlots
from duelog.markers.reader import Unacknowledged
from duelog.store.errors import InvalidArgument
from duelog.store.position import Position
from duelog.store.received_messages import ReceivedMessages
from tests.duelog.delivery.twins import Log, at, columns, dispatcher_on, entries, log_of


def test_what_is_acknowledged_before_a_restart_is_not_read_again() -> None:
    """A new dispatcher starts after mark-delete and leaves out the acknowledged entries beyond it."""
    log = log_of(*[None] * 6)
    acks = AckSet(Position(1, -1))
    before = Dispatcher(acks, log, log, type="shared")
    before.add_consumer(1)
    before.next_batch(1, 6, 0)
    before.ack(1, at(0, 1, 3))
    after = Dispatcher(acks, log, log, type="shared")
    after.add_consumer(1)
    assert after.read_position == Position(1, 2)
    assert entries(after.next_batch(1, 6, 0)) == [2, 4, 5]


def test_a_clock_that_goes_back_holds_no_timeout_up_for_ever() -> None:
    """Deadlines stay in order: a batch handed out at an earlier time expires no earlier than the one before it."""
    dispatcher = dispatcher_on(log_of(None, None), ack_timeout_ms=100)
    dispatcher.next_batch(1, 1, 1000)
    dispatcher.next_batch(1, 1, 500)
    dispatcher._check()
    assert dispatcher.expire(1100) == 2


def test_one_bad_position_leaves_a_batch_of_acknowledgements_undone() -> None:
    """A position that the topic does not have is refused before anything is acknowledged, in whatever ledger."""
    log = Log({1: [None] * 2, 5: [None] * 2})
    dispatcher = dispatcher_on(log)
    dispatcher.next_batch(1, 4, 0)
    for bad in (Position(5, 2), Position(6, 0), Position(5, -1), Position(1, 2**32)):
        with pytest.raises(InvalidArgument):
            dispatcher.ack(1, [Position(1, 0), bad])
    assert dispatcher.outstanding_count == 4
    assert not dispatcher.acks.changed


def test_what_cannot_be_read_holds_nothing_else_up() -> None:
    """A redelivery that cannot be read is skipped, stays unacknowledged, and the rest goes on."""
    log = log_of(*[None] * 4)
    dispatcher = dispatcher_on(log)
    dispatcher.next_batch(1, 3, 0)
    dispatcher.nack(1, at(0, 1, 2), 0, 0)
    log.unreadable.update(at(0, 1))
    assert entries(dispatcher.next_batch(2, 1, 0)) == [2]
    assert dispatcher.awaiting_redelivery_count == 0
    assert dispatcher.acks.mark_delete == Position(1, -1)


def test_consumers_are_known_by_name() -> None:
    """An unknown consumer, one that is there already, or a batch of nothing is refused."""
    dispatcher = dispatcher_on(log_of(None), consumers=[1])
    with pytest.raises(InvalidArgument):
        dispatcher.add_consumer(1)
    with pytest.raises(InvalidArgument):
        dispatcher.add_consumer(-1)
    for refused in (2, 7):
        with pytest.raises(InvalidArgument):
            dispatcher.next_batch(refused, 1, 0)
        with pytest.raises(InvalidArgument):
            dispatcher.remove_consumer(refused, 0)
    with pytest.raises(InvalidArgument):
        dispatcher.next_batch(1, 0, 0)


def test_memory_does_not_grow_with_what_was_acknowledged() -> None:
    """After everything is acknowledged nothing is left of it, deadlines and delivery counts included."""
    dispatcher = dispatcher_on(log_of(*[None] * 500), ack_timeout_ms=1000, consumers=[1])
    for _ in range(50):
        positions = [message.position for message in dispatcher.next_batch(1, 10, 0)]
        dispatcher.nack(1, positions[:3], 0, 0)
        dispatcher.next_batch(1, 3, 0)
        dispatcher.ack(1, positions)
    assert dispatcher.next_redelivery_ms() is None
    assert not dispatcher.outstanding._batches
    assert not dispatcher.outstanding.counts.failed
    assert dispatcher.acks.mark_delete == Position(1, 499)


def key_of(consumer_id: int, consumers: Sequence[int], number: int = 0) -> str:
    """The ``number``-th key that belongs to a consumer when these are the consumers."""
    slots = KeySlots(consumers)
    keys = [f"key-{i}" for i in range(1000) if slots.owner_of(f"key-{i}") == consumer_id]
    return keys[number]


def test_nothing_is_remembered_of_a_key_that_is_done_with() -> None:
    """Keys that are acknowledged leave no trace: memory does not grow with the number of keys met."""
    dispatcher = dispatcher_on(log_of(*[f"key-{i}" for i in range(300)]), "key_shared", max_kept_back=300)
    for consumer_id in (1, 2, 1, 2):
        dispatcher.ack(consumer_id, [m.position for m in dispatcher.next_batch(consumer_id, 300, 0)])
    assert dispatcher.acks.mark_delete == Position(1, 299)
    order = dispatcher._order
    assert not vars(order)["_keys"]
    assert not vars(order)["_key_at"]


class LateLog(Log):
    """A log whose reader passes everything over, and later returns it one by one without moving on."""

    late: list[Position]

    def read(self, start: Position, max_entries: int, skip: Unacknowledged) -> tuple[ReceivedMessages, Position]:
        if start < self.end():
            self.late = self.positions()
            return columns([]), self.end()
        return columns([self.message(self.late.pop(0))] if self.late else []), start


def test_messages_that_come_late_from_the_reader_do_not_hide_each_other() -> None:
    """A message that the reader had passed over and that is another consumer's is kept back; the next one is found."""
    theirs, mine = key_of(2, [1, 2]), key_of(1, [1, 2])
    log = LateLog({1: [theirs, theirs, mine]})
    dispatcher = dispatcher_on(log, "key_shared")
    assert entries(dispatcher.next_batch(1, 9, 0)) == [2]
    dispatcher._check()
    assert entries(dispatcher.next_batch(2, 9, 0)) == [0, 1]
    assert dispatcher.next_batch(2, 9, 0) == []
