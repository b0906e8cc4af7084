"""What is in the WAL when a store is opened: each message gets its place, once, or opening says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import DamagedStore, StoreFull
from duelog.store.codec.body import encode_one
from duelog.store.codec.format import run_key
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.message import Message
from duelog.store.wal.wal_file import FILE_NAME, WalRecord, read_wal, write_wal
from tests.conftest import START_MS, OpenStore

HOUR_MS = 3_600_000
CONFIG = StoreConfig(partition_ms=HOUR_MS, preload_ms=0)
FIRST_MS = START_MS // HOUR_MS * HOUR_MS + 2 * HOUR_MS


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, bytes, list[int]]:
    """A closed store with a message in each of two partitions: its path and id, and the ledgers of the logs."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        ids = store.topic("a").send_payloads([b"0", b"0"], deliver_at=[FIRST_MS + 1, FIRST_MS + HOUR_MS + 1])
        return path, store._engine.store_id, [id_.ledger_id for id_ in ids]


def record(made: tuple[Path, bytes, list[int]], entry_id: int, hour: int = 0) -> WalRecord:
    """A message of a WAL, told by its entry."""
    due_ms, body = encode_one(Message(b"%d" % entry_id, deliver_at=FIRST_MS + hour * HOUR_MS + 9), START_MS, 1 << 20)
    return WalRecord(FIRST_MS + hour * HOUR_MS, made[2][hour], due_ms, entry_id, body)


def payloads(store: DelayedStore) -> list[tuple[int, bytes]]:
    """Entry ids and payloads of what waits."""
    return [(message.message_id.entry_id, bytes(message.payload)) for message in store.topic("a").scheduled()]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=6), st.booleans())
def test_a_replay_appends_what_is_missing_once(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, int]], twice: bool
) -> None:
    """Whatever part of it the partitions have, and however often groups were written."""
    path = tmp_path_factory.mktemp("replay") / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("a")
        ids = topic.send_payloads([b"0", b"0"], deliver_at=[FIRST_MS + 1, FIRST_MS + HOUR_MS + 1])
        made = path, store._engine.store_id, [id_.ledger_id for id_ in ids]
        stored = [1, 1]
        for hour, count in runs[: len(runs) // 2]:  # the partitions have these
            for _ in range(count):
                topic.send(b"%d" % stored[hour], deliver_at=FIRST_MS + hour * HOUR_MS + 9)
                stored[hour] += 1
    records: list[WalRecord] = []
    tails = [1, 1]
    for hour, count in runs:
        group = [record(made, tails[hour] + each, hour) for each in range(count)]
        tails[hour] += count
        records += group * (1 + twice)
    if records:
        write_wal(path, made[1], records)
    for _ in range(2):
        with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
            expected = [(entry, b"%d" % entry) for tail in tails for entry in range(tail)]
            assert payloads(store) == expected
            assert list(store.check()) == []
            assert read_wal(path, made[1]) == []


def test_a_message_whose_partition_or_log_is_gone_is_passed_over(
    made: tuple[Path, bytes, list[int]], open_store: OpenStore
) -> None:
    """The partition was deleted since, or a later one stands in its place: its reserved entries were applied."""
    other = record(made, 5)._replace(ledger_id=99)
    gone = record(made, 5)._replace(start_ms=FIRST_MS + 9 * HOUR_MS)
    write_wal(made[0], made[1], [other, gone, record(made, 1)])
    assert payloads(open_store(config=CONFIG)) == [(0, b"0"), (1, b"1"), (0, b"0")]


def test_a_message_of_a_partition_that_has_closed_is_passed_over(
    made: tuple[Path, bytes, list[int]], open_store: OpenStore, clock: ManualClock
) -> None:
    """It was read, and all its reserved entries with it."""
    store = open_store(config=CONFIG)
    store.topic("a").subscribe("s")
    clock.set(FIRST_MS + HOUR_MS)
    assert store.tick().closed == 1
    store.close()
    write_wal(made[0], made[1], [record(made, 1), record(made, 1, 1)])
    again = open_store(config=CONFIG)
    assert payloads(again) == [(0, b"0"), (1, b"1")]
    for partition in again._engine.partitions.held():
        assert [log.ledger.entries for log in partition.logs()] == [1 if partition.start_ms == FIRST_MS else 2]


@pytest.mark.parametrize("entries", [(2,), (1, 3), (0, 2, 3)])
def test_a_store_that_has_lost_what_lies_before_the_wal_is_refused(
    made: tuple[Path, bytes, list[int]], entries: tuple[int, ...]
) -> None:
    """Else an id would be given out twice; nothing is changed."""
    write_wal(made[0], made[1], [record(made, entry) for entry in entries])
    for _ in range(2):
        with pytest.raises(DamagedStore, match=r"ends at entry 1, and not entry [12]: entries were lost") as caught:
            DelayedStore.open(made[0], CONFIG, clock=ManualClock(START_MS))
        assert caught.value.path == made[0] / FILE_NAME
    assert len(read_wal(made[0], made[1])) == len(entries)


def test_a_damaged_last_run_does_not_make_the_store_forget_what_the_wal_holds(
    made: tuple[Path, bytes, list[int]],
) -> None:
    """The log seems to go on far behind it; where the WAL's entries lie before, or in other logs, it opens."""
    path, store_id, ledgers = made
    (directory, _) = sorted((path / "partitions").glob("*/g*"))
    environment = Environment(directory, name="partition")
    key = run_key(ledgers[0], 0)

    def damage(transaction: Transaction) -> None:
        value = bytearray(transaction.raw.get(key) or b"")
        value[9] ^= 1
        transaction.raw.put(key, bytes(value))

    environment.write(damage)
    environment.close()
    write_wal(path, store_id, [record(made, 1), record(made, 1, 1)])
    for _ in range(2):
        with pytest.raises(DamagedStore, match="whose last run, from entry 0 on, cannot be read") as caught:
            DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS))
        assert caught.value.path == path / FILE_NAME
    (path / FILE_NAME).unlink()
    write_wal(path, store_id, [record(made, 1, 1)])
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        assert payloads(store) == [(0, b"0"), (1, b"1")]


def test_a_store_without_room_for_what_the_wal_holds_is_not_opened(
    made: tuple[Path, bytes, list[int]], monkeypatch: pytest.MonkeyPatch, open_store: OpenStore
) -> None:
    """It is opened once there is room, and nothing is lost."""
    write_wal(made[0], made[1], [record(made, 1), record(made, 1, 1)])
    with monkeypatch.context() as patch:
        replaced = []

        def fail(environment, work):  # type: ignore[no-untyped-def]
            replaced.append(work)
            raise StoreFull(environment.path, "no room, says the test")

        patch.setattr(Environment, "write", fail)
        with pytest.raises(StoreFull):
            DelayedStore.open(made[0], CONFIG, clock=ManualClock(START_MS))
    assert replaced
    assert payloads(open_store(config=CONFIG)) == [(0, b"0"), (1, b"1"), (0, b"0"), (1, b"1")]


@pytest.mark.parametrize("durability", ["relaxed", "none"])
def test_what_is_replayed_is_on_disk_whatever_the_durability_is(
    made: tuple[Path, bytes, list[int]], durability: str, monkeypatch: pytest.MonkeyPatch, open_store: OpenStore
) -> None:
    """The WAL is begun anew after that."""
    write_wal(made[0], made[1], [record(made, 1)])
    synced: list[str] = []
    monkeypatch.setattr(
        "duelog.store.env.environment.Environment.sync", lambda environment: synced.append(environment.name)
    )
    store = open_store(config=StoreConfig(partition_ms=HOUR_MS, durability=durability))  # type: ignore[arg-type]
    assert any(name.startswith("partition") for name in synced)
    assert payloads(store) == [(0, b"0"), (1, b"1"), (0, b"0")]
