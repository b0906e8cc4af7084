"""Replay of the write-ahead log: each row counts once, or opening names the missing ones."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, Message
from duelog.errors import DamagedStore
from duelog.store.codec.format import run_key
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.files import pages as file_pages
from duelog.store.wal.segment import Group, GroupContent, Row, RowKind, Segment, file_name, read_segment
from duelog.store.wal.wal_reader import DIRECTORY
from duelog.store.wal.write_batch import single_rows
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied, present
from tests.duelog.side_by_side import CONFIG, FIRST_MS, crashed, everything, held, in_wal, send, unapplied
from tests.proof import length

CONFIG = replace(CONFIG, wal_bytes=1 << 20)


def messages(*hours: int) -> list[Message]:
    """Due so many hours later; 0: at once."""
    return [Message(b"%d" % hour, deliver_at=FIRST_MS + hour * HOUR_MS if hour else START_MS) for hour in hours]


def rewrite(path: Path, change: Callable[[list[list[Row]]], Sequence[Sequence[Row]]]) -> None:
    """Have the last segment of a store that is not open hold other groups."""
    file = max((path / DIRECTORY).glob("*.wal"))
    number = int(file.stem)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=True) as store:
        store_id = store._engine.storage.store_id
    groups: list[Group] = read_segment(path / DIRECTORY, number, store_id).groups
    rows = [list(single_rows(group.rows())) for group in groups]
    size = max(file.stat().st_size, 24 << 10)  # that of a clean close has place for nothing
    file.unlink()
    segment = Segment(path / DIRECTORY, number, store_id, size)
    for group in change(rows):
        segment.append(GroupContent.of(group), flush=True)
    segment.close()


@pytest.mark.series
@settings(max_examples=length("DUELOG_EXAMPLES", 10, 25), deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.lists(st.integers(0, 3), min_size=1, max_size=6),
            st.sampled_from(("apply main", "apply 1", "apply 2", "checkpoint", "crash")),
        ),
        min_size=1,
        max_size=14,
    )
)
def test_rows_are_applied_once_whatever_was_applied_before_a_crash(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[int] | str]
) -> None:
    """All of it, in part, or nothing; and again after the next crash."""
    path, clock = tmp_path_factory.mktemp("replay"), ManualClock(START_MS)
    opened, sent = 0, list[bytes]()
    store = DelayedStore.open(path / "0", replace(CONFIG, ledger_max_entries=3), clock=clock)
    try:
        for step in [*steps, "crash", "crash"]:
            engine = store._engine
            if isinstance(step, list):
                store.topic("a").send_batch(messages(*step))
                sent += [b"%d" % hour for hour in step]
            elif step == "apply main":
                engine.storage.main.apply()
            elif step == "checkpoint":
                present(engine.wal_writer).apply_all()
            elif step == "crash":
                opened += 1
                crashed(store, path / str(opened))
                store.close()
                store = DelayedStore.open(path / str(opened), replace(CONFIG, ledger_max_entries=3), clock=clock)
            else:
                partition = engine.storage.partitions.get(FIRST_MS + int(step[-1]) * HOUR_MS)
                if partition is not None:
                    with engine.storage.partitions.lease(partition):
                        partition.environment.apply()
        assert list(store.check(deep=True)) == []
        assert everything(store, clock) == sorted(sent)
    finally:
        store.close()


@pytest.mark.parametrize("pages", [0, file_pages.FEW_PAGES])
@pytest.mark.parametrize("count", [100, 600, 1_500])
def test_a_last_run_of_many_entries_is_no_reason_to_refuse_a_store(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, pages: int
) -> None:
    """Its columns are read as far as they go, whichever way a partition is looked up."""
    monkeypatch.setattr(file_pages, "FEW_PAGES", pages)
    config = replace(CONFIG, run_entries=2_000, run_bytes=1 << 20)
    store = open_store(config=config)
    sent = dict.fromkeys((send(store, number) for number in range(count)), True)
    applied(store)
    sent[send(store, count)] = True
    assert held(open_store(crashed(store, tmp_path / "copy"), config)).keys() == sent.keys()


def test_the_numbers_of_a_producer_are_there_after_a_crash_if_its_messages_are(
    open_store: OpenStore, store: DelayedStore, tmp_path: Path, clock: ManualClock
) -> None:
    """No written group is stored again, however much of it was applied."""
    producer = store.topic("a").producer("p")
    before = producer.send_batch(messages(0, 1, 2))
    store._engine.storage.main.apply()
    after = producer.send_batch(messages(1, 0), first_sequence_id=7)
    again = open_store(crashed(store, tmp_path / "copy"), CONFIG)
    producer = again.topic("a").producer("p")
    assert producer.last_sequence_id == 8
    found = [producer.send(message, sequence_id=at) for at, message in enumerate(messages(*[3] * 9))]
    assert (found[:3], found[7:]) == (before, after)
    assert everything(again, clock) == sorted([b"0", b"1", b"2", b"1", b"0"] + [b"3"] * 4)


def test_a_row_of_a_partition_that_has_closed_or_is_gone_is_passed_over(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """It was applied before that was recorded: it is not applied again."""
    store.topic("a").subscribe("s")
    store.topic("a").send_batch(messages(1, 2))
    rows = [row for group in in_wal(store) for row in single_rows(group.rows()) if row.start_ms == FIRST_MS + HOUR_MS]
    assert rows
    clock.set(FIRST_MS + 2 * HOUR_MS)
    assert store.tick().closed == 1
    store.close()
    gone = [row._replace(start_ms=FIRST_MS + 9 * HOUR_MS) for row in rows]
    rewrite(store.path, lambda _: [rows, gone])
    again = open_store(config=CONFIG)
    assert not unapplied(again)
    assert everything(again, clock) == [b"1", b"2"]


@pytest.mark.parametrize("lost", [[0], [1], [0, 1]])
def test_a_store_that_has_lost_groups_before_others_is_refused(
    store: DelayedStore, tmp_path: Path, lost: list[int]
) -> None:
    """Else an id would be given out twice; nothing is changed, and the error says what is missing."""
    send(store, 9)
    applied(store)
    for number in range(4):
        send(store, number)
    copy = crashed(store, tmp_path / "copy")

    def lose(groups: list[list[Row]]) -> list[list[Row]]:
        sent = [at for at, group in enumerate(groups) if any(row.kind == RowKind.RUN for row in group)]
        return [group for at, group in enumerate(groups) if at not in [sent[which] for which in lost]]

    rewrite(copy, lose)
    first, files = max(lost) + 2, sorted((copy / DIRECTORY).glob("*.wal"))
    for _ in range(2):
        with pytest.raises(DamagedStore, match=rf"holds entry {first} .* which ends at entry \d: entries were lost"):
            DelayedStore.open(copy, CONFIG, clock=ManualClock(START_MS))
    assert sorted((copy / DIRECTORY).glob("*.wal")) == files


@pytest.fixture(params=["few pages", "with LMDB"])
def looked_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery looks up what is applied in either way."""
    if request.param == "with LMDB":
        monkeypatch.setattr(file_pages, "FEW_PAGES", -1)


@pytest.mark.usefixtures("looked_up")
def test_a_store_that_has_lost_a_batch_before_another_is_refused(
    open_store: OpenStore, store: DelayedStore, tmp_path: Path
) -> None:
    """In one of the logs that it had messages for: the error says which, and where it ends."""
    for _ in range(3):
        ids = store.topic("a").send_batch(messages(1, 2, 2, 3))
    copy = crashed(store, tmp_path / "copy")
    ledger_id = ids[1].ledger_id
    second = run_key(ledger_id, 2)

    def lose(groups: list[list[Row]]) -> list[list[Row]]:
        return [[row for row in group if row.key != second] for group in groups]

    rewrite(copy, lambda groups: groups)
    assert held(open_store(copy, CONFIG)) == held(store)
    copy = crashed(store, tmp_path / "other")
    rewrite(copy, lose)
    lost = f"holds entry 4 of ledger {ledger_id} in partition .*, which ends at entry 2: entries were lost"
    with pytest.raises(DamagedStore, match=lost):
        DelayedStore.open(copy, CONFIG, clock=ManualClock(START_MS))


@pytest.mark.usefixtures("looked_up")
def test_a_partition_of_another_store_is_refused_when_the_log_has_rows_for_it(
    open_store: OpenStore, tmp_path: Path
) -> None:
    """By its record, whatever entries it has."""
    other, store = open_store(tmp_path / "other", CONFIG), open_store(config=CONFIG)
    for each in (other, store):
        send(each, 0)
    other.close()
    copy = crashed(store, tmp_path / "copy")
    shutil.rmtree(copy / "partitions")
    shutil.copytree(other.path / "partitions", copy / "partitions", ignore=shutil.ignore_patterns("lock.mdb"))
    with pytest.raises(DamagedStore, match="the catalog says"):
        DelayedStore.open(copy, CONFIG, clock=ManualClock(START_MS))


@pytest.mark.usefixtures("looked_up")
def test_a_partition_that_was_put_back_from_an_older_copy_is_refused(
    open_store: OpenStore, store: DelayedStore, tmp_path: Path
) -> None:
    """The log does not hold any more what was applied to it."""
    send(store, 0)
    store.close()
    shutil.copytree(store.path / "partitions", tmp_path / "old")
    store = open_store(config=CONFIG)
    send(store, 1)
    applied(store)
    send(store, 2)
    copy = crashed(store, tmp_path / "copy")
    shutil.rmtree(copy / "partitions")
    shutil.copytree(tmp_path / "old", copy / "partitions", ignore=shutil.ignore_patterns("lock.mdb"))
    with pytest.raises(DamagedStore, match="entries were lost"):
        DelayedStore.open(copy, CONFIG, clock=ManualClock(START_MS))


@pytest.mark.parametrize("what", ["missing", "foreign"])
def test_a_store_without_its_log_is_refused(open_store: OpenStore, tmp_path: Path, what: str) -> None:
    """Also where it holds nothing that is not applied: that cannot be known."""
    other = open_store(tmp_path / "other", CONFIG)
    store = open_store(config=CONFIG)
    for each in (other, store):
        send(each, 0)
        each.close()
    number = max(int(file.stem) for file in (store.path / DIRECTORY).iterdir())
    file = store.path / DIRECTORY / file_name(number)
    if what == "missing":
        file.unlink()
    else:
        shutil.copy(other.path / DIRECTORY / file_name(number), file)
    with pytest.raises(DamagedStore, match="is missing" if what == "missing" else "another store"):
        DelayedStore.open(store.path, CONFIG, clock=ManualClock(START_MS))


@pytest.mark.usefixtures("looked_up")
def test_a_damaged_last_run_does_not_make_the_store_forget_what_the_log_holds(
    store: DelayedStore, tmp_path: Path
) -> None:
    """The ledger seems to go on far behind it: the store is refused."""
    ledger_id = send(store, 0).ledger_id
    applied(store)
    send(store, 1)
    copy = crashed(store, tmp_path / "copy")
    (directory,) = (copy / "partitions").glob("*/g*")
    environment = Environment(directory, name="partition")
    key = run_key(ledger_id, 0)

    def damage(transaction: LmdbTransaction) -> None:
        value = bytearray(transaction.raw.get(key) or b"")
        value[9] ^= 1
        transaction.raw.put(key, bytes(value))

    environment.commit(damage)
    environment.close()
    for _ in range(2):
        with pytest.raises(DamagedStore, match="whose last run, from entry 0 on, cannot be read"):
            DelayedStore.open(copy, CONFIG, clock=ManualClock(START_MS))
