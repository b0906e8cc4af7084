"""Whatever a firing, a loading or a closing is interrupted by: memory is what is on disk, and the store goes on."""

from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.loaded import Loading, ReadyQueue
from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions.index.delay_index import DelayIndex
from duelog.sending.wal_writer import WalWriter
from duelog.store.env.environment import Environment
from duelog.store.errors import BrokenInvariant, StoreFailed
from tests.conftest import START_MS, OpenStore, Plant, tick_after

CONFIG = StoreConfig(partition_ms=3_600_000)


def delivered(store: DelayedStore) -> dict[str, list[bytes]]:
    """Return what each topic's subscription receives once everything due has fired."""
    store.tick()
    got = {}
    for name in ("a", "b"):
        with store.topic(name).subscribe("s") as subscription:
            found = subscription.receive(10)
            subscription.ack(found, durable=True)
            got[name] = [bytes(message.payload) for message in found]
    return got


@pytest.fixture
def store(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """Two topics with a message due in a second, loaded, and the second has passed."""
    opened = open_store(config=CONFIG)
    for name in ("a", "b"):
        opened.topic(name).subscribe("s").close()
        opened.topic(name).send(name.encode(), deliver_at=START_MS + 1_000)
    opened.tick()
    clock.advance(1_500)
    return opened


EACH_ONCE = {"a": [b"a"], "b": [b"b"]}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError, BrokenInvariant])
def test_an_error_while_one_log_is_taken_loses_nothing_of_another(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, plant: Plant, error: type[BaseException]
) -> None:
    """The other log's entries are given back, or fire, and both have fired once the error is over."""
    plant(PendingLog, "take", error("planted"), after=False, at=2)
    with suppress(KeyboardInterrupt, StoreFailed):
        store.tick()
    if store._engine.storage.main.failed is not None:  # after a broken invariant nothing goes on
        store.close()
        store = open_store(config=CONFIG)
    tick_after(store, clock, 60_000)
    assert delivered(store) == EACH_ONCE


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (DelayIndex, "take", True),
        (PendingLog, "take", True),
        (PendingLog, "next_due_ms", False),
        (PendingLog, "confirm", False),
        (PendingLog, "confirm", True),
        (ReadyQueue, "pop", True),
        (ReadyQueue, "arm", False),
        (Firing, "_commit", False),
        (Firing, "_confirm", True),
    ],
)
def test_an_interrupt_anywhere_in_a_firing_neither_loses_nor_doubles(
    store: DelayedStore, open_store: OpenStore, plant: Plant, owner: type, name: str, after: bool
) -> None:
    """A torn log is read back from disk; where memory could not be told of a commit, nothing more is written."""
    plant(owner, name, KeyboardInterrupt(), after=after)
    with pytest.raises(KeyboardInterrupt):
        store.tick()
    if store._engine.storage.main.failed is not None:
        store.close()
        store = open_store(config=CONFIG)
    store.tick()
    assert delivered(store) == EACH_ONCE


def test_a_log_that_an_append_tears_while_it_fires_is_loaded_anew(
    store: DelayedStore, clock: ManualClock, plant: Plant
) -> None:
    """Nothing arms it any more: what is left of it fires because the firing finds it torn."""
    store.topic("a").send(b"later", deliver_at=START_MS + 2_000)
    commit = Firing._commit

    def torn(firing: Firing, *arguments: Any) -> None:
        commit(firing, *arguments)
        (log,) = (logs[store.topic("a")._existing().topic_id] for logs in firing.loaded.logs.values())
        plant(DelayIndex, "add_one", KeyboardInterrupt(), after=False)
        with pytest.raises(KeyboardInterrupt):
            log.hear(log.tail, np.array([START_MS + 3_000]))

    with patch.object(Firing, "_commit", torn):
        store.tick()
    tick_after(store, clock, 60_000)
    assert delivered(store) == {"a": [b"a", b"later"], "b": [b"b"]}


def test_an_interrupt_after_the_commit_of_a_firing_doubles_nothing(store: DelayedStore, plant: Plant) -> None:
    """The commit itself has told memory, whatever becomes of the caller."""
    plant(WalWriter, "change", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        store.tick()
    assert store._engine.delivery.firing.fired == 2
    store.tick()
    assert delivered(store) == EACH_ONCE


def test_a_partition_whose_closing_was_interrupted_after_its_commit_is_closed(
    store: DelayedStore, clock: ManualClock, plant: Plant
) -> None:
    """Nothing is appended to it any more, as the disk says; one sent for its time comes at once."""
    clock.advance(4_000_000)
    assert store._engine.delivery.firing.fire(clock.now_ms()) == 2
    plant(Environment, "write", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        list(store._engine.delivery.firing.close_finished(clock.now_ms()))
    assert [each.state for each in store.partitions()] == ["closed"]
    store.topic("a").send(b"late", deliver_at=START_MS + 2_000)
    assert delivered(store) == {"a": [b"a", b"late"], "b": [b"b"]}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["_listen", "_read_back"])
def test_a_loading_that_was_interrupted_begins_anew(
    open_store: OpenStore, clock: ManualClock, plant: Plant, name: str, after: bool
) -> None:
    """Its registration is forgotten, and the next tick loads the partition."""
    store = open_store(config=CONFIG)
    for topic in ("a", "b"):
        store.topic(topic).subscribe("s").close()
        store.topic(topic).send(topic.encode(), deliver_at=START_MS + 1_000)
    plant(Loading, name, KeyboardInterrupt(), after=after)
    with pytest.raises(KeyboardInterrupt):
        store.tick()
    tick_after(store, clock, 2_000)
    assert delivered(store) == EACH_ONCE


def test_a_reschedule_interrupted_after_its_commit_fires_at_the_new_time(
    store: DelayedStore, clock: ManualClock, plant: Plant
) -> None:
    """The index has heard of it from the commit, so that nothing fires past the message."""
    topic = store.topic("a")
    moved = topic.send(b"moved", deliver_after=600)
    plant(Environment, "write", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        topic.reschedule(moved, deliver_after=1)
    assert topic.state(moved) == "cancelled"
    tick_after(store, clock, 1_000)
    assert delivered(store) == {"a": [b"a", b"moved"], "b": [b"b"]}
