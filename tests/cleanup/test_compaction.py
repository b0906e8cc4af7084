"""The next generation of a partition: what is dropped, what stays, and that a wrong copy is found out."""

import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest
from pyroaring import BitMap

from duelog import DelayedStore, ManualClock, Message, Policies, StoreConfig
from duelog.cleanup.compaction import copy_generation, stage_generation, verify_generation
from duelog.cleanup.compaction_plan import CompactionPlan, partition_logs, plan_generation
from duelog.cleanup.log_claims import LogClaims, claims_of_logs, needed, read_claims
from duelog.store.codec import format as fmt
from duelog.store.codec.format import OriginRecord
from duelog.store.codec.run import Run
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.errors import BrokenInvariant, DamagedStore
from duelog.store.files.directory import remove_tree
from duelog.store.log.scan import runs
from tests.cleanup.compacting import DAY, close_day, finish, plan_of, send_day, source_of
from tests.conftest import DAY_MS, OpenStore, present, raising

RUNS_OF_FOUR = StoreConfig(run_entries=4)


@pytest.fixture
def store(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """A closed day of two topics: of `a` 3, 6 and 8 to 11 are acknowledged, of `b` nothing."""
    store = open_store(config=RUNS_OF_FOUR)
    topic = store.topic("a")
    subscription = topic.subscribe("one")
    store.topic("b").subscribe("slow")
    topic.send_batch([Message(b"x" * (100 + at), deliver_at=1_790_035_200_000 + at) for at in range(14)])
    topic.producer("p").send(Message(b"numbered", deliver_at=1_790_035_200_500), sequence_id=7)
    send_day(store, "b", 5)
    close_day(store, clock)
    received = subscription.receive(15)
    subscription.ack([received[at] for at in (3, 6, 8, 9, 10, 11)], durable=True)
    return store


def copied(store: DelayedStore, tmp_path: Path, plan: CompactionPlan) -> Path:
    """A copy that was not verified."""
    with source_of(store) as source:
        copy_generation(source, plan, tmp_path / "copy")
    return tmp_path / "copy"


def stored(raw: Reads, key: bytes) -> bytes:
    """A value as it is."""
    return bytes(present(raw.get(key)))


def bodies(path: Path, ledger_id: int) -> list[bytes | None]:
    """The bodies of a log."""
    with closing(Environment(path, name="copy", read_only=True, lock=False)) as environment, environment.read() as raw:
        found = []
        for run in runs(raw, "copy", ledger_id):
            assert isinstance(run, Run)
            found += [body for _, body in run.bodies() if body is None or isinstance(body, bytes)]
        return found


def test_what_is_dropped_is_counted_before_it_is(store: DelayedStore) -> None:
    """Entries and bytes of bodies, by log and in all."""
    of_a, of_b = (plan := plan_of(store)).logs
    assert (of_a.entries, of_a.dead_entries) == (15, 6)
    assert of_b.dead_entries == of_b.dead_bytes == 0
    assert plan.dead_bytes == of_a.dead_bytes == 6 * 13 + sum(100 + at for at in (3, 6, 8, 9, 10, 11)) - 6
    assert 0 < plan.dead_ratio < 1


def test_a_plan_is_made_of_the_generation_and_claims_that_were_pickled(store: DelayedStore) -> None:
    """With both, planning needs no main environment; where claims on a log are missing, nothing is planned."""
    with source_of(store) as source:
        with source.read() as raw:
            logs = partition_logs(raw)
        with store._engine.storage.main.read() as raw:
            claims = claims_of_logs(raw, read_claims(raw, "main", [DAY])[DAY], logs)
        packed = pickle.dumps(claims)
        expected = plan_of(store)
        plan = plan_generation(source, pickle.loads(packed))
        assert plan == pickle.loads(pickle.dumps(expected))
        with pytest.raises(BrokenInvariant, match="the claims were not read"):
            plan_generation(source, claims[1:])


def test_the_copy_has_every_entry_and_the_bodies_that_are_needed(store: DelayedStore, tmp_path: Path) -> None:
    """Entry ids and due times stay; the generation says where it comes from."""
    plan = plan_of(store)
    path = copied(store, tmp_path, plan)
    ledger_id = plan.logs[0].ledger_id
    after = bodies(path, ledger_id)
    assert [at for at, body in enumerate(after) if body is None] == [3, 6, 8, 9, 10, 11]
    with closing(Environment(path, name="copy", read_only=True, lock=False)) as copy:
        info = copy.get(fmt.PARTITION_INFO_KEY)
        origin = copy.get(fmt.ORIGIN_KEY)
    assert info == plan.info().pack()
    assert plan.info().generation == 2
    assert origin is not None
    found = OriginRecord.unpack(origin)
    assert found == plan.origin()
    assert (found.generation, found.entries) == (1, 6)
    assert [row.topic_id for row in found.relied_on] == [1]


def test_a_staged_generation_is_discarded_without_a_trace(store: DelayedStore) -> None:
    """And one that fails leaves nothing either."""
    plan = plan_of(store)
    with source_of(store) as source:
        staged = stage_generation(store.path, source, plan)
    assert Path(staged.directory).parent == store.path / "staging"
    assert staged.file_bytes == (Path(staged.directory) / "data.mdb").stat().st_size
    remove_tree(Path(staged.directory))
    assert list((store.path / "staging").iterdir()) == []
    with source_of(store) as source, pytest.raises(KeyboardInterrupt):
        stage_generation(store.path, source, plan, progress=raising(KeyboardInterrupt()))
    assert list((store.path / "staging").iterdir()) == []


def test_a_source_that_is_not_the_planned_one_is_refused(store: DelayedStore) -> None:
    """Another generation, or one that was written to since."""
    plan = plan_of(store)
    with source_of(store) as source:
        source.write(lambda transaction: transaction.put(fmt.log_key(9), fmt.pack_u64(99)))
        with pytest.raises(DamagedStore, match="transaction"):
            stage_generation(store.path, source, plan)
        source.write(lambda transaction: transaction.delete(fmt.log_key(9)))


def thin_one_more(raw: lmdb.Transaction, plan: CompactionPlan) -> None:
    """Drop the bodies of a run that were to stay."""
    key = fmt.run_key(plan.logs[1].ledger_id, 0)
    run = Run("copy", key, stored(raw, key))
    raw.put(key, run.keeping(np.zeros(run.count, dtype=np.bool_)))


def flip_a_body(raw: lmdb.Transaction, plan: CompactionPlan) -> None:
    """Change a byte of a body of a run that was thinned."""
    key = fmt.run_key(plan.logs[0].ledger_id, 0)
    value = bytearray(stored(raw, key))
    value[-1] ^= 1
    raw.put(key, bytes(value))


def lose_a_run(raw: lmdb.Transaction, plan: CompactionPlan) -> None:
    """Remove a run."""
    assert raw.delete(fmt.run_key(plan.logs[0].ledger_id, 8))


def add_a_row(raw: lmdb.Transaction, plan: CompactionPlan) -> None:
    """A row more than the source has."""
    key = fmt.run_key(1 << 40, 0)
    raw.put(key, b"x")


def change_a_row(raw: lmdb.Transaction, plan: CompactionPlan) -> None:
    """Another value of a small row."""
    key = fmt.log_key(1)
    raw.put(key, fmt.seal(key, fmt.pack_u64(12_345)))


def keep_too_much(raw: lmdb.Transaction, plan: CompactionPlan) -> None:
    """Nothing is wrong with the rows, but less was dropped than was said."""
    raw.put(fmt.ORIGIN_KEY, fmt.seal(fmt.ORIGIN_KEY, plan.origin()._replace(entries=5).pack()))


@pytest.mark.parametrize("change", [thin_one_more, flip_a_body, lose_a_run, add_a_row, change_a_row, keep_too_much])
def test_a_wrong_copy_is_found_out(
    store: DelayedStore, tmp_path: Path, change: Callable[[lmdb.Transaction, CompactionPlan], None]
) -> None:
    """Each kind of difference from what was planned."""
    plan = plan_of(store)
    path = copied(store, tmp_path, plan)
    with source_of(store) as source:
        with closing(Environment(path, name="copy", read_only=True, lock=False)) as copy:
            verify_generation(source, copy, plan)
        with lmdb.open(str(path), max_dbs=0, lib_version=0) as env, env.begin(write=True) as raw:
            change(raw, plan)
        copy = Environment(path, name="copy", read_only=True, lock=False)
        with closing(copy), pytest.raises(DamagedStore):
            verify_generation(source, copy, plan)


def test_damage_in_the_source_is_still_found_in_the_copy(store: DelayedStore, tmp_path: Path) -> None:
    """A run whose header cannot be read is copied as it is; a damaged body that is needed keeps its checksum."""
    plan = plan_of(store)
    ledger_id = plan.logs[1].ledger_id
    with source_of(store) as source:

        def damage(transaction: object) -> None:
            raw = transaction.raw  # type: ignore[attr-defined]
            key = fmt.run_key(ledger_id, 0)
            value = bytearray(stored(raw, key))
            value[20] ^= 1
            raw.put(key, bytes(value))

        source.write(damage)
        with source.read() as raw:
            before = stored(raw, fmt.run_key(ledger_id, 0))
        plan = plan_of(store)
        assert plan.logs[1].dead_entries == 0
        staged = stage_generation(store.path, source, plan)
        copy = Environment(Path(staged.directory), name="copy", read_only=True, lock=False)
        with closing(copy), copy.read() as raw:
            assert stored(raw, fmt.run_key(ledger_id, 0)) == before
        remove_tree(Path(staged.directory))
        source.write(damage)


def test_a_finished_generation_waits_in_its_place(store: DelayedStore) -> None:
    """Two of one partition do not meet."""
    one, two = finish(store), finish(store)
    names = sorted(child.name for child in (store.path / "staging" / "ready").iterdir())
    assert sorted([Path(one.directory).name, Path(two.directory).name]) == names
    assert all(name.startswith("20260922T000000Z-g000002-") for name in names)
    assert one.file_bytes <= one.source_bytes


def claims_of(store: DelayedStore, day: int = 0, now_ms: int = 0) -> list[LogClaims]:
    """The claims on a day's partition."""
    with store._engine.storage.main.read() as raw:
        start_ms = DAY + day * DAY_MS
        return read_claims(raw, "main", [start_ms], now_ms=now_ms)[start_ms]


def ids(*entries: int) -> BitMap:
    """A bitmap of entry ids."""
    return BitMap(entries)


def test_claims_are_small_to_send(open_store: OpenStore, clock: ManualClock) -> None:
    """Less than a byte an entry where every second one is acknowledged; little where all are in a row."""
    store = open_store()
    count = 20_000
    subscriptions = [store.topic(topic).subscribe("one") for topic in "ab"]
    for topic in "ab":
        store.topic(topic).send_batch([Message(b"x", deliver_at=DAY + at) for at in range(count)])
    close_day(store, clock)
    for subscription, step in zip(subscriptions, (1, 2), strict=True):
        subscription.ack(subscription.receive(count)[::step], durable=True)
    in_a_row, every_second = (len(pickle.dumps(each)) for each in claims_of(store))
    assert in_a_row < 1_000
    assert every_second < count  # bitmaps of 8 KiB for up to 65,536 entries of a ledger


def test_retention_keeps_what_all_have_acknowledged(open_store: OpenStore, clock: ManualClock) -> None:
    """While its main-log ledger is open, and for as long after it was closed as is asked for."""
    store = open_store(config=StoreConfig(ledger_max_entries=4, retention_ms=3_600_000))
    subscription = store.topic("a").subscribe("one")
    store.topic("b").subscribe("slow")
    send_day(store, "a", 6)
    close_day(store, clock)
    subscription.ack(subscription.receive(6), durable=True)
    now_ms = clock.now_ms()
    kept = claims_of(store, now_ms=now_ms + 3_599_999)[0]
    assert needed(kept, 6, BitMap()) == BitMap(range(6))
    assert not kept.relied_on
    later = claims_of(store, now_ms=now_ms + 3_600_000)[0]
    assert needed(later, 6, BitMap()) == ids(4, 5)  # their ledger is open
    store.set_policies(Policies(retention_ms=0), topic="a")
    assert needed(claims_of(store)[0], 6, BitMap()) == BitMap()


def test_the_newest_bytes_that_retention_asks_for_are_kept(open_store: OpenStore, clock: ManualClock) -> None:
    """The ledger that is written to counts for nothing, and stays; a slow subscription changes nothing."""
    store = open_store(config=StoreConfig(ledger_max_entries=4))
    subscription = store.topic("a").subscribe("one")
    slow = store.topic("a").subscribe("slow")
    send_day(store, "a", 10)
    close_day(store, clock)
    subscription.ack(subscription.receive(10), durable=True)
    slow.ack(slow.receive(10)[1:9], durable=True)
    store.set_policies(Policies(retention_bytes=1), namespace="public/default")
    assert needed(claims_of(store)[0], 10, BitMap()) == ids(0, 4, 5, 6, 7, 8, 9)
    store.set_policies(Policies(retention_bytes=1 << 30), namespace="public/default")
    assert needed(claims_of(store)[0], 10, BitMap()) == BitMap(range(10))


def test_where_the_main_log_is_damaged_only_what_is_known_to_be_done_goes(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Markers that cannot be read may point at anything that was not cancelled or acknowledged."""
    store = open_store()
    subscription = store.topic("a").subscribe("one")
    sent = send_day(store, "a", 3)
    store.topic("a").cancel(sent[0])
    for at in (1, 2):
        clock.set(DAY + at * 1000)
        store.tick()
    close_day(store, clock)
    subscription.ack(subscription.receive(1), durable=True)
    main = store._engine.storage.main

    def damage(transaction: object) -> None:
        cursor = transaction.raw.cursor()  # type: ignore[attr-defined]
        assert cursor.last()
        value = bytearray(cursor.value())
        value[20] ^= 1
        cursor.put(cursor.key(), bytes(value))

    before = claims_of(store)[0]
    main.commit(damage)
    after = claims_of(store)[0]
    assert (before.complete, after.complete) == (True, False)
    assert needed(before, 3, BitMap()) == needed(after, 3, BitMap()) == ids(2)
    assert needed(before, 3, None) == ids(2)
    main.commit(damage)


def test_a_log_of_which_all_was_cancelled_has_no_frontier_and_needs_nothing(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """The facts about it are read by its ledger id."""
    store = open_store()
    store.topic("a").subscribe("one")
    store.topic("b").subscribe("one")
    send_day(store, "b", 1)
    sent = send_day(store, "a", 3)
    assert all(store.topic("a").cancel(each) for each in sent)
    close_day(store, clock)
    assert [row.topic for row in claims_of(store)] == ["persistent://public/default/b"]
    with store._engine.storage.main.read() as raw:
        (claims,) = claims_of_logs(raw, [], [(1, sent[0].ledger_id)])
    assert claims.topic is not None
    assert needed(claims, 3, BitMap()) == BitMap()
    assert needed(claims, 4, BitMap()) == ids(3)  # one that was neither cancelled nor fired: not hidden


def test_nothing_is_needed_of_a_released_log_or_a_deleted_topic(open_store: OpenStore, clock: ManualClock) -> None:
    """Bodies that cannot be handed out any more go, acknowledged or not."""
    store = open_store(config=StoreConfig(ledger_max_entries=4))
    subscription = store.topic("a").subscribe("one")
    store.topic("b").subscribe("slow")
    send_day(store, "a", 4)
    send_day(store, "b", 4)
    close_day(store, clock)
    subscription.ack(subscription.receive(4), durable=True)
    clock.advance(1_000)
    store.tick()
    released, held = claims_of(store)
    assert (released.frontier.released, held.frontier.released) == (1, 0)
    assert needed(released, 4, BitMap()) == BitMap()
    assert needed(held, 4, BitMap()) == BitMap(range(4))
    with store._engine.storage.main.read() as raw:
        (gone,) = claims_of_logs(raw, [], [(99, held.ledger_id)])
    assert needed(gone, 4, BitMap()) == BitMap()
