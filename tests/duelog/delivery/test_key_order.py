"""What key-shared subscriptions guarantee, each guarantee by name; the twin is in test_dispatcher_model.py."""

from __future__ import annotations

from collections.abc import Sequence

from duelog.delivery.key_slots import KeySlots
from duelog.markers.reader import Unacknowledged
from duelog.store.position import Position
from duelog.store.received_messages import ReceivedMessages
from tests.duelog.delivery.twins import Log, at, columns, dispatcher_on, entries, has_ready, log_of


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
    """What it held comes first at the key's new consumer, then what was kept back."""
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
