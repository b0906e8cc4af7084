"""Every kind of record, each alone, flipped and missing: what is lost is what cannot be read, and the report says so.

Payloads name their topic and are unique, so what each subscription is to get is known without the engine: what was
sent, less what it acknowledged, less what was cancelled. Where the copy of a record is damaged as well the rest has to
tell, and what it cannot tell may come again, within the numbers of the report.
"""

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, StoreConfig
from duelog.store.codec.body import decode_body
from duelog.store.codec.format import Table, split_run_key
from duelog.store.codec.run import Run, RunKind
from duelog.store.wal.write_ahead_log import WriteAheadLog
from duelog.tools.repair.repair_store import RepairReport, repair_store
from duelog.tools.store_check import check_store
from tests.tools.small_records import DAMAGES, IN_BOTH, Damage, environments, keys

pytestmark = pytest.mark.fault

HOUR_MS = 3_600_000
START_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
CONFIG = StoreConfig(
    partition_ms=HOUR_MS, ledger_max_entries=60, snapshot_every_entries=50, run_entries=16, background=False,
    max_clock_jump_ms=None,
)  # fmt: skip
TOPICS = ("a", "b")
READERS = ("one", "two")
SNAPSHOTS = (Table.SNAPSHOT_PART, Table.SNAPSHOT_META)
UNSEEN = {
    Table.POLICY, Table.DOCUMENT, Table.RECURRENCE, Table.SEQUENCE, Table.ACKED, Table.ATTEMPTS, Table.PAUSE,
    Table.CANCELLED, Table.ADMITTED, Table.COUNTER, Table.KEY, Table.NUMBERED,
}  # fmt: skip
"""Records that nothing may tell of once they and their copies are gone."""

Owed = dict[tuple[str, str], set[bytes]]


@dataclass
class Twin:
    """The story of a store: what each subscription is to get, what was cancelled, what was rescheduled."""

    owed: Owed = field(default_factory=dict)
    cancelled: set[bytes] = field(default_factory=set)
    moved: set[bytes] = field(default_factory=set)


def build(path: Path) -> Twin:
    """A store with a closed, a begun and future partitions, and every kind of small record."""
    twin = Twin({(topic, reader): set() for topic in TOPICS for reader in READERS})
    clock = ManualClock(START_MS)
    with pytest.MonkeyPatch.context() as patch, DelayedStore.open(path, CONFIG, clock=clock) as store:
        patch.setattr(WriteAheadLog, "leave_empty", lambda self: None)  # as after a crash: repair reads the log, too
        readers = {key: store.topic(key[0]).subscribe(key[1]) for key in twin.owed}
        number = 0

        def send(topic: str, count: int, first_ms: int, step_ms: int) -> list[tuple[bytes, object]]:
            nonlocal number
            payloads = [f"{topic} {number + at}".encode() for at in range(count)]
            number += count
            messages = [
                Message(payload, deliver_at=clock.now_ms() + first_ms + at * step_ms)
                for at, payload in enumerate(payloads)
            ]
            for reader in READERS:
                twin.owed[topic, reader].update(payloads)
            return list(zip(payloads, store.topic(topic).send_batch(messages), strict=True))

        def give(topic: str) -> None:
            for reader in READERS:
                for at, message in enumerate(readers[topic, reader].receive(1_000, timeout=0)):
                    if at % 3 != READERS.index(reader):
                        readers[topic, reader].ack(message)
                        twin.owed[topic, reader].discard(message.payload)
                    else:
                        readers[topic, reader].nack(message, delay=86_400)

        def forget(topic: str, payload: bytes) -> None:
            twin.cancelled.add(payload)
            for reader in READERS:
                twin.owed[topic, reader].discard(payload)

        for key in ("namespace/a", "namespace/b"):
            store.documents.put(key, key.encode())
        for topic in TOPICS:
            send(topic, 70, 1_000, 20_000)
            send(topic, 40, 0, 0)
            waiting = [*send(topic, 40, HOUR_MS, 60_000), *send(topic, 30, 3 * HOUR_MS, 60_000)]
            for payload, message_id in waiting[::7]:
                assert store.topic(topic).cancel(message_id)  # type: ignore[arg-type]
                forget(topic, payload)
            for payload, message_id in waiting[1::7]:
                twin.moved.add(payload)
                moved = store.topic(topic).reschedule(message_id, deliver_after=4 * 3_600)  # type: ignore[arg-type]
                assert moved is not None
            producer = store.topic(topic).producer("numbered")
            for sequence in range(3):
                payload = f"{topic} numbered {sequence}".encode()
                producer.send(Message(payload, deliver_after=2 * 3_600), sequence_id=sequence)
                for reader in READERS:
                    twin.owed[topic, reader].add(payload)
            keyed = f"{topic} keyed".encode()
            store.topic(topic).send(keyed, deliver_after=3 * 3_600, dedup_key="key")
            for reader in READERS:
                twin.owed[topic, reader].add(keyed)
            store.topic(topic).every("tick", interval=1_800, payload=b"tick")
        store.set_policies(DelayedDeliveryPolicies(tick_time_ms=1), topic="a")
        store.topic("a").subscription("two").pause(START_MS + 3 * HOUR_MS)
        for _ in range(4):
            clock.advance(HOUR_MS // 3)
            store.tick()
            for topic in TOPICS:
                give(topic)
        assert {partition.state for partition in store.partitions()} == {"closed", "current", "future"}
        assert list(store.check(deep=True)) == []
    return twin


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Twin]:
    """The store and its twin."""
    path = tmp_path_factory.mktemp("matrix") / "store"
    twin = build(path)
    assert check_store(path, deep=True) == []
    return path, twin


def unreadable(directory: Path, key: bytes) -> set[bytes]:
    """Payloads that stand in a value."""
    if key[0] != Table.RUN:
        return set()
    with lmdb.open(str(directory), readonly=True, lock=False, max_dbs=0) as environment, environment.begin() as raw:
        run = Run("", key, raw.get(key, b""))
    if run.kind == RunKind.MARKERS:
        return set()
    return {decode_body(body)[1] for _, body in run.bodies() if isinstance(body, bytes)}


def delivered(path: Path) -> dict[tuple[str, str], Counter[bytes]]:
    """Receive with every subscription until nothing more comes, an hour after all is due."""
    found: dict[tuple[str, str], Counter[bytes]] = {}
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS + 12 * HOUR_MS)) as store:
        store.tick()
        for topic in list(store.topics()):
            for each in topic.stats().subscriptions:
                counts = found.setdefault((topic.name.rsplit("/")[-1], each.name), Counter())
                with topic.subscribe(each.name) as reader:
                    reader.resume()  # one whose pause has lost its end stays paused
                    while messages := reader.receive(1_000, timeout=0):
                        counts.update(message.payload for message in messages if message.payload != b"tick")
                        reader.ack(messages)
        assert list(store.check(deep=True)) == []
    return found


def _bodies(run: Run) -> int:
    return sum(bool(body) for _, body in run.bodies())


def readable(directory: Path) -> int:
    """Entries of an environment that have something to read: a body, or a marker."""
    with lmdb.open(str(directory), readonly=True, lock=False, max_dbs=0) as environment, environment.begin() as raw:
        runs = [Run("", key, value) for key, value in raw.cursor() if key[0] == Table.RUN]
        return sum(run.count if run.kind == RunKind.MARKERS else _bodies(run) for run in runs)


def adds_up(path: Path, report: RepairReport) -> None:
    """The found are the kept and the discarded, kind by kind; and those that are kept are there."""
    for kind, tally in report.kinds.items():
        assert tally.found == tally.kept + tally.discarded, kind
    if report.kinds:
        partitions = sum(map(readable, environments(path)[1:]))
        assert report.kinds["entries of partitions"].kept == partitions
        assert report.kinds["entries of main logs"].kept <= readable(path / "main")


def judge(twin: Twin, report: RepairReport, found: dict[tuple[str, str], Counter[bytes]], gone: set[bytes],
          *, cut: bool) -> None:  # fmt: skip
    """Nothing but what could not be read is lost; what comes beside what is expected is within the report's numbers.

    cut: the end of a log may be gone, of which nothing may tell how long it was.
    """
    elsewhere = {payload for (topic, _), counts in found.items() if topic not in TOPICS for payload in counts}
    renamed = {topic: counts for (topic, name), counts in found.items() if topic in TOPICS and name not in READERS}
    lost: set[bytes] = set()
    again = uncancelled = 0
    for (topic, reader), owed in twin.owed.items():
        counts = found.get((topic, reader))
        if counts is None:
            counts = renamed.pop(topic)  # under a name that says that its own is lost
        missing = owed - counts.keys() - elsewhere
        assert missing <= gone
        lost |= missing
        assert len(owed & (counts.keys() | elsewhere)) + len(missing) == len(owed)
        uncancelled = max(uncancelled, len(counts.keys() & twin.cancelled))
        again += sum(count - (payload in owed) for payload, count in counts.items() if payload not in twin.cancelled)
    assert not renamed
    ticks = int(b"tick" in gone)  # an occurrence of the schedule, which is in no list here
    assert report.lost <= len(lost) + ticks
    assert report.lost >= (0 if cut else len(lost))
    assert again <= report.again
    assert uncancelled <= report.uncancelled


def chosen(path: Path, table: Table) -> list[tuple[Path, bytes]]:
    """Two records of a table in the main environment, of runs the first and the last of every ledger.

    In a partition one of each: what there is of the two topics is alike, and they take turns.
    """
    found = []
    for number, directory in enumerate(environments(path)):
        groups: dict[int, list[bytes]] = {}
        for key in keys(directory, table):
            groups.setdefault(split_run_key(key)[0] if table is Table.RUN else 0, []).append(key)
        for at, group in enumerate(groups.values()):
            ends = [group[0], group[-1]]
            found += [(directory, key) for key in dict.fromkeys(ends if number == 0 else [ends[(number + at) % 2]])]
    return found


UNCOPIED = (*SNAPSHOTS, Table.RUN, Table.COPY)
CASES = [
    pytest.param(
        damages, table, damage, id=f"{table.name}-{damage}-{place}",
        marks=[pytest.mark.proof] * ((damage == "flipped") == (damages is IN_BOTH)),
    )
    for place, damages, others in (("alone", DAMAGES, ()), ("with its copy", IN_BOTH, UNCOPIED))
    for table in Table
    if table not in (Table.ORIGIN, Table.SET_ASIDE, *others)
    for damage in DAMAGES
]  # fmt: skip
"""Each table is flipped alone and missing with its copy; the other way round in `make proof`."""


@pytest.mark.parametrize(("damages", "table", "damage"), CASES)
def test_a_damaged_record_costs_what_cannot_be_read_and_no_more(
    whole: tuple[Path, Twin], tmp_path: Path, damages: dict[str, Damage], table: Table, damage: str
) -> None:
    """Records of each kind in each environment, one at a time; after a repair the store is sound.

    Those whose copies are whole are damaged together: each is made anew from its own.
    """
    path, twin = whole
    places = chosen(path, table)
    assert places
    alone = damages is DAMAGES
    for damaged in [places] if alone and table is not Table.RUN else [[place] for place in places]:
        copy = shutil.copytree(path, tmp_path / "copy")
        gone = set(twin.moved) if table is Table.ADMITTED and not alone else set[bytes]()
        for directory, key in damaged:
            gone |= unreadable(directory, key)
            damages[damage](copy / directory.relative_to(path), key)
        report = repair_store(copy, tmp_path / "given-up")
        print([(directory.name, key.hex()) for directory, key in damaged], report)
        adds_up(copy, report)
        assert report.left == []
        assert repair_store(copy, tmp_path / "given-up").actions == []
        if report.kinds:
            judge(twin, report, delivered(copy), gone, cut=table is Table.RUN and damage == "missing")
            if alone and table is not Table.RUN:
                assert (report.lost, report.again, report.uncancelled, report.subscriptions) == (0, 0, 0, [])
        else:
            assert damage == "missing"
            assert table in (UNCOPIED if alone else UNSEEN)
            for reader, counts in delivered(copy).items():
                assert twin.owed[reader] - counts.keys() <= gone
        shutil.rmtree(copy)
