"""Damage of every kind, planted into a closed store, and what an audit must say of it.

Each kind keeps to partitions or topics of its own, so that all of them can be in one store and none hides another.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from duelog.partitions import cancellations
from duelog.partitions.due_column import dues_of
from duelog.partitions.partition import partition_path
from duelog.partitions.timespan import directory_name
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerState, PartitionRecord, PartitionState, Table
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run, RunKind, pack_markers
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail
from duelog.store.log.scan import runs
from tests.audit.histories import HOUR_MS, SLOW, START_MS, TRIMMED, full
from tests.conftest import present

OLD_S = 100 * 3_600.0


class Expected(NamedTuple):
    """A finding that an audit must have: its code, what its address contains, and how many entries it is about."""

    code: str
    address: str
    entries: int


class Log(NamedTuple):
    """One topic's log in one partition: the due time of every entry, the runs as they lie there."""

    address: str
    frontier: FrontierRecord
    dues: list[int]
    runs: list[tuple[bytes, bytes]]
    cancelled: BitMap

    @property
    def ledger_id(self) -> int:
        return self.frontier.ledger_id


class Victim:
    """A store to be damaged: its main environment and partitions, opened for one change at a time."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.random = random.Random(seed)

    def main(self) -> Environment:
        return Environment(self.path / "main", name="main")

    @contextmanager
    def reading(self) -> Iterator[Reads]:
        with closing(self.main()) as main, main.read() as raw:
            yield raw

    def record(self, hour: int) -> PartitionRecord:
        with self.reading() as raw:
            return dict(catalog.partitions(raw))[start(hour)]

    def directory(self, hour: int) -> Path:
        return partition_path(self.path, start(hour), self.record(hour).generation)

    def partition(self, hour: int) -> Environment:
        return Environment(self.directory(hour), name=f"partition {name(hour)}")

    def topic_id(self, topic: str) -> int:
        with self.reading() as raw:
            record = present(catalog.find_topic(raw, full(topic)))
            return record.topic_id

    def log(self, topic: str, hour: int) -> Log:
        topic_id = self.topic_id(topic)
        with self.reading() as raw:
            frontier = present(catalog.frontier(raw, topic_id, start(hour)))
            ledger_id = frontier.ledger_id
            cancelled = cancellations.members(raw, Table.CANCELLED, ledger_id)
        with closing(self.partition(hour)) as environment:
            with environment.read() as raw:
                tail = find_tail(raw, "", ledger_id)
                found = [(fmt.run_key(ledger_id, run.first_entry), bytes(run._value))
                         for run in runs(raw, "", ledger_id) if isinstance(run, Run)]  # fmt: skip
            dues = dues_of(environment, ledger_id, np.arange(tail, dtype=np.uint32)).tolist()
        return Log(f"{full(topic)}, partition {name(hour)}", frontier, dues, found, cancelled)

    def put(self, key: bytes, fields: bytes) -> None:
        with closing(self.main()) as main:
            main.write(lambda transaction: transaction.put(key, fields))

    def put_frontier(self, topic: str, hour: int, record: FrontierRecord) -> None:
        self.put(fmt.frontier_key(self.topic_id(topic), start(hour)), record.pack())

    def put_record(self, hour: int, record: PartitionRecord) -> None:
        self.put(fmt.partition_key(start(hour)), record.pack())

    def put_run(self, environment: Environment, key: bytes, value: bytes | None) -> None:
        with closing(environment):
            if value is None:
                environment.commit(lambda transaction: transaction.raw.delete(key))
            else:
                environment.commit(lambda transaction: transaction.raw.put(key, value))

    def append_marker(self, topic: str, hour: int, target: int, entry_id: int, due_ms: int) -> None:
        """One more marker at the end of a topic's main log."""
        topic_id = self.topic_id(topic)
        with self.reading() as raw:
            ledger_id = next(each for each, row in catalog.ledgers(raw, topic_id) if row.state is LedgerState.OPEN)
            key = fmt.run_key(ledger_id, find_tail(raw, "main", ledger_id))
        entries, dues = np.array([entry_id], np.uint32), np.array([due_ms])
        self.put_run(self.main(), key, pack_markers(key, target, start(hour), entries, dues, max(due_ms, start(hour))))

    def main_runs(self, topic: str) -> list[tuple[bytes, bytes, int]]:
        """The runs of a topic's main log as they lie there."""
        topic_id = self.topic_id(topic)
        with self.reading() as raw:
            return [
                (fmt.run_key(ledger_id, run.first_entry), bytes(run._value), run.kind)
                for ledger_id, _ in catalog.ledgers(raw, topic_id)
                for run in runs(raw, "main", ledger_id)
                if isinstance(run, Run)
            ]


def start(hour: int) -> int:
    """Start of the partition of an hour."""
    return START_MS + hour * HOUR_MS


def name(hour: int) -> str:
    """The name of an hour's directory."""
    return directory_name(start(hour))


def flip(value: bytes, at: int) -> bytes:
    """The value with one byte changed."""
    return value[:at] + bytes((value[at] ^ 0x40,)) + value[at + 1 :]


OPEN_HOUR = 16
"""The first partition that is not closed: part of it has fired."""

Plant = Callable[[Victim], list[Expected]]


def lost_by_a_frontier_that_ran_ahead(victim: Victim) -> list[Expected]:
    """The frontier of an open partition says that entries have fired that have no marker."""
    log = victim.log("slow-0", OPEN_HOUR)
    record = log.frontier
    pending = sorted(each for each in zip(log.dues, range(len(log.dues)), strict=True) if each > record[1:3])
    due_ms, entry_id = pending[3]
    passed = [entry for _, entry in pending[:4] if entry not in log.cancelled]
    fired = record.fired + len(passed)
    ahead = record._replace(due_ms=due_ms, entry_id=entry_id, absorbed_end=len(log.dues), fired=fired)
    victim.put_frontier("slow-0", OPEN_HOUR, ahead)
    return [Expected("lost", log.address, len(passed))]


def lost_where_markers_were_trimmed(victim: Victim) -> list[Expected]:
    """A topic without markers for it any more counts fewer fired messages than lie before its frontier."""
    log = victim.log("trimmed-0", 1)
    victim.put_frontier("trimmed-0", 1, log.frontier._replace(fired=log.frontier.fired - 2))
    return [Expected("lost", log.address, 2)]


def closed_over_what_had_not_fired(victim: Victim) -> list[Expected]:
    """The frontier of a closed partition lies before some of its entries; their markers are gone with it."""
    topic, hour = "trimmed-1", 3  # not compacted: acknowledged bodies would have been dropped
    log = victim.log(topic, hour)
    order = sorted((due, entry) for entry, due in enumerate(log.dues) if entry not in log.cancelled)
    due_ms, entry_id = order[-4]
    behind = log.frontier._replace(due_ms=due_ms, entry_id=entry_id, fired=log.frontier.fired - 3)
    victim.put_frontier(topic, hour, behind)
    return [Expected("lost", log.address, 3)]


def doubled_marker(victim: Victim) -> list[Expected]:
    """A marker once more at the end of the main log."""
    log = victim.log("slow-1", 1)
    entry_id = next(entry for entry in range(len(log.dues)) if entry not in log.cancelled)
    victim.append_marker("slow-1", 1, log.ledger_id, entry_id, log.dues[entry_id])
    return [Expected("doubled-marker", log.address, 1)]


def dangling_marker_of_no_entry(victim: Victim) -> list[Expected]:
    """A marker of an entry past the end of its log."""
    log = victim.log("slow-2", 1)
    victim.append_marker("slow-2", 1, log.ledger_id, len(log.dues) + 7, start(1) + 5)
    return [Expected("dangling-marker", log.address, 1)]


def dangling_marker_of_another_log(victim: Victim) -> list[Expected]:
    """A marker into a ledger that is not the topic's in that partition."""
    victim.append_marker("slow-3", 1, 9_999, 0, start(1) + 5)
    return [Expected("dangling-marker", f"{full('slow-3')}, partition {name(1)}, ledger 9999", 1)]


def stray_marker(victim: Victim) -> list[Expected]:
    """A marker of an entry that was cancelled."""
    log = victim.log("slow-3", 3)
    entry_id = log.cancelled.min()
    victim.append_marker("slow-3", 3, log.ledger_id, entry_id, log.dues[entry_id])
    return [Expected("stray-marker", log.address, 1)]


def deleted_too_early(victim: Victim) -> list[Expected]:
    """A partition that slow subscriptions still need is gone from catalog and disk; the topics' frontiers are not."""
    hour = 4
    with victim.reading() as raw:
        touched = {topic_id for topic_id, start_ms, _ in catalog.frontiers(raw) if start_ms == start(hour)}
        names = {topic: catalog.topic_name(raw, topic) for topic in touched}
        markers = {topic: _markers_into(raw, topic, start(hour)) for topic in touched if names[topic]}
    with closing(victim.main()) as main:
        main.write(lambda transaction: transaction.delete(fmt.partition_key(start(hour))))
    shutil.rmtree(victim.path / "partitions" / name(hour))
    place = f"partition {name(hour)}"
    return [Expected("deleted-too-early", f"{names[topic]}, {place}", count) for topic, count in markers.items()]


def _markers_into(raw: Reads, topic_id: int, start_ms: int) -> int:
    found = (run for ledger_id, _ in catalog.ledgers(raw, topic_id) for run in runs(raw, "main", ledger_id))
    return sum(
        run.count for run in found if isinstance(run, Run) and run.kind == RunKind.MARKERS and run.base_ms == start_ms
    )


def missing_partition(victim: Victim) -> list[Expected]:
    """The directory of a partition of the catalog is not there."""
    shutil.rmtree(victim.directory(5).parent)
    return [Expected("missing-partition", f"partition {name(5)}", 0)]


def unreadable_partition(victim: Victim) -> list[Expected]:
    """Pages of a partition's file are zeros."""
    _zero_pages(victim.directory(6))
    return [Expected("unreadable-partition", f"partition {name(6)}", 0)]


def swapped_partition(victim: Victim) -> list[Expected]:
    """The file of another partition lies in the place of one."""
    shutil.copy(victim.directory(1) / "data.mdb", victim.directory(7) / "data.mdb")
    return [Expected("unreadable-partition", f"partition {name(7)}", 0)]


def damaged_body(victim: Victim) -> list[Expected]:
    """A bit of one message's body."""
    log = victim.log(victim.random.choice(SLOW), 8)
    key, value = log.runs[0]
    victim.put_run(victim.partition(8), key, flip(value, len(value) - 1))
    last = max(entry for entry, body in Run("", key, value).bodies() if body)  # others were dropped by compaction
    return [Expected("corrupt-entry", f"{log.address}, ledger {log.ledger_id}, entry {last}", 1)]


def damaged_run(victim: Victim) -> list[Expected]:
    """A bit of a run's header."""
    log = victim.log(victim.random.choice(SLOW), 9)
    key, value = victim.random.choice(log.runs)
    victim.put_run(victim.partition(9), key, flip(value, 8))
    first = fmt.split_run_key(key)[1]
    return [Expected("corrupt-entry", f"{log.address}, ledger {log.ledger_id}, entry {first}", 1)]


def damaged_message_of_the_main_log(victim: Victim) -> list[Expected]:
    """A bit of a message that was due when it was sent."""
    key, value, _ = next(run for run in victim.main_runs("slow-0") if run[2] == RunKind.MESSAGES)
    victim.put_run(victim.main(), key, flip(value, len(value) - 1))
    run = Run("", key, value)
    return [Expected("corrupt-entry", f"main, ledger {run.ledger_id}, entry {run.limit - 1}", 1)]


def missing_run(victim: Victim) -> list[Expected]:
    """A run in the middle of a log is gone."""
    log = victim.log("slow-0", 10)
    key, value = log.runs[1]
    victim.put_run(victim.partition(10), key, None)
    return [Expected("missing-entries", f"{log.address}, ledger {log.ledger_id}", Run("", key, value).count)]


def missing_end(victim: Victim) -> list[Expected]:
    """The last run of a log is gone, as after a power cut with durability "none"."""
    log = victim.log("unheard", 11)
    key, value = log.runs[-1]
    victim.put_run(victim.partition(11), key, None)
    return [Expected("missing-entries", log.address, log.frontier.absorbed_end - Run("", key, value).first_entry)]


def missing_run_of_the_main_log(victim: Victim) -> list[Expected]:
    """A run in the middle of a main log is gone; which markers it held is not known."""
    key, value, _ = victim.main_runs("slow-2")[1]
    victim.put_run(victim.main(), key, None)
    run = Run("", key, value)
    return [Expected("missing-entries", f"main, ledger {run.ledger_id}", run.count)]


def damaged_record(victim: Victim) -> list[Expected]:
    """A bit of a frontier: what has fired of that log is not known, so nothing more is said of it."""
    key = fmt.frontier_key(victim.topic_id("slow-1"), start(12))
    with victim.reading() as raw:
        value = bytes(raw.get(key) or b"")
    victim.put_run(victim.main(), key, flip(value, 3))
    return [Expected("corrupt-record", f"main, FRONTIER {key.hex()}", 0)]


def quarantine(victim: Victim) -> list[Expected]:
    """An entry was found unreadable when it was to be delivered."""
    ledger_id = victim.log("slow-2", 13).ledger_id
    victim.put(fmt.quarantine_key(ledger_id, 2), b"partition x: body does not match its checksum")
    return [Expected("set-aside", f"ledger {ledger_id}, entry 2", 1)]


def wrong_holders(victim: Victim) -> list[Expected]:
    """The catalog counts a reference more than there is."""
    record = victim.record(14)
    victim.put_record(14, record._replace(references=record.references + 1))
    return [Expected("wrong-holders", f"partition {name(14)}", 0)]


def released_and_not_deleted(victim: Victim) -> list[Expected]:
    """Every topic has released a partition, and it is still there."""
    for topic in (*SLOW, *TRIMMED, "unheard"):
        victim.put_frontier(topic, 15, victim.log(topic, 15).frontier._replace(released=1))
    victim.put_record(15, victim.record(15)._replace(references=0))
    return [Expected("not-deleted", f"partition {name(15)}", 0)]


def deletion_not_finished(victim: Victim) -> list[Expected]:
    """A deletion was recorded and not carried out, of a partition that nothing needs."""
    hour = -500
    victim.put_record(hour, PartitionRecord(start(hour) + HOUR_MS, 1, PartitionState.DELETING, 0, 0))
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
    """Things that a crash leaves in staging/ and trash/."""
    _leave(victim.path / "staging" / "compact-x")
    _leave(victim.path / "trash" / "old")
    return [Expected("leftover", "staging/compact-x", 0), Expected("leftover", "trash/old", 0)]


def _leave(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "data.mdb").write_bytes(b"half")
    for path in (directory / "data.mdb", directory, directory.parent):
        then = path.stat().st_mtime - OLD_S
        if path.name not in ("staging", "trash", "partitions"):
            os.utime(path, (then, then))


def torn_snapshot(victim: Victim) -> list[Expected]:
    """A snapshot whose metadata was never written."""
    with closing(victim.partition(OPEN_HOUR)) as environment:
        with environment.read() as raw:
            key, _ = next(catalog.rows(raw, fmt.prefix(Table.SNAPSHOT_META)))
        environment.commit(lambda transaction: transaction.raw.delete(key))
    return [Expected("incomplete-snapshot", f"partition {name(OPEN_HOUR)}", 0)]


def damaged_main(victim: Victim) -> list[Expected]:
    """Pages of the main environment are zeros: nothing else can be found then."""
    _zero_pages(victim.path / "main")
    return [Expected("damaged-main", "main", 0)]


def _zero_pages(directory: Path) -> None:
    with (directory / "data.mdb").open("r+b") as damaged:
        damaged.seek(4 * 4096)
        damaged.write(bytes(6 * 4096))


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
