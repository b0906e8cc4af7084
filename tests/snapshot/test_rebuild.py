"""Making snapshots anew from the logs: as the engine would have written them, whatever was there before."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.partitions.timespan import directory_name
from duelog.snapshot import rebuild
from duelog.snapshot.snapshot_format import snapshot_keys
from duelog.snapshot.writer import remove_snapshots
from duelog.store.codec.format import Table, run_key, seal, unseal
from duelog.store.codec.run import RunLimits
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import InvalidArgument, StoreLocked, UnknownTopic
from duelog.store.log.scan import runs
from duelog.tools.snapshot_tool import list_snapshots, rebuild_snapshots
from tests.conftest import START_MS, OpenStore, present, raising
from tests.partitions.packing_all import buckets_of

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
CONFIG = StoreConfig(snapshot_every_entries=1_000, snapshot_part_bytes=1_024, bucket_ms=1_000, run_entries=10)


@pytest.fixture
def store(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """A closed store: two topics, two days, some fired, cancelled, rescheduled; today's partition has snapshots."""
    opened = open_store(config=CONFIG)
    for topic in ("a", "b"):
        opened.topic(topic).subscribe("reader").close()
        messages = [Message(b"%d" % at, deliver_at=START_MS + 1_000 + at * 500) for at in range(600)]
        messages += [Message(b"tomorrow", deliver_at=START_MS + DAY_MS + at) for at in range(50)]
        ids = opened.topic(topic).send_batch(messages)
        opened.tick()
        assert opened.topic(topic).cancel(ids[400])
        assert opened.topic(topic).reschedule(ids[401], deliver_at=START_MS + HOUR_MS)
    clock.advance(60_000)
    opened.tick()
    opened.topic("a").send_batch([Message(b"later", deliver_at=START_MS + HOUR_MS + at) for at in range(300)])
    opened.close()
    return opened


def environment_of(store: DelayedStore, start_ms: int = START_MS - START_MS % DAY_MS) -> Environment:
    """The environment of a day, opened by itself."""
    return Environment(store.path / "partitions" / directory_name(start_ms) / "g000001", name="partition")


def pending(store: DelayedStore, topic: str) -> list[tuple[int, bytes]]:
    """(due time, payload) of what is left to fire."""
    return [(message.due_ms, message.payload) for message in store.topic(topic).scheduled()]


def indexes(store: DelayedStore) -> list[Any]:
    """The indexes in memory after a tick, as plain values."""
    store.tick()
    logs = [
        log
        for _, by_topic in sorted(store._engine.delivery.firing.loaded.logs.items())
        for _, log in sorted(by_topic.items())
    ]
    return [([(start_ms, list(ids)) for start_ms, ids in buckets_of(log._index)], log.tail) for log in logs]


def remove_all(store: DelayedStore) -> None:
    """No snapshot at all."""
    environment = environment_of(store)
    remove_snapshots(environment)
    environment.close()


def _change(store: DelayedStore, table: Table, change: Callable[[bytes, bytes], bytes | None]) -> None:
    environment = environment_of(store)
    with environment.read() as raw:
        found = [(key, bytes(raw.get(key) or b"")) for key, _ in snapshot_keys(raw, table)]

    def work(transaction: Any) -> None:
        for key, value in found:
            changed = change(key, value)
            if changed is None:
                transaction.raw.delete(key)
            else:
                transaction.raw.put(key, changed)

    environment.write(work)
    environment.close()


def _flipped(key: bytes, value: bytes) -> bytes:
    return value[:9] + bytes([value[9] ^ 4]) + value[10:]


SPOILED: dict[str, Callable[[DelayedStore], None]] = {
    "as they were": lambda store: None,
    "none": remove_all,
    "torn": lambda store: _change(store, Table.SNAPSHOT_META, lambda key, value: None),
    "damaged parts": lambda store: _change(store, Table.SNAPSHOT_PART, _flipped),
    "damaged metadata": lambda store: _change(store, Table.SNAPSHOT_META, _flipped),
    "of a later version": lambda store: _change(
        store, Table.SNAPSHOT_META, lambda key, value: seal(key, b"\x09\x09" + unseal(key, value)[2:])
    ),
}


@pytest.mark.parametrize("state", SPOILED)
def test_what_is_rebuilt_is_what_a_full_replay_makes(store: DelayedStore, open_store: OpenStore, state: str) -> None:
    """Whatever state the snapshots were in, each log has one complete one afterwards, and the index is the same."""
    remove_all(store)
    opened = open_store(config=CONFIG)
    replayed, left = indexes(opened), [pending(opened, topic) for topic in "ab"]
    opened.close()
    SPOILED[state](store)
    told: list[tuple[int, int]] = []
    report = rebuild_snapshots(
        store.path, bucket_ms=CONFIG.bucket_ms, progress=lambda read, total: told.append((read, total))
    )
    assert (report.damaged, report.removed, len(report.logs)) == (0, 0, 4)
    assert told[-1][0] == told[-1][1] == sum(log.found.entries for log in report.logs)
    found = list_snapshots(store.path, verify=True)
    assert [(each.topic or "")[-1] for each in found] == ["a", "b", "a", "b"]
    assert all(each.usable and each.tail == each.log_entries for each in found)
    opened = open_store(config=CONFIG)
    assert indexes(opened) == replayed
    assert [pending(opened, topic) for topic in "ab"] == left


def test_the_new_snapshot_is_complete_before_the_old_ones_go(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the rebuilding fails in the middle, what was usable before still is."""
    before = [each for each in list_snapshots(store.path, verify=True) if each.usable]
    assert before
    monkeypatch.setattr(rebuild, "write_snapshot", raising(RuntimeError("in the middle")))
    with pytest.raises(RuntimeError, match="in the middle"):
        rebuild_snapshots(store.path)
    assert [each for each in list_snapshots(store.path, verify=True) if each.usable] == before


def test_only_what_was_asked_for_is_rebuilt(store: DelayedStore) -> None:
    """One topic, one partition, by name; unknown names are refused."""
    tomorrow = directory_name(START_MS - START_MS % DAY_MS + DAY_MS)
    report = rebuild_snapshots(store.path, topic="b", partition=tomorrow)
    assert [(log.topic, log.found.entries) for log in report.logs] == [("persistent://public/default/b", 50)]
    with pytest.raises(UnknownTopic):
        rebuild_snapshots(store.path, topic="nobody")
    with pytest.raises(InvalidArgument, match="there is none"):
        rebuild_snapshots(store.path, partition="20300101T000000Z")


def test_every_entry_is_read_and_damage_reported(store: DelayedStore) -> None:
    """A flipped bit in a payload and one in a header: both are named, and the rest of the log is in the snapshot."""
    ledger_id = list_snapshots(store.path, topic="a")[0].ledger_id
    environment = environment_of(store)
    with environment.read() as raw:
        payload_key, header_key = run_key(ledger_id, 100), run_key(ledger_id, 110)
        payload, header = bytearray(raw.get(payload_key) or b""), bytearray(raw.get(header_key) or b"")
    payload[-1] ^= 1
    header[20] ^= 1

    def spoil(transaction: Any) -> None:
        transaction.raw.put(payload_key, bytes(payload))
        transaction.raw.put(header_key, bytes(header))

    environment.commit(spoil)
    environment.close()
    report = rebuild_snapshots(store.path)
    damaged = [(error.ledger_id, error.entry_id) for log in report.logs for error in log.found.damaged]
    assert sorted(damaged) == [(ledger_id, 109), (ledger_id, 110)]
    assert all(log.found.written is not None for log in report.logs)


def test_late_entries_that_wait_are_left_to_the_replay(open_store: OpenStore, clock: ManualClock) -> None:
    """A log that ends with entries behind its frontier gets a snapshot of what came before them."""
    opened = open_store(config=CONFIG)
    opened.topic("a").subscribe("reader").close()
    opened.topic("a").send_batch([Message(b"m", deliver_at=START_MS + at) for at in range(1, 200)])
    opened.tick()
    clock.advance(100)
    opened.tick()
    (log,) = (log for logs in opened._engine.delivery.firing.loaded.logs.values() for log in logs.values())
    partition = present(opened._engine.storage.partitions.get(log.start_ms))
    dues = np.array([START_MS + 50, START_MS + 500])
    with partition.environment.read() as raw:
        body = next(runs(raw, "partition", log.ledger_id)).body(0)  # type: ignore[union-attr]
    assert body is not None
    late = present(partition.log(log.topic_id))

    def append(transaction: Transaction) -> None:
        partition.add(transaction.to(partition.start_ms, partition.memtable), late, dues, [body, body], RunLimits())

    opened._engine.storage.main.write(append)
    opened.close()
    report = rebuild_snapshots(opened.path)
    (rebuilt,) = report.logs
    assert (rebuilt.found.entries, present(rebuilt.found.written).tail, rebuilt.found.pending) == (201, 199, 99)
    opened = open_store(config=CONFIG)
    clock.advance(1_000)
    with opened.topic("a").subscribe("reader") as reader:
        received = reader.receive(300)
    assert len(received) == 201


def test_listing_says_why_a_snapshot_is_not_used(store: DelayedStore) -> None:
    """Torn and damaged ones by their state, with the reason."""
    SPOILED["damaged metadata"](store)
    states = {(each.state, each.usable) for each in list_snapshots(store.path)}
    assert states == {("damaged", False)}
    assert all("checksum" in each.reason for each in list_snapshots(store.path))


def test_a_store_that_is_open_is_refused(store: DelayedStore, open_store: OpenStore) -> None:
    """Rebuilding and verifying take the store's lock; listing looks on."""
    open_store(config=CONFIG)
    refused: list[StoreLocked] = []

    def try_it() -> None:
        for tool in (rebuild_snapshots, partial(list_snapshots, verify=True)):
            try:
                tool(store.path)
            except StoreLocked as error:
                refused.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert len(refused) == 2
