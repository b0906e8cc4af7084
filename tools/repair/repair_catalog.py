"""Small records under repair: each from its copy, else from what partitions, markers and other records say of it.

Every small record stands twice, itself and its copy: where one of the two is whole the other is made anew, and nothing
is lost (`mend_records`). The rest is for records without a whole copy, as in a store of an earlier version. The key of
a damaged one still names it; of one that is gone not even that is left.

A log belongs to the topic that its frontier, its markers, a schedule or a rescheduled entry names, or to the only one
without a log. A ledger of a main log belongs to the topic into whose logs its markers point, or whose cursor,
acknowledgements or frontier name it. Where all that fails it becomes a topic of its own: messages that can be read are
not discarded because nothing says whose they are.

A subscription begins as early as the rest allows, rather twice than never: at the first ledger that its topic keeps;
what its acknowledgements say stays acknowledged. One that had acknowledged nothing singly, and loses its record and the
copy, is lost unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path

from pyroaring import BitMap

from ...store.codec import format as fmt
from ...store.codec.format import (
    CursorRecord,
    LedgerRecord,
    LedgerState,
    PartitionInfo,
    PartitionRecord,
    PartitionState,
    Table,
    TopicRecord,
    copied_key,
    copy_key,
)
from ...store.codec.run import Run, RunKind
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.env.transaction import Transaction
from ...store.errors import CorruptRecord, DuelogError
from ...store.log import catalog
from ...store.log.documents import Document
from ...store.log.ledger import find_tail
from ...store.log.scan import runs
from ...survey.contents import (
    SNAPSHOTS,
    kept_ledgers,
    main_ledgers,
    marker_runs,
    read_logs,
    run_ledgers,
    table_name,
    topic_ids,
    verify_record,
    was_used,
)
from ...upkeep.schedule_record import schedule_rows, unpack_schedule
from .repair_files import generations
from .repair_report import Account, Discarded

RECOVERED = "recovered"
"""Begin of the names of topics, and name of their subscriptions, of messages whose topic nothing tells."""


# -- rule one: the copy ------------------------------------------------------------------------


def mend_records(environment: Environment, account: Account) -> list[bytes]:
    """Mend the records of an environment; the keys of those that are lost, which are removed. O(small records).

    Those of snapshots are not looked at: a snapshot that is not whole is removed, and made again from its log.
    """

    def work(transaction: Transaction) -> list[bytes]:
        whole: dict[bytes, bytes] = {}
        damaged: dict[bytes, tuple[bytes, str]] = {}
        for view, value in transaction.raw.cursor():
            key = bytes(view)
            if key[0] == Table.RUN:
                break
            if key[0] not in SNAPSHOTS:
                try:
                    whole[key] = verify_record(key, value)
                except (CorruptRecord, ValueError) as error:
                    damaged[key] = bytes(value), str(error)
        keys = {copied_key(key) if key[0] == Table.COPY else key for key in (*whole, *damaged)}
        lost = [key for key in sorted(keys) if key not in whole and copy_key(key) not in whole]
        anew = [key for key in sorted(keys - {*lost}) if key not in whole or copy_key(key) in damaged]
        for key in lost:
            stands = key if key in damaged else copy_key(key)
            value, reason = damaged[stands]
            account.discard(Discarded(environment.name, 0, None, reason, stands + value))
            transaction.delete(key)
        for key in anew:
            transaction.put(key, whole[key] if key in whole else whole[copy_key(key)])
        account.count("records", len(keys), len(lost))
        for found, fate in (
            (anew, "made anew, one of the two places told the other"),
            (lost, "could not be read and have no copy"),
        ):
            for table, count in sorted(Counter(map(table_name, found)).items()):
                account.say(f"{environment.name}: {count} {table} records {fate}")
        return lost

    return account.write(environment, work)


def _counter(raw: Reads, name: str) -> int | None:
    key = fmt.counter_key(name)
    value = raw.get(key)
    return None if value is None else fmt.unpack_u64(fmt.unseal(key, value))


# -- topics, partitions, counters --------------------------------------------------------------


def mend_topics(transaction: Transaction, logs: Iterable[int], account: Account) -> None:
    """Have names and numbers of topics lead to each other.

    logs: ids of the topics that have a log in some partition. One that the catalog has not given out yet was lost with
    a later state of the catalog, and is made anew under a name that says so; others were deleted.
    """
    raw = transaction.raw
    by_name = {k[1:].decode(): TopicRecord.unpack(row) for k, row in catalog.rows(raw, fmt.prefix(Table.TOPIC))}
    by_id = {fmt.trailing_u32(key): row.decode() for key, row in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))}
    for topic_id, name in by_id.items():
        if name not in by_name:
            transaction.put(fmt.topic_key(name), TopicRecord(topic_id, 0).pack())
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
    transaction: Transaction,
    suffix: str,
    account: Account,
    *,
    topic_id: int | None = None,
    first_ledger: int | None = None,
) -> int:
    """Make a topic for messages whose topic nothing tells, with a subscription that holds them; returns its id."""
    name = f"persistent://public/default/{RECOVERED}-{suffix}"
    if topic_id is not None:  # which is the next that the counter gives out, or a later one
        _raise_counter(transaction, catalog.TOPICS, topic_id - 1)
    topic_id = catalog.add_topic(transaction, name, 0).topic_id
    if first_ledger is None:
        first_ledger = catalog.ledgers(transaction.raw, topic_id)[0][0]
    number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
    transaction.put(fmt.cursor_key(topic_id, RECOVERED), CursorRecord(number, 0, first_ledger, 0, 0).pack())
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
            known[place.start_ms] = PartitionRecord(info.end_ms, info.generation, PartitionState.OPEN, 0, 0)
            transaction.put(fmt.partition_key(place.start_ms), known[place.start_ms].pack())
            account.say(f"partition {directory.parent.name}: registered again, with {messages} messages")
    for topic_id, start_ms, _ in list(catalog.frontiers(transaction.raw)):
        if start_ms not in known:
            transaction.delete(fmt.frontier_key(topic_id, start_ms))
            account.say(f"topic {topic_id}: its frontier in partition {start_ms}, which is gone, removed")


def _described(directory: Path) -> tuple[PartitionInfo | None, int]:
    """Read the description of a generation and count its messages; None for one that was never used."""
    with suppress(DuelogError):
        if was_used(directory):
            with closing(Environment(directory, name=directory.parent.name, read_only=True)) as environment:
                fields = environment.get(fmt.PARTITION_INFO_KEY)
                with environment.read() as raw:
                    messages = sum(find_tail(raw, environment.name, ledger_id) for ledger_id in run_ledgers(raw))
            return None if fields is None else PartitionInfo.unpack(fields), messages
    return None, 0


def mend_counters(transaction: Transaction, logs: Mapping[int, int], account: Account) -> None:
    """Have counters go past every number in use. logs: ledger id -> topic id of the logs of all partitions."""
    raw = transaction.raw
    frontiers = list(catalog.frontiers(raw))
    cursors = list(catalog.cursors(raw))
    acked = [key for table in (Table.ACKED, Table.ATTEMPTS) for key, _ in catalog.rows(raw, fmt.prefix(table))]
    topics = [*topic_ids(raw), *logs.values(), *(row[0] for row in frontiers), *(row[0] for row in cursors)]
    ledgers = [*main_ledgers(raw), *logs, *run_ledgers(raw), *(fmt.ledger_of_subscription(key) for key in acked)]
    ledgers += [row.ledger_id for _, _, row in cursors]
    ledgers += [number for _, _, row in frontiers for number in (row.ledger_id, row.marker_ledger)]
    subscriptions = [row.subscription_id for _, _, row in cursors] + [fmt.leading_u32(key) for key in acked]
    documents = [Document.unpack(fields).version for _, fields in catalog.rows(raw, fmt.prefix(Table.DOCUMENT))]
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
    named = {fmt.trailing_u32(key) for key in lost if key[0] == Table.LOG}
    topics = topic_ids(main)
    none_deleted = _counter(main, catalog.TOPICS) == len(topics) + 1
    with environment.read() as raw:
        logs = read_logs(raw)
        missing = {
            topic_id: frontier.ledger_id
            for topic_id, start, frontier in catalog.frontiers(main)
            if start == start_ms and logs.get(topic_id) != frontier.ledger_id
        }
        for ledger_id in run_ledgers(raw):
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

        environment.write(register)
        account.say(f"{environment.name}: {len(missing)} logs registered again")
    return {**logs, **missing}


def _log_claims(main: Reads, raw: Reads, ledger_id: int, elsewhere: dict[int, int]) -> set[int]:
    """Topics that something says have a log of this ledger id."""
    owners = main_ledgers(main)
    found = {owners[run.ledger_id] for run in marker_runs(main, owners) if run.target == ledger_id}
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
    topics = topic_ids(raw)
    named = {fmt.trailing_u64(key): fmt.leading_u32(key) for key in lost if key[0] == Table.LEDGER}
    for ledger_id in sorted({*run_ledgers(raw), *named} - main_ledgers(raw).keys()):
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
        if all(record.state is not LedgerState.OPEN for _, record in catalog.ledgers(raw, topic_id)):
            catalog.add_ledger(transaction, topic_id, 0)
            account.say(f"topic {topic_id}: a new ledger begun")


def _owner(raw: Reads, ledger_id: int, topics: set[int], logs: dict[int, int]) -> int | None:
    """The topic that a ledger without a record belongs to, if the rest tells."""
    cursors = [(topic_id, row) for topic_id, _, row in catalog.cursors(raw)]
    subscriptions = {row.subscription_id: topic_id for topic_id, row in cursors}
    claims = {logs.get(run.target) for run in marker_runs(raw, [ledger_id])}
    claims |= {topic_id for topic_id, row in cursors if row.ledger_id == ledger_id}
    claims |= {topic_id for topic_id, _, row in catalog.frontiers(raw) if row.fired and row.marker_ledger == ledger_id}
    for key, _ in catalog.rows(raw, fmt.prefix(Table.ACKED)):
        if fmt.trailing_u64(key) == ledger_id:
            claims.add(subscriptions.get(fmt.leading_u32(key)))
    known = [topic_id for topic_id in claims & topics or topics if topic_id is not None]
    return known[0] if len(known) == 1 else None


def _ledger_record(raw: Reads, topic_id: int, ledger_id: int, logs: dict[int, int]) -> LedgerRecord:
    """Make the record of a ledger from its runs and its neighbours."""
    ledgers = catalog.ledgers(raw, topic_id)
    found = [run for run in runs(raw, "main", ledger_id) if isinstance(run, Run)]
    before = [row for number, row in ledgers if number < ledger_id]
    after = [row for number, row in ledgers if number > ledger_id]
    created_ms = before[-1].closed_ms if before else 0
    if not after:
        return LedgerRecord(created_ms, 0, 0, 0, LedgerState.OPEN)
    state = LedgerState.CLOSED
    passed = all(row.ledger_id > ledger_id for _, _, row in catalog.cursors(raw, topic_id))
    if passed and all(row.state is LedgerState.TRIMMING for row in before):
        gone = any(run.kind == RunKind.MARKERS and run.target not in logs for run in found)
        if not found or found[0].first_entry or gone:  # it was being removed
            state = LedgerState.TRIMMING
    latest = max((int(run.dues().max()) for run in found if run.kind == RunKind.MESSAGES), default=0)
    closed_ms = max(after[0].created_ms or _counter(raw, catalog.CLOCK) or 0, latest)
    size = sum(run.stored_bytes for run in found)
    return LedgerRecord(created_ms, closed_ms, find_tail(raw, "main", ledger_id), size, state)


# -- subscriptions -----------------------------------------------------------------------------


def mend_cursors(transaction: Transaction, lost: list[bytes], account: Account) -> None:
    """Make subscriptions anew whose records are lost. lost: keys of records that cannot be read."""
    raw = transaction.raw
    known = {row.subscription_id for _, _, row in catalog.cursors(raw)}
    owners = main_ledgers(raw)
    orphans: dict[int, set[int]] = {}  # the topics in which a subscription without a record has acknowledged entries
    for key, _ in catalog.rows(raw, fmt.prefix(Table.ACKED)):
        number, topic_id = fmt.leading_u32(key), owners.get(fmt.trailing_u64(key))
        if number not in known and topic_id is not None:
            orphans.setdefault(number, set()).add(topic_id)
    named = [key for key in lost if key[0] == Table.CURSOR]
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
        (Table.ACKED, "acknowledgements"),
        (Table.ATTEMPTS, "failed deliveries"),
        (Table.PAUSE, "ends of pauses"),
    ):
        bad = [key for key, _ in catalog.rows(raw, fmt.prefix(table)) if fmt.leading_u32(key) not in known]
        for key in bad:
            transaction.delete(key)
        if bad:
            account.say(f"main: removed {len(bad)} records of the {what} of subscriptions that are gone")
    for key in lost:
        if key[0] == Table.ACKED:
            _report_acked(raw, key, account)


def _begin(transaction: Transaction, topic_id: int, key: bytes, number: int | None, account: Account) -> None:
    """Write a cursor before the first ledger that is kept."""
    raw = transaction.raw
    kept = kept_ledgers(raw, topic_id)
    entries = sum(find_tail(raw, "main", ledger_id) for ledger_id in kept)
    acked = 0
    if number is None:
        number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
    else:
        acked = sum(len(BitMap.deserialize(fields)) for _, fields in catalog.acked(raw, number))
    transaction.put(key, CursorRecord(number, 0, min(kept, default=0), 0, 0).pack())
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
    topics = topic_ids(raw)
    rows = [*catalog.rows(raw, fmt.prefix(Table.LEDGER)), *catalog.rows(raw, fmt.prefix(Table.CURSOR))]
    bad = [key for key, _ in rows if fmt.leading_u32(key) not in topics]
    ledgers = {ledger_id for ledger_id, topic_id in main_ledgers(raw).items() if topic_id in topics}
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
