"""Trimming of many topics in one commit."""

from collections.abc import Callable, Sequence

import pytest

from duelog import ManualClock, StoreConfig
from duelog.cleanup import trim
from duelog.store.codec import format as fmt
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.errors import CorruptRecord, StoreFull
from duelog.store.files import failpoints
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.upkeep import reclaiming as module
from tests.conftest import START_MS, OpenStore, applied, present, tick_after

pytestmark = pytest.mark.usefixtures("disarmed")


def test_a_topic_with_a_damaged_record_holds_up_no_other(open_store: OpenStore, clock: ManualClock) -> None:
    """They are in one batch: the others are trimmed and their partition goes, and the damaged one is named."""
    config = StoreConfig(partition_ms=1_000, ack_flush_ms=0, ledger_max_age_ms=1_000)
    store = open_store(config=config)
    names = [f"t{number}" for number in range(5)]
    start_ms = START_MS + 5_000
    for number, name in enumerate(names):
        topic = store.topic(name)
        topic.subscribe("s").close()
        topic.send(b"x", deliver_at=start_ms + 1_000 * number)  # a partition for each
    clock.advance(20_000)
    readers = [store.topic(name).subscribe("s") for name in names]
    received = [reader.receive(10) for reader in readers]
    engine = store._engine
    key = fmt.frontier_key(engine.topics.get(store.topic("t2")._name).topic_id, start_ms + 2_000)
    good = present(engine.storage.main.get(key))

    def flip(transaction: LmdbTransaction) -> None:
        value = bytearray(transaction.raw.get(key) or b"")
        value[-1] ^= 1
        transaction.raw.put(key, bytes(value))

    engine.storage.main.commit(flip)
    for reader, messages in zip(readers, received, strict=True):
        reader.ack(messages, durable=True)
    (suspended,) = tick_after(store, clock, 5_000).suspended
    assert (suspended.task, suspended.topic, suspended.failures) == ("trim", "persistent://public/default/t2", 1)
    assert tick_after(store, clock, 1_000).suspended[0].failures == 2  # for this topic alone
    logs = {name: engine.topics.get(store.topic(name)._name).log for name in names}
    trimmed = {name: len(log.ledgers()) for name, log in logs.items()}
    assert trimmed == {**dict.fromkeys(names, 1), "t2": 2}
    engine.storage.main.write(lambda transaction: transaction.put(key, good))
    assert tick_after(store, clock, 2_000).suspended == ()
    assert store.partitions() == []


def test_topics_trimmed_one_by_one_are_not_forgotten_by_a_full_disk(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stops it in the middle, the topics that are left are looked at again."""
    store = open_store(config=StoreConfig(ledger_max_entries=1))
    topics = [store.topic(f"t{number}") for number in range(4)]
    readers = [topic.subscribe("s") for topic in topics]
    for topic, reader in zip(topics, readers, strict=True):
        topic.send(b"x")
        reader.ack(reader.receive(1), durable=True)
    clock.advance(2_000)
    trim_ledgers, alone = trim.trim_ledgers, 0

    def failing(main: Environment, firsts: Sequence[tuple[ManagedLedger, int]], trimmed: Callable[..., object]) -> None:
        nonlocal alone
        if len(firsts) > 1:
            raise CorruptRecord("a record of one of them")
        alone += 1
        if alone == 2:
            raise StoreFull(store.path, "no room")
        trim_ledgers(main, firsts, trimmed)

    monkeypatch.setattr(module, "trim_ledgers", failing)
    trimming = store._engine.upkeep.maintenance.tasks.trimming
    with pytest.raises(StoreFull):
        trimming.run(clock.now_ms(), store._engine.delivery.firing.suspensions)
    left = [store._engine.topics.get(topic._name).topic_id for topic in topics[1:]]
    assert None not in map(store._engine.waking.agenda._due.due_ms, left)
    monkeypatch.undo()
    store.tick()
    logs = [store._engine.topics.get(topic._name).log for topic in topics]
    assert [[ledger.entries for ledger in log.ledgers()] for log in logs] == [[0]] * 4


def test_a_ledger_of_many_runs_keeps_its_record_until_all_of_them_are_removed(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash left runs that nothing names; so did the end of a part."""
    monkeypatch.setattr(trim, "_RUNS_A_PART", 2)
    store = open_store(config=StoreConfig(ledger_max_entries=7))
    main, parts = store._engine.storage.main, list[tuple[int, int]]()

    def left() -> tuple[int, int]:
        """Runs of LMDB, and ledgers that are trimmed and have their record."""
        held = main.hold()
        try:
            keys = list(held.raw.cursor().iternext(values=False))
        finally:
            held.release()
        return sum(bytes(key) >= fmt.RUN_PREFIX for key in keys), len(trim.unfinished(main))

    with store.topic("t").subscribe("s") as subscription:
        for _ in range(14):
            store.topic("t").send(b"x")
            applied(store)
        subscription.ack(subscription.receive(20), durable=True)
    failpoints.arm("trim.part", lambda: parts.append(left()))
    tick_after(store, clock, 2_000)
    assert parts == [(12, 2), (10, 2), (8, 2), (6, 1), (4, 1), (2, 1), (0, 1), (0, 0)]


def test_a_partition_stays_whose_last_marker_is_in_the_first_ledger_that_is_kept(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """The ledgers before it go, and what it points at is read later."""
    store = open_store(config=StoreConfig(partition_ms=1_000, ledger_max_entries=2, ack_flush_ms=0))
    with store.topic("t").subscribe("s") as subscription:
        store.topic("t").send_payloads([b"0", b"1", b"2"], deliver_after=1)
        tick_after(store, clock, 5_000)
        subscription.ack(subscription.receive(2), durable=True)
        assert tick_after(store, clock, 5_000).trimmed == 1
        (last,) = subscription.receive(5)
        assert (last.payload, [row.state for row in store.partitions()]) == (b"2", ["closed"])
