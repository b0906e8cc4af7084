"""Small records under repair: each from its copy, else from what partitions, markers and other records say of it.

Every small record stands twice, itself and its copy: where one of the two is whole the other is made anew, and nothing
is lost (`mend_records`). The rest is for records of which both are lost. The key of a damaged one still names it; of
one that is gone not even that is left.

A log belongs to the topic that its frontier, its markers, a schedule or a rescheduled entry names, or to the only one
without a log. A ledger of a main log belongs to the topic into whose logs its markers point, or whose cursor,
acknowledgements or frontier name it. Where all that fails it becomes a topic of its own: messages that can be read are
not discarded because nothing says whose they are.

A subscription begins as early as the rest allows, rather twice than never: at the first ledger that its topic keeps;
what its acknowledgements say stays acknowledged. One that had acknowledged nothing singly, and loses its record and the
copy, is lost unseen.

A frontier whose record is lost is at the last of what has fired: what has a marker, and what a snapshot says had. What
lies before the first marker that is kept has fired too, since entries fire in order, and its markers were trimmed. What
lies in between and has neither marker nor cancellation gets a marker now: it may be a late entry that was about to
fire, or one whose marker is lost. So none is lost, and at most those come twice.

A run of markers that cannot be read points at messages that lie whole in their partitions. Messages that are before
their frontier, were not cancelled and have no marker are the ones that it pointed at, or such as were trimmed: of these
there are more than the run had only where a topic has trimmed some of a log, and then the latest are taken. Where they
are exactly as many as the hole, and of one log, the run is written anew in its place, and what was acknowledged of it
stays so; else they get markers at the end of the log, and those that a subscription had acknowledged come again.

What was rescheduled names what it replaces, so of a cancellation and an admission either tells the other; a snapshot
holds what was pending when it was taken, so what it should hold and does not was cancelled. Messages that were
cancelled since, and by no rescheduling, cannot be told: they may be delivered, and how many those are at most is
counted.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ...partitions import cancellations
from ...partitions.cancellations import BLOCK_BITS
from ...partitions.due_column import DueBatch, scan_dues
from ...snapshot.snapshot_format import SnapshotState, Unusable, inspect_snapshots, read_part
from ...store.codec import format as fmt
from ...store.codec.frontier import HELD, NOTHING_FIRED, FrontierRecord, at_or_before
from ...store.codec.run import Int64s, Run, RunKind, UInt32s, pack_markers
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.env.transaction import LmdbTransaction as Transaction
from ...store.errors import CorruptRecord, DuelogError
from ...store.log import catalog
from ...store.log.documents import Document
from ...store.log.ledger import MAX_RUN_ENTRIES, find_tail
from ...store.log.scan import runs
from ...store.position import Position
from ...survey import contents
from ...survey.contents import Conditionals, Withdrawn, lost_admissions, lost_cancellations, passed_of, waited_for
from ...upkeep.schedule import schedule_rows, unpack_schedule
from .repair_files import Account, Discarded, generations

RECOVERED = "recovered"
"""Begin of the names of topics, and name of their subscriptions, of messages whose topic nothing tells."""


# -- rule one: the copy ------------------------------------------------------------------------


def mend_records(transaction: Transaction, name: str, account: Account) -> list[bytes]:
    """Mend the records of an environment; the keys of those that are lost, which are removed. O(small records).

    Those of snapshots are not looked at: a snapshot that is not whole is removed, and made again from its log.
    """
    whole: dict[bytes, bytes] = {}
    damaged: dict[bytes, tuple[bytes, str]] = {}
    for view, value in transaction.raw.cursor():
        key = bytes(view)
        if key[0] == fmt.Table.RUN:
            break
        if key[0] not in contents.SNAPSHOTS:
            try:
                whole[key], _ = contents.read_record(key, value)
            except (CorruptRecord, ValueError) as error:
                damaged[key] = bytes(value), str(error)
    keys = {fmt.copied_key(key) if key[0] == fmt.Table.COPY else key for key in (*whole, *damaged)}
    lost = [key for key in sorted(keys) if key not in whole and fmt.copy_key(key) not in whole]
    anew = [key for key in sorted(keys - {*lost}) if key not in whole or fmt.copy_key(key) in damaged]
    for key in lost:
        stands = key if key in damaged else fmt.copy_key(key)
        value, reason = damaged[stands]
        account.discard(Discarded(name, 0, None, reason, stands + value))
        transaction.delete(key)
    for key in anew:
        transaction.put(key, whole[key] if key in whole else whole[fmt.copy_key(key)])
    account.count("records", len(keys), len(lost))
    for found, fate in (
        (anew, "made anew, one of the two places told the other"),
        (lost, "could not be read and have no copy"),
    ):
        for table, count in sorted(Counter(map(contents.table_name, found)).items()):
            account.say(f"{name}: {count} {table} records {fate}")
    return lost


def _counter(raw: Reads, name: str) -> int | None:
    fields = catalog.fields_of(raw, fmt.counter_key(name))
    return None if fields is None else fmt.unpack_u64(fields)


# -- topics, partitions, counters --------------------------------------------------------------


def mend_topics(transaction: Transaction, logs: Iterable[int], account: Account) -> None:
    """Have names and numbers of topics lead to each other.

    logs: ids of the topics that have a log in some partition. One that the catalog has not given out yet was lost with
    a later state of the catalog, and is made anew under a name that says so; others were deleted.
    """
    raw = transaction.raw
    by_name = {k[1:].decode(): fmt.TopicRecord.unpack(row) for k, row in catalog.rows(raw, fmt.prefix(fmt.Table.TOPIC))}
    by_id = {fmt.trailing_u32(key): row.decode() for key, row in catalog.rows(raw, fmt.prefix(fmt.Table.TOPIC_NAME))}
    for topic_id, name in by_id.items():
        if name not in by_name:
            transaction.put(fmt.topic_key(name), fmt.TopicRecord(topic_id, 0).pack())
            account.say(f"topic {name}: registered again")
    for name, record in by_name.items():
        if record.topic_id not in by_id:
            transaction.put(fmt.topic_name_key(record.topic_id), name.encode())
            account.say(f"topic {name}: named again")
    following = _counter(raw, catalog.TOPICS)
    known = {*by_id, *(record.topic_id for record in by_name.values())}
    for topic_id in sorted(set(logs) - known):
        if following is not None and topic_id >= following:
            recover_topic(transaction, str(topic_id), account, topic_id=topic_id)


def recover_topic(
    transaction: Transaction, suffix: str, account: Account, *, topic_id: int | None = None,
    first_ledger: int | None = None,
) -> int:  # fmt: skip
    """Make a topic for messages whose topic nothing tells, with a subscription that holds them; returns its id."""
    name = f"persistent://public/default/{RECOVERED}-{suffix}"
    if topic_id is not None:  # which is the next that the counter gives out, or a later one
        _raise_counter(transaction, catalog.TOPICS, topic_id - 1)
    topic_id = catalog.add_topic(transaction, name, 0).topic_id
    if first_ledger is None:
        first_ledger = catalog.ledgers(transaction.raw, topic_id)[0][0]
    number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
    transaction.put(fmt.cursor_key(topic_id, RECOVERED), fmt.CursorRecord(number, 0, first_ledger, 0, 0).pack())
    account.say(f"topic {name}: made, with subscription {RECOVERED}, for messages whose topic nothing tells")
    return topic_id


def _raise_counter(transaction: Transaction, name: str, used: int, spare: int = 0) -> bool:
    """Have a counter give out nothing up to `used`; False: it does not anyway. `spare`: how many more are left out."""
    if (_counter(transaction.raw, name) or 1) > used:
        return False
    transaction.put(fmt.counter_key(name), fmt.pack_u64(used + 1 + spare))
    return True


def mend_partitions(transaction: Transaction, path: Path, account: Account) -> None:
    """Register the partitions that have a directory and no record; drop frontiers in partitions that have neither."""
    known = dict(catalog.partitions(transaction.raw))
    for place, directory in generations(path):  # of several generations the oldest has all that the others have
        info, messages = (None, 0) if place.start_ms in known else _described(directory)
        if info is not None and info.start_ms == place.start_ms:
            known[place.start_ms] = fmt.PartitionRecord(info.end_ms, info.generation, fmt.PartitionState.OPEN, 0, 0)
            transaction.put(fmt.partition_key(place.start_ms), known[place.start_ms].pack())
            account.say(f"partition {directory.parent.name}: registered again, with {messages} messages")
    for topic_id, start_ms, _ in list(catalog.frontiers(transaction.raw)):
        if start_ms not in known:
            transaction.delete(fmt.frontier_key(topic_id, start_ms))
            account.say(f"topic {topic_id}: its frontier in partition {start_ms}, which is gone, removed")


def _described(directory: Path) -> tuple[fmt.PartitionInfo | None, int]:
    """Read the description of a generation and count its messages; None for one that was never used."""
    with suppress(DuelogError):
        if contents.was_used(directory):
            with closing(Environment(directory, name=directory.parent.name, read_only=True)) as environment:
                fields = environment.get(fmt.PARTITION_INFO_KEY)
                with environment.read() as raw:
                    messages = sum(find_tail(raw, environment.name, each) for each in contents.run_ledgers(raw))
            return None if fields is None else fmt.PartitionInfo.unpack(fields), messages
    return None, 0


def mend_counters(transaction: Transaction, logs: Mapping[int, int], account: Account) -> None:
    """Have counters go past every number in use. logs: ledger id -> topic id of the logs of all partitions."""
    raw = transaction.raw
    frontiers = list(catalog.frontiers(raw))
    cursors = list(catalog.cursors(raw))
    acked = [key for table in (fmt.Table.ACKED, fmt.Table.ATTEMPTS) for key, _ in catalog.rows(raw, fmt.prefix(table))]
    topics = [*contents.topic_ids(raw), *logs.values(), *(row[0] for row in frontiers), *(row[0] for row in cursors)]
    ledgers = [*contents.main_ledgers(raw), *logs, *contents.run_ledgers(raw), *map(fmt.ledger_of_subscription, acked)]
    ledgers += [row.ledger_id for _, _, row in cursors]
    ledgers += [number for _, _, row in frontiers for number in (row.ledger_id, row.marker_ledger)]
    subscriptions = [row.subscription_id for _, _, row in cursors] + [fmt.leading_u32(key) for key in acked]
    documents = [Document.unpack(fields).version for _, fields in catalog.rows(raw, fmt.prefix(fmt.Table.DOCUMENT))]
    used = {catalog.LEDGERS: ledgers, catalog.TOPICS: topics, catalog.SUBSCRIPTIONS: subscriptions}
    for name, numbers in {**used, catalog.DOCUMENTS: documents}.items():
        if _raise_counter(transaction, name, max(numbers, default=0), spare=1_000):
            account.say(f"counter {name}: set past {max(numbers, default=0)}")
    mark_ms = max((row.due_ms for _, _, row in frontiers), default=0)
    if mark_ms > 0 and _counter(raw, catalog.CLOCK) is None:
        transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(mark_ms))
        account.say("counter clock_mark: set to the latest due time that has fired")


# -- logs of partitions, ledgers of main logs --------------------------------------------------


def mend_logs(
    transaction: Transaction, environment: Environment, start_ms: int, lost: Iterable[bytes],
    elsewhere: dict[int, int], account: Account,
) -> dict[int, int]:  # fmt: skip
    """Name every log of a partition; topic id -> ledger id.

    transaction: of the main environment. lost: keys of the partition's records that cannot be read. elsewhere: ledger
    id -> topic id of the logs of all partitions.
    """
    main = transaction.raw
    named = {fmt.trailing_u32(key) for key in lost if key[0] == fmt.Table.LOG}
    topics = contents.topic_ids(main)
    none_deleted = _counter(main, catalog.TOPICS) == len(topics) + 1
    with environment.read() as raw:
        logs = contents.read_logs(raw)
        missing = {
            topic_id: frontier.ledger_id
            for topic_id, start, frontier in catalog.frontiers(main)
            if start == start_ms and logs.get(topic_id) != frontier.ledger_id
        }
        for ledger_id in contents.run_ledgers(raw):
            if ledger_id in (*logs.values(), *missing.values()):
                continue
            free = topics - logs.keys() - missing.keys()
            claims = _log_claims(main, raw, ledger_id, elsewhere) & (free | named)
            claims = claims or named - missing.keys() or (free if none_deleted else set())
            topic_id = claims.pop() if len(claims) == 1 else None
            if topic_id is None:
                topic_id = recover_topic(transaction, f"ledger-{ledger_id}", account)
            missing[topic_id] = ledger_id
    if missing:

        def register(of_partition: Transaction) -> None:
            for topic_id, ledger_id in missing.items():
                of_partition.put(fmt.log_key(topic_id), fmt.pack_u64(ledger_id))

        environment.commit(register)
        account.say(f"{environment.name}: {len(missing)} logs registered again")
    return {**logs, **missing}


def _log_claims(main: Reads, raw: Reads, ledger_id: int, elsewhere: dict[int, int]) -> set[int]:
    """Topics that something says have a log of this ledger id."""
    owners = contents.main_ledgers(main)
    found = {owners[run.ledger_id] for run in contents.marker_runs(main, owners) if run.target == ledger_id}
    for key, fields in schedule_rows(main):
        with suppress(CorruptRecord):
            waiting = unpack_schedule(fields, "", "").next_id
            if waiting is not None and waiting.ledger_id == ledger_id:
                found.add(fmt.split_named_key(key)[0])
    for run in runs(raw, "", ledger_id):
        if isinstance(run, Run) and run.kind == RunKind.MESSAGES and run.conditional:
            found |= {elsewhere[old] for old in run.replaced()[0].tolist() if old in elsewhere}
    return found


def mend_ledgers(transaction: Transaction, lost: Iterable[bytes], logs: dict[int, int], account: Account) -> None:
    """Make records of ledgers anew; each topic has an open one afterwards.

    lost: keys of records that cannot be read. logs: ledger id -> topic id of the logs of all partitions.
    """
    raw = transaction.raw
    topics = contents.topic_ids(raw)
    named = {fmt.trailing_u64(key): fmt.leading_u32(key) for key in lost if key[0] == fmt.Table.LEDGER}
    for ledger_id in sorted({*contents.run_ledgers(raw), *named} - contents.main_ledgers(raw).keys()):
        topic_id = named.get(ledger_id) or _owner(raw, ledger_id, topics, logs)
        if topic_id is None:
            topic_id = recover_topic(transaction, f"ledger-{ledger_id}", account, first_ledger=ledger_id)
            topics.add(topic_id)
        elif topic_id not in topics:
            continue  # deleted with its topic
        record = _ledger_record(raw, topic_id, ledger_id, logs)
        transaction.put(fmt.ledger_key(topic_id, ledger_id), record.pack())
        account.say(f"topic {topic_id}: ledger {ledger_id} registered again, {record.entries} entries")
    for topic_id in sorted(topics):
        if all(record.state is not fmt.LedgerState.OPEN for _, record in catalog.ledgers(raw, topic_id)):
            catalog.add_ledger(transaction, topic_id, 0)
            account.say(f"topic {topic_id}: a new ledger begun")


def _owner(raw: Reads, ledger_id: int, topics: set[int], logs: dict[int, int]) -> int | None:
    """The topic that a ledger without a record belongs to, if the rest tells."""
    cursors = [(topic_id, row) for topic_id, _, row in catalog.cursors(raw)]
    subscriptions = {row.subscription_id: topic_id for topic_id, row in cursors}
    claims = {logs.get(run.target) for run in contents.marker_runs(raw, [ledger_id])}
    claims |= {topic_id for topic_id, row in cursors if row.ledger_id == ledger_id}
    claims |= {topic_id for topic_id, _, row in catalog.frontiers(raw) if row.fired and row.marker_ledger == ledger_id}
    for key, _ in catalog.rows(raw, fmt.prefix(fmt.Table.ACKED)):
        if fmt.trailing_u64(key) == ledger_id:
            claims.add(subscriptions.get(fmt.leading_u32(key)))
    known = [topic_id for topic_id in claims & topics or topics if topic_id is not None]
    return known[0] if len(known) == 1 else None


def _ledger_record(raw: Reads, topic_id: int, ledger_id: int, logs: dict[int, int]) -> fmt.LedgerRecord:
    """Make the record of a ledger from its runs and its neighbours."""
    ledgers = catalog.ledgers(raw, topic_id)
    found = [run for run in runs(raw, "main", ledger_id) if isinstance(run, Run)]
    before = [row for number, row in ledgers if number < ledger_id]
    after = [row for number, row in ledgers if number > ledger_id]
    created_ms = before[-1].closed_ms if before else 0
    if not after:
        return fmt.LedgerRecord(created_ms, 0, 0, 0, fmt.LedgerState.OPEN)
    state = fmt.LedgerState.CLOSED
    passed = all(row.ledger_id > ledger_id for _, _, row in catalog.cursors(raw, topic_id))
    if passed and all(row.state is fmt.LedgerState.TRIMMING for row in before):
        gone = any(run.kind == RunKind.MARKERS and run.target not in logs for run in found)
        if not found or found[0].first_entry or gone:  # it was being removed
            state = fmt.LedgerState.TRIMMING
    latest = max((int(run.dues().max()) for run in found if run.kind == RunKind.MESSAGES), default=0)
    closed_ms = max(after[0].created_ms or _counter(raw, catalog.CLOCK) or 0, latest)
    size = sum(run.stored_bytes for run in found)
    return fmt.LedgerRecord(created_ms, closed_ms, find_tail(raw, "main", ledger_id), size, state)


# -- subscriptions -----------------------------------------------------------------------------


def mend_cursors(transaction: Transaction, lost: list[bytes], account: Account) -> None:
    """Make subscriptions anew whose records are lost. lost: keys of records that cannot be read."""
    raw = transaction.raw
    known = {row.subscription_id for _, _, row in catalog.cursors(raw)}
    owners = contents.main_ledgers(raw)
    orphans: dict[int, set[int]] = {}  # the topics in which a subscription without a record has acknowledged entries
    for key, _ in catalog.rows(raw, fmt.prefix(fmt.Table.ACKED)):
        number, topic_id = fmt.leading_u32(key), owners.get(fmt.trailing_u64(key))
        if number not in known and topic_id is not None:
            orphans.setdefault(number, set()).add(topic_id)
    named = [key for key in lost if key[0] == fmt.Table.CURSOR]
    for key in named:
        topic_id = fmt.leading_u32(key)
        if catalog.topic_name(raw, topic_id) is None:
            continue
        numbers = [number for number, of in orphans.items() if of == {topic_id}]
        alone = len(numbers) == 1 and sum(fmt.leading_u32(other) == topic_id for other in named) == 1
        if alone:
            orphans.pop(numbers[0])
        _begin(transaction, topic_id, key, numbers[0] if alone else None, account)
    for number, of in orphans.items():
        _begin(transaction, min(of), fmt.cursor_key(min(of), f"{RECOVERED}-{number}"), number, account)
    known = {row.subscription_id for _, _, row in catalog.cursors(raw)}
    for table, what in (
        (fmt.Table.ACKED, "acknowledgements"),
        (fmt.Table.ATTEMPTS, "failed deliveries"),
        (fmt.Table.PAUSE, "ends of pauses"),
    ):
        bad = [key for key, _ in catalog.rows(raw, fmt.prefix(table)) if fmt.leading_u32(key) not in known]
        for key in bad:
            transaction.delete(key)
        if bad:
            account.say(f"main: removed {len(bad)} records of the {what} of subscriptions that are gone")
    for key in lost:
        if key[0] == fmt.Table.ACKED:
            _report_acked(raw, key, account)


def _begin(transaction: Transaction, topic_id: int, key: bytes, number: int | None, account: Account) -> None:
    raw = transaction.raw
    kept = contents.kept_ledgers(raw, topic_id)
    entries = sum(find_tail(raw, "main", ledger_id) for ledger_id in kept)
    acked = 0
    if number is None:
        number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
    else:
        acked = sum(len(BitMap.deserialize(fields)) for _, fields in catalog.acked(raw, number))
    transaction.put(key, fmt.CursorRecord(number, 0, min(kept, default=0), 0, 0).pack())
    account.report.again += entries - acked
    fate = f"begins at the start again, {acked} of {entries} entries stay acknowledged"
    name = fmt.split_named_key(key, "replace")[1]
    account.subscription(catalog.topic_name(raw, topic_id) or str(topic_id), name, fate)


def _report_acked(raw: Reads, key: bytes, account: Account) -> None:
    """Say what the loss of acknowledged entries means: they are delivered again."""
    number, ledger_id = fmt.leading_u32(key), fmt.trailing_u64(key)
    for topic_id, name, row in catalog.cursors(raw):
        if row.subscription_id == number and row.ledger_id <= ledger_id:
            start = row.next_entry if row.ledger_id == ledger_id else 0
            most = max(find_tail(raw, "main", ledger_id) - start, 0)
            account.report.again += most
            fate = f"up to {most} entries of ledger {ledger_id} that it had acknowledged may come again"
            account.subscription(catalog.topic_name(raw, topic_id) or str(topic_id), name, fate)


def drop_strangers(transaction: Transaction, account: Account) -> None:
    """Remove ledgers, cursors and runs that belong to no topic."""
    raw = transaction.raw
    topics = contents.topic_ids(raw)
    rows = [*catalog.rows(raw, fmt.prefix(fmt.Table.LEDGER)), *catalog.rows(raw, fmt.prefix(fmt.Table.CURSOR))]
    bad = [key for key, _ in rows if fmt.leading_u32(key) not in topics]
    ledgers = {ledger_id for ledger_id, topic_id in contents.main_ledgers(raw).items() if topic_id in topics}
    strangers: list[bytes] = []
    cursor = raw.cursor()
    more = cursor.set_range(fmt.RUN_PREFIX)
    while more:
        key = bytes(cursor.key())
        ledger_id, first = fmt.split_run_key(key) if len(key) == fmt.RUN_KEY_BYTES else (0, 0)
        if ledger_id not in ledgers:
            lost = Discarded("main", ledger_id, first, "its ledger is in no catalog", bytes(cursor.value()))
            account.discard(lost)
            strangers.append(key)
        more = cursor.next()
    for key in bad:
        transaction.delete(key)
    for key in strangers:
        raw.delete(key)
    if bad or strangers:
        account.count("runs of no log", len(strangers), len(strangers))
        account.say(f"main: removed {len(bad) + len(strangers)} records that belong to nothing")


class PartitionLog(NamedTuple):
    """The log of a topic in a partition that is open."""

    environment: Environment
    topic_id: int
    start_ms: int
    ledger_id: int


OpenLog = Callable[[int], AbstractContextManager[PartitionLog | None]]
"""The partition log with a ledger id, open inside the block; None: there is none."""


class Marked(NamedTuple):
    """The markers of one log: entries and due times in the order in which they fired, and the place of the last."""

    entries: UInt32s
    dues: Int64s
    last: Position

    def bitmap(self) -> BitMap:
        return BitMap(self.entries)

    def place(self, at: int) -> tuple[int, int]:
        return int(self.dues[at]), int(self.entries[at])

    def latest(self) -> tuple[int, int]:
        return self.place(int(np.lexsort((self.entries, self.dues))[-1])) if len(self.entries) else NOTHING_FIRED


NO_MARKERS = Marked(np.empty(0, np.uint32), np.empty(0, np.int64), Position(0, 0))


def read_marked(raw: Reads) -> dict[int, Marked]:
    """The markers in the main logs, as far as they can be read, by the ledger that they point into."""
    pieces: dict[int, list[Marked]] = {}
    for run in contents.marker_runs(raw, contents.main_ledgers(raw)):
        piece = Marked(run.targets().copy(), run.dues(), Position(run.ledger_id, run.limit - 1))
        pieces.setdefault(run.target, []).append(piece)
    return {
        target: Marked(np.concatenate([p.entries for p in of]), np.concatenate([p.dues for p in of]), of[-1].last)
        for target, of in pieces.items()
    }


def due_column(environment: Environment, ledger_id: int, admitted: BitMap) -> Int64s:
    """The due times of a log by entry id, HELD for what never fires or cannot be read."""
    with environment.read() as raw:
        tail = find_tail(raw, environment.name, ledger_id)
    dues = np.full(tail, HELD, dtype=np.int64)
    for batch in scan_dues(environment, ledger_id, 0, tail, admitted):
        if isinstance(batch, DueBatch):
            dues[batch.first_entry : batch.first_entry + len(batch.dues)] = batch.dues
    return dues


def _passed_in(dues: Int64s, place: tuple[int, int]) -> BitMap:
    """The entries of a due column at or before (due, entry), held ones left out."""
    entries = np.arange(len(dues), dtype=np.uint32)
    return BitMap(entries[at_or_before(entries, dues, *place) & (dues != HELD)])


def fired_in(dues: Int64s, frontier: FrontierRecord | None) -> BitMap:
    """The entries of a due column that have fired."""
    if frontier is None:
        return BitMap()
    entries = np.arange(len(dues), dtype=np.uint32)
    return BitMap(entries[frontier.has_fired(entries, dues) & (dues != HELD)])


# -- frontiers ---------------------------------------------------------------------------------


def mend_frontiers(
    transaction: Transaction, environment: Environment, start_ms: int, partition: fmt.PartitionRecord,
    logs: dict[int, int], lost: Iterable[bytes], markers: Mapping[int, Marked], account: Account,
) -> None:  # fmt: skip
    """Make the frontiers of a partition anew that are lost: those of `lost` keys, and of logs that have markers."""
    raw = transaction.raw
    here = [key for key in lost if key[0] == fmt.Table.FRONTIER and fmt.trailing_u64(key) == start_ms]
    damaged = {fmt.leading_u32(key) for key in here}
    closed = partition.state is fmt.PartitionState.CLOSED
    for topic_id, ledger_id in logs.items():
        if catalog.frontier(raw, topic_id, start_ms) is not None or catalog.topic_name(raw, topic_id) is None:
            continue
        marked = markers.get(ledger_id, NO_MARKERS)
        any_marked = len(marked.entries) > 0
        if not any_marked and topic_id not in damaged:
            continue
        dues = due_column(environment, ledger_id, cancellations.members(raw, fmt.Table.ADMITTED, ledger_id))
        known, reached = marked.bitmap(), marked.latest()
        for snapshot in inspect_snapshots(environment, ledger_id):
            if snapshot.state is SnapshotState.COMPLETE and snapshot.metadata is not None:
                metadata = snapshot.metadata
                place = (metadata.due_ms, metadata.entry_id)
                known |= _passed_in(dues[: metadata.absorbed_end], place)
                reached = max(reached, place)
        if closed:  # then all of it has fired
            reached = (partition.end_ms, 0)
        passed = _passed_in(dues, reached) - cancellations.members(raw, fmt.Table.CANCELLED, ledger_id)
        first = marked.place(0) if any_marked else NOTHING_FIRED
        again = BitMap() if closed else passed - known - _passed_in(dues, first)
        if reached[0] >= 0:
            log = PartitionLog(environment, topic_id, start_ms, ledger_id)
            last = _append_markers(transaction, log, again, dues) if again else marked.last
            released = int(closed and not any_marked)
            record = FrontierRecord(ledger_id, *reached, len(dues), len(passed), *last, released)
            transaction.put(fmt.frontier_key(topic_id, start_ms), record.pack())
        account.report.again += len(again)
        account.say(
            f"{environment.name}, ledger {ledger_id}: its frontier was lost, {len(passed)} entries have fired by what "
            f"is there, {len(again)} of them may come twice"
        )


def _append_markers(transaction: Transaction, log: PartitionLog, entries: BitMap, dues: Int64s) -> Position:
    """Append markers of entries of a log to the topic's open ledger, in due order; the last one's place."""
    raw = transaction.raw
    ledgers = catalog.ledgers(raw, log.topic_id)
    place = Position(next(number for number, row in ledgers if row.state is fmt.LedgerState.OPEN), 0)
    place = place._replace(entry_id=find_tail(raw, "main", place.ledger_id))
    _write_markers(transaction, place, log, entries, dues)
    return place._replace(entry_id=place.entry_id + len(entries) - 1)


def _write_markers(transaction: Transaction, place: Position, log: PartitionLog, entries: BitMap, dues: Int64s) -> None:
    ids = np.array(entries, dtype=np.uint32)
    ids = ids[np.lexsort((ids, dues[ids]))]
    for at in range(0, len(ids), MAX_RUN_ENTRIES):
        part = ids[at : at + MAX_RUN_ENTRIES]
        key = fmt.run_key(place.ledger_id, place.entry_id + at)
        transaction.raw.put(key, pack_markers(key, log.ledger_id, log.start_ms, part, dues[part]))


# -- markers -----------------------------------------------------------------------------------


class _Unmarked(NamedTuple):
    """A log of which entries have fired that have no marker."""

    log: PartitionLog
    frontier: FrontierRecord
    dues: Int64s
    entries: BitMap
    before: tuple[int, int]
    """(due, entry) of the last marker before the hole; what is at or before it was trimmed, or fired late."""


def restore_markers(
    transaction: Transaction, topic_id: int, holes: dict[int, BitMap], open_log: OpenLog, account: Account
) -> tuple[bool, int]:
    """Give entries markers again whose markers were lost with `holes` of the topic's main log.

    Returns whether all of the holes is whole again, and how many markers were appended instead.
    """
    size = sum(map(len, holes.values()))
    if not size:
        return False, 0
    begin = min(Position(ledger, entries.min()) for ledger, entries in holes.items() if entries)
    logs = _unmarked(transaction.raw, topic_id, begin, open_log)
    found = sorted((int(each.dues[entry]), entry, at) for at, each in enumerate(logs) for entry in each.entries)
    if len(found) > size:
        found = [row for row in found if row[:2] > logs[row[2]].before][-size:]
    taken = {at: BitMap(entry for _, entry, of in found if of == at) for _, _, at in found}
    ends = max(Position(ledger, entries.max()) for ledger, entries in holes.items() if entries)
    one_range = ends == begin._replace(entry_id=begin.entry_id + size - 1)
    if one_range and len(found) == size and len(taken) == 1:
        (at,) = taken
        log = logs[at]
        if found[0][:2] > log.before:
            cursor = transaction.raw.cursor()
            limit = fmt.run_key(begin.ledger_id, begin.entry_id + size)
            while cursor.set_range(fmt.run_key(*begin)) and bytes(cursor.key()) < limit:
                cursor.delete()
            _write_markers(transaction, begin, log.log, taken[at], log.dues)
            account.say(f"main, ledger {begin.ledger_id}: {size} markers made anew from {begin.entry_id} on")
            return True, 0
    for at, entries in taken.items():
        log = logs[at]
        last = _append_markers(transaction, log.log, entries, log.dues)
        moved = log.frontier._replace(marker_ledger=last.ledger_id, marker_entry=last.entry_id)
        transaction.put(fmt.frontier_key(topic_id, log.log.start_ms), moved.pack())
    if found:
        account.say(
            f"topic {topic_id}: {len(found)} messages whose markers are lost got new ones at the end of its log"
        )
    return False, len(found)


def _unmarked(raw: Reads, topic_id: int, hole: Position, open_log: OpenLog) -> list[_Unmarked]:
    """The logs of a topic in which entries have fired that have no marker."""
    marked: dict[int, BitMap] = {}
    before: dict[int, tuple[int, int]] = {}
    for run in contents.marker_runs(raw, contents.kept_ledgers(raw, topic_id)):
        marked.setdefault(run.target, BitMap()).update(run.targets().tolist())
        if (run.ledger_id, run.first_entry) < hole:
            pairs = zip(run.dues().tolist(), run.targets().tolist(), strict=True)
            before[run.target] = max(before.get(run.target, NOTHING_FIRED), *pairs)
    found = []
    for _, _, row in catalog.frontiers(raw, topic_id):
        if not row.fired or row.released:
            continue
        with open_log(row.ledger_id) as log:
            if log is None:
                continue
            dues = due_column(
                log.environment, row.ledger_id, cancellations.members(raw, fmt.Table.ADMITTED, row.ledger_id)
            )
        entries = fired_in(dues, row) - cancellations.members(raw, fmt.Table.CANCELLED, row.ledger_id)
        entries -= marked.get(row.ledger_id, BitMap())
        if entries:
            found.append(_Unmarked(log, row, dues, entries, before.get(row.ledger_id, NOTHING_FIRED)))
    return found


# -- cancellations -----------------------------------------------------------------------------


def mend_withdrawals(
    transaction: Transaction, lost: Iterable[bytes], conditionals: Conditionals, markers: Mapping[int, Marked],
    open_log: OpenLog, account: Account,
) -> None:  # fmt: skip
    """Make cancellations and admissions anew. lost: keys of records that cannot be read."""
    raw = transaction.raw
    certain = waited_for(raw)
    for target, marked in markers.items():
        certain.setdefault(target, BitMap()).update(marked.entries)

    def fired(ledger_id: int, entries: UInt32s) -> BitMap | None:
        with open_log(ledger_id) as log:
            if log is None:
                return None
            passed = passed_of(log.environment, catalog.frontier(raw, log.topic_id, log.start_ms), ledger_id, entries)
            return passed | markers.get(ledger_id, NO_MARKERS).bitmap()

    cancelled = lost_cancellations(Withdrawn(raw), conditionals, fired)
    blocks, unknown = (
        {(fmt.leading_u64(key), fmt.trailing_u32(key)) for key in lost if key[0] == table}
        for table in (fmt.Table.CANCELLED, fmt.Table.ADMITTED)
    )
    blocks |= {(ledger_id, each >> BLOCK_BITS) for ledger_id, of in cancelled.items() for each in of}
    for ledger_id in sorted({ledger_id for ledger_id, _ in blocks}):
        with open_log(ledger_id) as log:
            if log is not None:
                here = [block for each, block in blocks if each == ledger_id]
                _cancel(transaction, log, here, cancelled.get(ledger_id, BitMap()), account)
    for ledger_id, entries in lost_admissions(Withdrawn(raw), conditionals, certain, unknown).items():
        cancellations.add(transaction, fmt.Table.ADMITTED, ledger_id, entries)
        account.say(f"ADMITTED, ledger {ledger_id}: {len(entries)} rescheduled messages admitted again")


def _cancel(transaction: Transaction, log: PartitionLog, blocks: list[int], named: BitMap, account: Account) -> None:
    """Cancel what the rest tells was cancelled in some blocks of a log; count what else may have been."""
    raw, ledger_id = transaction.raw, log.ledger_id
    admitted = cancellations.members(raw, fmt.Table.ADMITTED, ledger_id)
    dues = due_column(log.environment, ledger_id, admitted)
    inside = BitMap()
    for block in blocks:
        inside.add_range(block << BLOCK_BITS, min(block + 1 << BLOCK_BITS, len(dues)))
    found = (named | _missing_in_snapshot(log.environment, ledger_id, dues, admitted)) & inside
    fresh = cancellations.add(transaction, fmt.Table.CANCELLED, ledger_id, found)
    fired = fired_in(dues, catalog.frontier(raw, log.topic_id, log.start_ms))
    held = BitMap(np.flatnonzero(dues < 0).astype(np.uint32))
    most = len(inside - found - fired - held)
    account.report.uncancelled += most
    account.say(
        f"CANCELLED, ledger {ledger_id}: {len(fresh)} entries cancelled again; of {most} that are still to fire it is "
        "not known whether they were cancelled"
    )


def _missing_in_snapshot(environment: Environment, ledger_id: int, dues: Int64s, admitted: BitMap) -> BitMap:
    """The entries that the newest snapshot of a log should hold and does not: they had been cancelled."""
    whole = inspect_snapshots(environment, ledger_id, read_parts=True)
    newest = [each for each in whole if each.state is SnapshotState.COMPLETE][-1:]
    for snapshot in newest:
        metadata = snapshot.metadata
        if metadata is None:
            continue
        pending = BitMap()
        try:
            for number in range(len(metadata.parts)):
                for _, saved in read_part(environment, ledger_id, snapshot.snapshot_id, metadata, number):
                    pending |= saved.bitmap()
        except Unusable:
            continue
        covered = dues[: metadata.tail]
        expected = BitMap(np.flatnonzero(covered >= 0).astype(np.uint32)) - admitted
        return expected - _passed_in(covered, (metadata.due_ms, metadata.entry_id)) - pending
    return BitMap()
