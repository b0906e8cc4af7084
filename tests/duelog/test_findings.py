"""What the model test and its relatives found in the engine, each as small as it gets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import StoreFull
from duelog.store import failpoints
from duelog.store.environment import Environment
from duelog.store.transaction import Work
from tests.conftest import OpenStore

CONFIG = StoreConfig(partition_ms=1_000, preload_ms=0, ledger_max_entries=1, ack_flush_ms=0)


@contextmanager
def no_room_for_write(environment: Environment, number: int) -> Iterator[None]:
    """The `number`-th write to `environment` within the block finds the disk full."""
    write, left = environment.write, number

    def fail(work: Work[object]) -> object:
        nonlocal left
        left -= 1
        if left == 0:
            raise StoreFull(environment.path, "no room, says the test")
        return write(work)

    environment.write = fail  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        environment.write = write  # type: ignore[method-assign]


@contextmanager
def at(point: str, action: object) -> Iterator[None]:
    """`action` is called whenever the engine comes to `point` within the block."""
    assert callable(action)
    failpoints.arm(point, action)
    try:
        yield
    finally:
        failpoints.disarm()


def writes_of_a_tick(store: DelayedStore, work: object = None) -> int:
    """How many times a tick of this store writes to the main environment."""
    return store._engine.main.counts.requests


def test_messages_of_a_deleted_topic_are_not_pending(open_store: OpenStore) -> None:
    """They lie in their partition until it ends, and are never delivered: no figure counts them as to come."""
    store = open_store(config=CONFIG)
    store.topic("gone").send(b"", deliver_after=60)
    store.topic("kept").send(b"", deliver_after=60)
    store.delete_topic("gone")
    assert [partition.pending for partition in store.partitions()] == [1]
    assert store.stats().pending == 1


@pytest.mark.parametrize("number", range(1, 9))
def test_what_a_full_disk_kept_a_tick_from_doing_the_next_tick_does(
    open_store: OpenStore, clock: ManualClock, number: int
) -> None:
    """Whichever write finds no room: the next tick fires, closes, trims, removes and deletes the rest."""
    store = open_store(config=CONFIG)
    for name in ("a", "b"):
        store.topic(name).send_batch([Message(b"", deliver_after=1), Message(b"", deliver_after=2)])
    clock.advance(10_000)
    with no_room_for_write(store._engine.main, number), pytest.raises(StoreFull):
        store.tick()
    store.tick()
    assert store.partitions() == []
    assert list((store.path / "partitions").iterdir()) == []
    assert [store.topic(name).stats().entries for name in ("a", "b")] == [0, 0]
    assert list(store.check()) == []


def test_a_partition_closed_just_before_a_failure_is_closed_for_good(open_store: OpenStore, clock: ManualClock) -> None:
    """Two partitions end, closing the second finds no room, the clock goes back: nothing comes before it is due.

    The first one refuses messages. Were the store's clock not to know that it has acted at the later time, what is
    sent for that partition now would go to the main log as if it were due.
    """
    store = open_store(config=CONFIG)
    store.topic("t").send_batch([Message(b"", deliver_after=1), Message(b"", deliver_after=2)])
    later_ms = clock.advance(10_000)
    closed = 0

    def fail_the_second() -> None:
        nonlocal closed
        closed += 1
        if closed == 2:
            raise StoreFull(store.path, "no room, says the test")

    store._engine.partitions.created = None
    with at("close.before", fail_the_second), pytest.raises(StoreFull):
        store.tick()
    clock.set(later_ms - 20_000)
    assert store.clock.now_ms() == later_ms


def test_a_partition_is_not_made_anew_while_its_directory_is_removed(open_store: OpenStore, clock: ManualClock) -> None:
    """A sender that looked at the clock long ago writes when the partition of its message is being deleted.

    Made anew in the middle of that, the partition lost its place in the catalog, and the message with it.
    """
    store = open_store(config=CONFIG)
    topic, engine = store.topic("t"), store._engine
    reader = topic.subscribe("s")
    topic.send(b"first", deliver_after=0.5)
    clock.advance(10_000)
    store.topic("other").send(b"")
    (message,) = reader.receive()
    reader.ack(message)
    send = engine.sender.send
    stale_ms = clock.now_ms() - 10_000
    del send, stale_ms
