"""Damage of every kind, planted into a closed store, and what an audit must say of it.

Each kind keeps to partitions or topics of its own, so that all of them can be in one store and none hides another.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from duelog.partitions import cancellations
from duelog.partitions.due_column import dues_of
from duelog.partitions.partition import partition_path
from duelog.partitions.timespan import directory_name
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerState, PartitionState, Table
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run, RunKind, pack_markers
from duelog.store.env.environment import Environment
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail
from duelog.store.log.scan import runs
from tests.audit.histories import HOUR_MS, SLOW, START_MS, TRIMMED, full

OLD_S = 100 * 3_600.0


class Expected(NamedTuple):
    """A finding that an audit must have: its code, what its address contains, and how many entries it is about."""

    code: str
    address: str
    entries: int


class Victim:
    """A store to be damaged: its main environment and partitions, opened for one change at a time."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)

    def main(self) -> Environment:
        return Environment(self.path / "main", name="main")

    def directory(self, hour: int) -> Path:
        with closing(self.main()) as main, main.read() as raw:
            generation = dict(catalog.partitions(raw))[start(hour)].generation
        return partition_path(self.path, start(hour), generation)

    def partition(self, hour: int) -> Environment:
        return Environment(self.directory(hour), name=f"partition {name(hour)}")

    def topic_id(self, topic: str) -> int:
        with closing(self.main()) as main, main.read() as raw:
            record = catalog.find_topic(raw, full(topic))
            assert record is not None
            return record.topic_id

    def frontier(self, topic: str, hour: int) -> FrontierRecord:
        topic_id = self.topic_id(topic)
        with closing(self.main()) as main, main.read() as raw:
            record = catalog.frontier(raw, topic_id, start(hour))
            assert record is not None
            return record

    def put(self, key: bytes, fields: bytes) -> None:
        with closing(self.main()) as main:
            main.write(lambda transaction: transaction.put(key, fields))

    def put_frontier(self, topic: str, hour: int, record: FrontierRecord) -> None:
        self.put(fmt.frontier_key(self.topic_id(topic), start(hour)), record.pack())

    def change_partition(self, hour: int, **fields: object) -> None:
        with closing(self.main()) as main, main.read() as raw:
            record = dict(catalog.partitions(raw))[start(hour)]
        self.put(fmt.partition_key(start(hour)), record._replace(**fields).pack())  # type: ignore[arg-type]

    def references(self, hour: int) -> int:
        with closing(self.main()) as main, main.read() as raw:
            return dict(catalog.partitions(raw))[start(hour)].references

    def cancelled(self, ledger_id: int) -> BitMap:
        with closing(self.main()) as main, main.read() as raw:
            return cancellations.members(raw, Table.CANCELLED, ledger_id)

    def log(self, hour: int, ledger_id: int) -> tuple[list[int], list[tuple[bytes, bytes]]]:
        """(due times of every entry, the runs as they lie there) of a log."""
        with closing(self.partition(hour)) as environment:
            with environment.read() as raw:
                tail = find_tail(raw, "", ledger_id)
                found = [(fmt.run_key(ledger_id, run.first_entry), bytes(run._value))
                         for run in runs(raw, "", ledger_id) if isinstance(run, Run)]  # fmt: skip
            dues = dues_of(environment, ledger_id, np.arange(tail, dtype=np.uint32)).tolist()
        return dues, found

    def put_run(self, environment: Environment, key: bytes, value: bytes | None) -> None:
        with closing(environment):
            if value is None:
                environment.write(lambda transaction: transaction.raw.delete(key))
            else:
                environment.write(lambda transaction: transaction.raw.put(key, value))

    def append_marker(self, topic: str, hour: int, target: int, entry_id: int, due_ms: int) -> None:
        """One more marker at the end of a topic's main log."""
        topic_id = self.topic_id(topic)
        with closing(self.main()) as main:
            with main.read() as raw:
                ledger_id = next(each for each, row in catalog.ledgers(raw, topic_id) if row.state is LedgerState.OPEN)
                tail = find_tail(raw, "main", ledger_id)
            key = fmt.run_key(ledger_id, tail)
            entries, dues = np.array([entry_id], np.uint32), np.array([due_ms])
            value = pack_markers(key, target, start(hour), entries, dues, max(due_ms, start(hour)))
            main.write(lambda transaction: transaction.raw.put(key, value))


def start(hour: int) -> int:
    """Start of the partition of an hour."""
    return START_MS + hour * HOUR_MS


def name(hour: int) -> str:
    """What the directory of an hour is called."""
    return directory_name(start(hour))


def flip(value: bytes, at: int) -> bytes:
    """The value with one byte changed."""
    return value[:at] + bytes((value[at] ^ 0x40,)) + value[at + 1 :]


OPEN_HOUR = 16
"""The first partition that is not closed: part of it has fired."""

Plant = Callable[[Victim], list[Expected]]


def lost_by_a_frontier_that_ran_ahead(victim: Victim) -> list[Expected]:
    """The frontier of an open partition says that entries have fired that have no marker."""
    record = victim.frontier("slow-0", OPEN_HOUR)
    dues, _ = victim.log(OPEN_HOUR, record.ledger_id)
    cancelled = victim.cancelled(record.ledger_id)
    pending = sorted((due, entry) for entry, due in enumerate(dues) if (due, entry) > (record.due_ms, record.entry_id))
    due_ms, entry_id = pending[3]
    passed = [entry for _, entry in pending[:4] if entry not in cancelled]
    ahead = record._replace(due_ms=due_ms, entry_id=entry_id, absorbed_end=len(dues), fired=record.fired + len(passed))
    victim.put_frontier("slow-0", OPEN_HOUR, ahead)
    return [Expected("lost", f"{full('slow-0')}, partition {name(OPEN_HOUR)}", len(passed))]


def lost_where_markers_were_trimmed(victim: Victim) -> list[Expected]:
    """A topic without markers for it any more counts fewer fired messages than lie before its frontier."""
    record = victim.frontier("trimmed-0", 1)
    victim.put_frontier("trimmed-0", 1, record._replace(fired=record.fired - 2))
    return [Expected("lost", f"{full('trimmed-0')}, partition {name(1)}", 2)]


def closed_over_what_had_not_fired(victim: Victim) -> list[Expected]:
    """The frontier of a closed partition lies before some of its entries; their markers are gone with it."""
    topic, hour = "trimmed-1", 3  # not compacted: acknowledged bodies would have been dropped
    record = victim.frontier(topic, hour)
    dues, _ = victim.log(hour, record.ledger_id)
    cancelled = victim.cancelled(record.ledger_id)
    order = sorted((due, entry) for entry, due in enumerate(dues) if entry not in cancelled)
    due_ms, entry_id = order[-4]
    victim.put_frontier(topic, hour, record._replace(due_ms=due_ms, entry_id=entry_id, fired=record.fired - 3))
    return [Expected("lost", f"{full(topic)}, partition {name(hour)}", 3)]


def doubled_marker(victim: Victim) -> list[Expected]:
    """A marker once more at the end of the main log."""
    record = victim.frontier("slow-1", 1)
    dues, _ = victim.log(1, record.ledger_id)
    entry_id = next(entry for entry in range(len(dues)) if entry not in victim.cancelled(record.ledger_id))
    victim.append_marker("slow-1", 1, record.ledger_id, entry_id, dues[entry_id])
    return [Expected("doubled-marker", f"{full('slow-1')}, partition {name(1)}", 1)]


def dangling_marker_of_no_entry(victim: Victim) -> list[Expected]:
    """A marker of an entry past the end of its log."""
    record = victim.frontier("slow-2", 1)
    dues, _ = victim.log(1, record.ledger_id)
    victim.append_marker("slow-2", 1, record.ledger_id, len(dues) + 7, start(1) + 5)
    return [Expected("dangling-marker", f"{full('slow-2')}, partition {name(1)}", 1)]


def dangling_marker_of_another_log(victim: Victim) -> list[Expected]:
    """A marker into a ledger that is not the topic's in that partition."""
    victim.append_marker("slow-3", 1, 9_999, 0, start(1) + 5)
    return [Expected("dangling-marker", f"{full('slow-3')}, partition {name(1)}, ledger 9999", 1)]


def stray_marker(victim: Victim) -> list[Expected]:
    """A marker of an entry that was cancelled."""
    record = victim.frontier("slow-3", 3)
    dues, _ = victim.log(3, record.ledger_id)
    entry_id = victim.cancelled(record.ledger_id).min()
    victim.append_marker("slow-3", 3, record.ledger_id, entry_id, dues[entry_id])
    return [Expected("stray-marker", f"{full('slow-3')}, partition {name(3)}", 1)]


def deleted_too_early(victim: Victim) -> list[Expected]:
    """A partition that slow subscriptions still need is gone from catalog and disk; the topics' frontiers are not."""
    hour = 4
    with closing(victim.main()) as main:
        with main.read() as raw:
            topics = [fmt.trailing_u32(key) for key, _ in _rows(raw, Table.TOPIC_NAME)]
            touched = [topic for topic in topics if catalog.frontier(raw, topic, start(hour)) is not None]
            markers = {topic: _markers_into(raw, topic, start(hour)) for topic in touched}
            names = {topic: catalog.topic_name(raw, topic) for topic in touched}
        main.write(lambda transaction: transaction.delete(fmt.partition_key(start(hour))))
    shutil.rmtree(victim.path / "partitions" / name(hour))
    place = f"partition {name(hour)}"
    return [Expected("deleted-too-early", f"{names[topic]}, {place}", markers[topic]) for topic in touched]


def _markers_into(raw: object, topic_id: int, start_ms: int) -> int:
    count = 0
    for ledger_id, _ in catalog.ledgers(raw, topic_id):  # type: ignore[arg-type]
        for run in runs(raw, "main", ledger_id):  # type: ignore[arg-type]
            if isinstance(run, Run) and run.kind == RunKind.MARKERS and run.base_ms == start_ms:
                count += run.count
    return count


def missing_partition(victim: Victim) -> list[Expected]:
    """The directory of a partition of the catalog is not there."""
    shutil.rmtree(victim.directory(5).parent)
    return [Expected("missing-partition", f"partition {name(5)}", 0)]


def unreadable_partition(victim: Victim) -> list[Expected]:
    """Pages of a partition's file are zeros."""
    file = victim.directory(6) / "data.mdb"
    with file.open("r+b") as damaged:
        damaged.seek(4 * 4096)
        damaged.write(bytes(6 * 4096))
    return [Expected("unreadable-partition", f"partition {name(6)}", 0)]


def swapped_partition(victim: Victim) -> list[Expected]:
    """The file of another partition lies in the place of one."""
    shutil.copy(victim.directory(1) / "data.mdb", victim.directory(7) / "data.mdb")
    return [Expected("unreadable-partition", f"partition {name(7)}", 0)]


def damaged_body(victim: Victim) -> list[Expected]:
    """A bit of one message's body."""
    hour, topic = 8, victim.random.choice(SLOW)
    ledger_id = victim.frontier(topic, hour).ledger_id
    _, found = victim.log(hour, ledger_id)
    key, value = found[0]
    victim.put_run(victim.partition(hour), key, flip(value, len(value) - 1))
    last = max(entry for entry, body in Run("", key, value).bodies() if body)  # others were dropped by compaction
    return [Expected("corrupt-entry", f"{full(topic)}, partition {name(hour)}, ledger {ledger_id}, entry {last}", 1)]


def damaged_run(victim: Victim) -> list[Expected]:
    """A bit of a run's header."""
    hour, topic = 9, victim.random.choice(SLOW)
    ledger_id = victim.frontier(topic, hour).ledger_id
    _, found = victim.log(hour, ledger_id)
    key, value = victim.random.choice(found)
    victim.put_run(victim.partition(hour), key, flip(value, 8))
    first = fmt.split_run_key(key)[1]
    return [Expected("corrupt-entry", f"{full(topic)}, partition {name(hour)}, ledger {ledger_id}, entry {first}", 1)]


def damaged_message_of_the_main_log(victim: Victim) -> list[Expected]:
    """A bit of a message that was due when it was sent."""
    topic_id = victim.topic_id("slow-0")
    with closing(victim.main()) as main, main.read() as raw:
        run = next(run for ledger_id, _ in catalog.ledgers(raw, topic_id) for run in runs(raw, "main", ledger_id)
                   if isinstance(run, Run) and run.kind == RunKind.MESSAGES)  # fmt: skip
        key, value = fmt.run_key(run.ledger_id, run.first_entry), bytes(run._value)
        address = f"main, ledger {run.ledger_id}, entry {run.limit - 1}"
    victim.put_run(victim.main(), key, flip(value, len(value) - 1))
    return [Expected("corrupt-entry", address, 1)]


def missing_run(victim: Victim) -> list[Expected]:
    """A run in the middle of a log is gone."""
    hour, topic = 10, "slow-0"
    ledger_id = victim.frontier(topic, hour).ledger_id
    _, found = victim.log(hour, ledger_id)
    key, value = found[1]
    victim.put_run(victim.partition(hour), key, None)
    address = f"{full(topic)}, partition {name(hour)}, ledger {ledger_id}"
    return [Expected("missing-entries", address, Run("", key, value).count)]


def missing_end(victim: Victim) -> list[Expected]:
    """The last run of a log is gone, as after a power cut with durability "none"."""
    hour, topic = 11, "unheard"
    record = victim.frontier(topic, hour)
    _, found = victim.log(hour, record.ledger_id)
    key, value = found[-1]
    victim.put_run(victim.partition(hour), key, None)
    count = Run("", key, value).count - (Run("", key, value).limit - record.absorbed_end)
    return [Expected("missing-entries", f"{full(topic)}, partition {name(hour)}", count)]


def missing_run_of_the_main_log(victim: Victim) -> list[Expected]:
    """A run in the middle of a main log is gone; which markers it held is not known."""
    topic_id = victim.topic_id("slow-2")
    with closing(victim.main()) as main, main.read() as raw:
        ledger_id = next(ledger_id for ledger_id, _ in catalog.ledgers(raw, topic_id))
        run = [run for run in runs(raw, "main", ledger_id) if isinstance(run, Run)][1]
        key, count = fmt.run_key(ledger_id, run.first_entry), run.count
    victim.put_run(victim.main(), key, None)
    return [Expected("missing-entries", f"main, ledger {ledger_id}", count)]


def damaged_record(victim: Victim) -> list[Expected]:
    """A bit of a frontier: what has fired of that log is not known, so nothing more is said of it."""
    key = fmt.frontier_key(victim.topic_id("slow-1"), start(12))
    with closing(victim.main()) as main, main.read() as raw:
        value = bytes(raw.get(key) or b"")
    victim.put_run(victim.main(), key, flip(value, 3))
    return [Expected("corrupt-record", f"main, FRONTIER {key.hex()}", 0)]


def quarantine(victim: Victim) -> list[Expected]:
    """An entry was found unreadable when it was to be delivered."""
    ledger_id = victim.frontier("slow-2", 13).ledger_id
    victim.put(fmt.quarantine_key(ledger_id, 2), b"partition x: body does not match its checksum")
    return [Expected("set-aside", f"ledger {ledger_id}, entry 2", 1)]


def wrong_holders(victim: Victim) -> list[Expected]:
    """The catalog counts a reference more than there is."""
    victim.change_partition(14, references=victim.references(14) + 1)
    return [Expected("wrong-holders", f"partition {name(14)}", 0)]


def released_and_not_deleted(victim: Victim) -> list[Expected]:
    """Every topic has released a partition, and it is still there."""
    for topic in (*SLOW, *TRIMMED, "unheard"):
        victim.put_frontier(topic, 15, victim.frontier(topic, 15)._replace(released=1))
    victim.change_partition(15, references=0)
    return [Expected("not-deleted", f"partition {name(15)}", 0)]


def deletion_not_finished(victim: Victim) -> list[Expected]:
    """A deletion was recorded and not carried out, of a partition that nothing needs."""
    hour = -500
    record = fmt.PartitionRecord(start(hour) + HOUR_MS, 1, PartitionState.DELETING, 0, 0)
    victim.put(fmt.partition_key(start(hour)), record.pack())
    return [Expected("not-deleted", f"partition {name(hour)}", 0)]


def orphan_directory(victim: Victim) -> list[Expected]:
    """A directory of a partition that is in no catalog."""
    _leave(victim.path / "partitions" / name(-1_000) / "g000001")
    return [Expected("orphan-directory", f"partitions/{name(-1_000)}", 0)]


def orphan_generation(victim: Victim) -> list[Expected]:
    """A generation beside the one in the catalog."""
    _leave(victim.path / "partitions" / name(0) / "g000007")
    return [Expected("orphan-generation", f"partitions/{name(0)}/g000007", 0)]


def leftovers(victim: Victim) -> list[Expected]:
    """What a crash leaves in staging/ and trash/."""
    _leave(victim.path / "staging" / "compact-x")
    _leave(victim.path / "trash" / "old")
    return [Expected("leftover", "staging/compact-x", 0), Expected("leftover", "trash/old", 0)]


def _leave(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "data.mdb").write_bytes(b"half")
    place = directory
    for path in (directory / "data.mdb", place, place.parent):
        then = path.stat().st_mtime - OLD_S
        if path.name not in ("staging", "trash", "partitions"):
            os.utime(path, (then, then))


def torn_snapshot(victim: Victim) -> list[Expected]:
    """A snapshot whose metadata was never written."""
    with closing(victim.partition(OPEN_HOUR)) as environment:
        with environment.read() as raw:
            key = next(key for key, _ in _rows(raw, Table.SNAPSHOT_META))
        environment.write(lambda transaction: transaction.raw.delete(key))
    return [Expected("incomplete-snapshot", f"partition {name(OPEN_HOUR)}", 0)]


def _rows(raw: object, table: Table) -> Iterator[tuple[bytes, bytes]]:
    return catalog.rows(raw, fmt.prefix(table))  # type: ignore[arg-type]


def damaged_main(victim: Victim) -> list[Expected]:
    """Pages of the main environment are zeros: nothing else can be found then."""
    with (victim.path / "main" / "data.mdb").open("r+b") as damaged:
        damaged.seek(4 * 4096)
        damaged.write(bytes(6 * 4096))
    return [Expected("damaged-main", "main", 0)]


ALONE: list[Plant] = [damaged_main]
"""Damage that hides all other."""

PLANTS: list[Plant] = [
    lost_by_a_frontier_that_ran_ahead,
    lost_where_markers_were_trimmed,
    closed_over_what_had_not_fired,
    doubled_marker,
    dangling_marker_of_no_entry,
    dangling_marker_of_another_log,
    stray_marker,
    deleted_too_early,
    missing_partition,
    unreadable_partition,
    swapped_partition,
    damaged_body,
    damaged_run,
    damaged_message_of_the_main_log,
    missing_run,
    missing_end,
    missing_run_of_the_main_log,
    damaged_record,
    quarantine,
    wrong_holders,
    released_and_not_deleted,
    deletion_not_finished,
    orphan_directory,
    orphan_generation,
    leftovers,
    torn_snapshot,
]
