"""Guarantees of a dispatcher, each by name, in log order and by key; the twin is in test_dispatcher_model.py."""

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
from tests.duelog.delivery.twins import Log, at, columns, dispatcher_on, entries, has_ready, log_of


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


def test_a_nacked_message_comes_at_its_time_and_not_before() -> None:
    """Redelivery waits for the delay, then goes before new messages, with its count."""
    dispatcher = dispatcher_on(log_of(*[None] * 4))
    dispatcher.next_batch(1, 2, 0)
    assert dispatcher.nack(1, at(0), 50, 0) == 1
    assert dispatcher.next_redelivery_ms() == 50
    assert not has_ready(dispatcher, 49)
    assert entries(dispatcher.next_batch(2, 1, 49)) == [2]
    assert has_ready(dispatcher, 50)
    batch = dispatcher.next_batch(2, 2, 50)
    assert [(message.position.entry_id, message.redelivery_count) for message in batch] == [(0, 1), (3, 0)]
    assert dispatcher.next_redelivery_ms() is None


def test_messages_held_too_long_go_to_others() -> None:
    """After the acknowledgement timeout what is left of a batch is due; what was acknowledged is not."""
    dispatcher = dispatcher_on(log_of(None, None), ack_timeout_ms=100)
    dispatcher.next_batch(1, 2, 0)
    dispatcher.ack(1, at(0))
    assert dispatcher.next_redelivery_ms() == 100
    assert dispatcher.expire(99) == 0
    assert entries(dispatcher.next_batch(2, 5, 100)) == [1]
    assert len(dispatcher.outstanding.by_consumer()[1]) == 0


def test_the_timeout_of_an_earlier_delivery_does_not_shorten_a_later_one() -> None:
    """A message given back and handed to the same consumer again has its full time from then on."""
    dispatcher = dispatcher_on(log_of(None, None), ack_timeout_ms=100)
    dispatcher.next_batch(1, 2, 0)
    dispatcher.nack(1, at(0), 60, 0)
    assert entries(dispatcher.next_batch(1, 2, 60)) == [0]
    assert dispatcher.expire(100) == 1
    assert len(dispatcher.outstanding.by_consumer()[1]) == 1
    assert dispatcher.next_redelivery_ms() == 160  # what is ready is not waited for
    assert entries(dispatcher.next_batch(2, 2, 100)) == [1]
    assert dispatcher.expire(159) == 0
    assert dispatcher.expire(160) == 1


def test_a_clock_that_goes_back_holds_no_timeout_up_for_ever() -> None:
    """Deadlines stay in order: a batch handed out at an earlier time expires no earlier than the one before it."""
    dispatcher = dispatcher_on(log_of(None, None), ack_timeout_ms=100)
    dispatcher.next_batch(1, 1, 1000)
    dispatcher.next_batch(1, 1, 500)
    dispatcher._check()
    assert dispatcher.expire(1100) == 2


def test_a_seek_back_delivers_again_as_new() -> None:
    """After a seek nothing is held or acknowledged beyond it, and counts start over."""
    dispatcher = dispatcher_on(log_of(*[None] * 4), ack_timeout_ms=100)
    dispatcher.next_batch(1, 3, 0)
    dispatcher.ack(1, at(0, 2))
    dispatcher.nack(1, at(1), 500, 0)
    dispatcher.seek(Position(1, 0))
    assert dispatcher.next_redelivery_ms() is None
    batch = dispatcher.next_batch(2, 9, 0)
    assert [(message.position.entry_id, message.redelivery_count) for message in batch] == [(1, 0), (2, 0), (3, 0)]


def test_a_trim_forgets_what_is_gone() -> None:
    """Messages of a ledger that retention took are neither held nor handed out again, and reading goes on after it."""
    log = Log({1: [None] * 2, 5: [None] * 2})
    dispatcher = dispatcher_on(log, ack_timeout_ms=10)
    dispatcher.next_batch(1, 2, 0)
    dispatcher.nack(1, at(0), 5, 0)
    del log.keys[1]
    dispatcher.trimmed(5)
    assert dispatcher.outstanding_count == 0
    assert dispatcher.next_redelivery_ms() is None
    assert dispatcher.acks.mark_delete == Position(5, -1)
    assert [message.position for message in dispatcher.next_batch(2, 9, 50)] == log.positions()


def test_a_cumulative_acknowledgement_ends_redeliveries_and_skips_forward() -> None:
    """Everything up to the position is done with: held, waiting, ready and not yet read."""
    dispatcher = dispatcher_on(log_of(*[None] * 6), "exclusive", consumers=[1])
    dispatcher.next_batch(1, 3, 0)
    dispatcher.nack(1, at(0, 1), 5, 0)
    assert dispatcher.ack_cumulative(Position(1, 3)) == 4
    assert entries(dispatcher.next_batch(1, 9, 10)) == [4, 5]


def test_a_cumulative_acknowledgement_keeps_the_counts_of_later_messages() -> None:
    """How often a message was delivered is forgotten with its own acknowledgement only."""
    dispatcher = dispatcher_on(log_of(None, None), "exclusive", consumers=[1])
    for now_ms in (0, 1):
        dispatcher.next_batch(1, 2, now_ms)
        dispatcher.nack(1, at(0, 1), now_ms, 0)
    dispatcher.ack_cumulative(Position(1, 0))
    assert [message.redelivery_count for message in dispatcher.next_batch(1, 2, 2)] == [2]


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


def test_failover_serves_the_consumer_that_came_first() -> None:
    """The next one takes over with what the first one held, in log order."""
    dispatcher = dispatcher_on(log_of(*[None] * 4), "failover", consumers=[5, 3])
    assert dispatcher.next_batch(3, 9, 0) == []
    assert entries(dispatcher.next_batch(5, 2, 0)) == [0, 1]
    dispatcher.ack_cumulative(Position(1, 0))
    dispatcher.remove_consumer(5, 0)
    dispatcher.add_consumer(5)
    assert dispatcher.next_batch(5, 9, 0) == []
    assert not has_ready(dispatcher, 0, 5)
    assert entries(dispatcher.next_batch(3, 9, 0)) == [1, 2, 3]


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


def test_nacks_for_the_same_time_come_together() -> None:
    """Messages given back one by one for one moment are all due then."""
    dispatcher = dispatcher_on(log_of(*[None] * 3))
    dispatcher.next_batch(1, 3, 0)
    for entry_id in (2, 0, 1):
        dispatcher.nack(1, at(entry_id), 50, 0)
    assert entries(dispatcher.next_batch(2, 9, 50)) == [0, 1, 2]


def test_what_is_given_back_as_a_whole_comes_again_in_log_order_counted() -> None:
    """That consumer's alone, before anything that is new."""
    dispatcher = dispatcher_on(log_of(*[None] * 6))
    dispatcher.next_batch(1, 3, 0)
    dispatcher.next_batch(2, 1, 0)
    dispatcher.ack(1, at(1))
    assert dispatcher.nack_all(1, 7) == 2
    assert dispatcher.nack_all(1, 7) == 0
    again = dispatcher.next_batch(2, 9, 7)
    assert entries(again) == [0, 2, 4, 5]
    assert list(again.redelivery_counts) == [1, 1, 0, 0]
    dispatcher._check()


def key_of(consumer_id: int, consumers: Sequence[int], number: int = 0) -> str:
    """The ``number``-th key that belongs to a consumer when these are the consumers."""
    slots = KeySlots(consumers)
    keys = [f"key-{i}" for i in range(1000) if slots.owner_of(f"key-{i}") == consumer_id]
    return keys[number]


def test_a_key_goes_to_one_consumer() -> None:
    """Messages of one key come to one consumer; messages without a key to any consumer."""
    mine, theirs = key_of(1, [1, 2]), key_of(2, [1, 2])
    dispatcher = dispatcher_on(log_of(mine, theirs, None, mine, theirs), "key_shared")
    assert entries(dispatcher.next_batch(1, 9, 0)) == [0, 2, 3]
    assert dispatcher.kept_back_count == 2
    assert has_ready(dispatcher, 0, 2)
    assert not has_ready(dispatcher, 0, 1)
    batch = dispatcher.next_batch(2, 9, 0)
    assert [(message.position.entry_id, message.redelivery_count) for message in batch] == [(1, 0), (4, 0)]


def test_a_nacked_message_holds_up_the_later_ones_of_its_key_only() -> None:
    """Until the redelivery, later messages of the key wait; other keys do not."""
    one, other = key_of(1, [1, 2]), key_of(1, [1, 2], number=1)
    dispatcher = dispatcher_on(log_of(one, one, other, one), "key_shared")
    assert entries(dispatcher.next_batch(1, 1, 0)) == [0]
    dispatcher.nack(1, at(0), 50, 0)
    assert entries(dispatcher.next_batch(1, 9, 10)) == [2]
    assert dispatcher.next_batch(1, 9, 49) == []
    batch = dispatcher.next_batch(1, 9, 50)
    assert [(message.position.entry_id, message.redelivery_count) for message in batch] == [(0, 1), (1, 0), (3, 0)]


def test_a_message_without_a_key_comes_again_to_anyone() -> None:
    """Redelivery of a message without a key is for any consumer, and it takes its turn in log order."""
    mine = key_of(2, [1, 2])
    dispatcher = dispatcher_on(log_of(mine, None, mine), "key_shared")
    assert entries(dispatcher.next_batch(1, 9, 0)) == [1]
    dispatcher.nack(1, at(1), 5, 0)
    assert entries(dispatcher.next_batch(2, 9, 5)) == [0, 1, 2]


def test_a_key_changes_hands_only_when_its_holder_is_done() -> None:
    """A consumer that joins gets a key that moved to it after the one before has acknowledged what it holds."""
    moving = key_of(2, [1, 2])
    dispatcher = dispatcher_on(log_of(moving, moving, None), "key_shared", consumers=[1])
    assert entries(dispatcher.next_batch(1, 1, 0)) == [0]
    dispatcher.add_consumer(2)
    assert entries(dispatcher.next_batch(2, 9, 0)) == [2]
    assert not has_ready(dispatcher, 0, 2)
    dispatcher.ack(1, at(0))
    assert has_ready(dispatcher, 0, 2)
    assert entries(dispatcher.next_batch(2, 9, 0)) == [1]


def test_a_key_that_comes_back_to_its_holder_goes_on_at_once() -> None:
    """When the consumer that a key moved to goes before its turn, the holder gets the rest without acknowledging."""
    moving = key_of(2, [1, 2])
    dispatcher = dispatcher_on(log_of(moving, moving), "key_shared", consumers=[1])
    dispatcher.next_batch(1, 1, 0)
    dispatcher.add_consumer(2)
    assert dispatcher.next_batch(2, 9, 0) == []
    dispatcher.remove_consumer(2, 0)
    assert entries(dispatcher.next_batch(1, 9, 0)) == [1]


def test_acknowledging_a_nacked_message_frees_its_key() -> None:
    """A message that waits for redelivery and is acknowledged meanwhile holds nothing up any more."""
    key = key_of(1, [1, 2])
    dispatcher = dispatcher_on(log_of(key, key), "key_shared")
    dispatcher.next_batch(1, 1, 0)
    dispatcher.nack(1, at(0), 1000, 0)
    assert dispatcher.next_batch(1, 9, 0) == []
    dispatcher.ack(1, at(0))
    assert entries(dispatcher.next_batch(1, 9, 0)) == [1]


def test_a_removed_consumers_keys_go_on_in_order() -> None:
    """The new consumer of the key gets what it held first, then what was kept back."""
    key = key_of(1, [1, 2])
    dispatcher = dispatcher_on(log_of(key, key, key), "key_shared")
    assert entries(dispatcher.next_batch(1, 2, 0)) == [0, 1]
    assert dispatcher.next_batch(2, 9, 0) == []
    dispatcher.remove_consumer(1, 0)
    batch = dispatcher.next_batch(2, 9, 0)
    assert [(message.position.entry_id, message.redelivery_count) for message in batch] == [(0, 1), (1, 1), (2, 0)]


def test_no_more_than_the_bound_is_kept_back() -> None:
    """A consumer that does not ask for its key stops the reading at the bound, and asking starts it again."""
    theirs, mine = key_of(2, [1, 2]), key_of(1, [1, 2])
    dispatcher = dispatcher_on(log_of(*[theirs] * 5, mine), "key_shared", max_kept_back=3)
    assert dispatcher.next_batch(1, 9, 0) == []
    assert dispatcher.kept_back_count == 3
    assert dispatcher.read_position == Position(1, 3)
    assert entries(dispatcher.next_batch(2, 9, 0)) == [0, 1, 2]
    assert entries(dispatcher.next_batch(1, 9, 0)) == [5]


def test_messages_kept_back_survive_that_no_consumer_is_there() -> None:
    """With all consumers gone the messages wait for the next one."""
    theirs = key_of(2, [1, 2])
    dispatcher = dispatcher_on(log_of(theirs, theirs), "key_shared")
    assert dispatcher.next_batch(1, 9, 0) == []
    dispatcher.remove_consumer(2, 0)
    dispatcher.remove_consumer(1, 0)
    dispatcher._check()
    assert not has_ready(dispatcher, 0)
    dispatcher.add_consumer(3)
    assert [message.redelivery_count for message in dispatcher.next_batch(3, 9, 0)] == [0, 0]


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
