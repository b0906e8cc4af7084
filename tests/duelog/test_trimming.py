"""Trimming of many topics in one commit."""

from __future__ import annotations

import pytest

from duelog import ManualClock, StoreConfig
from duelog.store import format as fmt
from duelog.store.format import CorruptRecord
from duelog.store.transaction import Transaction
from tests.conftest import START_MS, OpenStore


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
    good = engine.main.get(key)
    assert good is not None

    def flip(transaction: Transaction) -> None:
        value = bytearray(transaction.raw.get(key) or b"")
        value[-1] ^= 1
        transaction.raw.put(key, bytes(value))

    engine.main.write(flip)
    for reader, messages in zip(readers, received, strict=True):
        reader.ack(messages, durable=True)
    clock.advance(5_000)
    with pytest.raises(CorruptRecord):
        store.tick()
    with pytest.raises(CorruptRecord):  # it stays so, and goes on being so, for nobody else
        store.tick()
    logs = {name: engine.topics.get(store.topic(name)._name).log for name in names}
    trimmed = {name: len(log.ledgers()) for name, log in logs.items()}
    assert trimmed == {**dict.fromkeys(names, 1), "t2": 2}
    engine.main.write(lambda transaction: transaction.put(key, good))
    store.tick()
    assert store.partitions() == []
