"""The catalog's part of a repair: topics, partitions, counters, and what belongs to nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

from ...check.check_partitions import was_used
from ...cleanup.mend import Discarded
from ...partitions.timespan import parse_directory_name
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
)
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.env.transaction import Transaction
from ...store.errors import DuelogError
from ...store.log import catalog
from ...store.log.documents import Document
from ...store.log.ledger import find_tail
from .repair_report import Account

RECOVERED = "recovered"
"""Begin of the names of topics, and name of their subscriptions, of messages whose topic nothing tells."""


def topic_ids(raw: Reads) -> set[int]:
    """The topics that have a name."""
    return {fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.TOPIC_NAME))}


def main_ledgers(raw: Reads) -> dict[int, int]:
    """Ledger id -> topic id of the main logs."""
    return {fmt.trailing_u64(key): fmt.leading_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(Table.LEDGER))}


def kept_ledgers(raw: Reads, topic_id: int) -> dict[int, LedgerRecord]:
    """The ledgers of a main log that are not being trimmed, by id."""
    return {number: row for number, row in catalog.ledgers(raw, topic_id) if row.state is not LedgerState.TRIMMING}


def mend_topics(main: Environment, logs: Iterable[int], account: Account) -> None:
    """Have names and numbers of topics lead to each other.

    logs: ids of the topics that have a log in some partition. One that the catalog has not given out yet was lost with
    a later state of the catalog, and is made anew under a name that says so; others were deleted.
    """

    def work(transaction: Transaction) -> None:
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
        fields = transaction.get(fmt.counter_key(catalog.TOPICS))
        following = None if fields is None else fmt.unpack_u64(fields)
        known = {*by_id, *(record.topic_id for record in by_name.values())}
        for topic_id in sorted(set(logs) - known):
            if following is not None and topic_id >= following:
                recover_topic(transaction, str(topic_id), account, topic_id)

    account.write(main, work)


def recover_topic(transaction: Transaction, suffix: str, account: Account, topic_id: int | None = None) -> int:
    """Make a topic for messages whose topic nothing tells, with a subscription that holds them; returns its id."""
    name = f"persistent://public/default/{RECOVERED}-{suffix}"
    if topic_id is not None:  # which is the next that the counter gives out, or a later one
        raise_counter(transaction, catalog.TOPICS, topic_id - 1)
    topic_id = catalog.add_topic(transaction, name, 0).topic_id
    ledger_id = catalog.ledgers(transaction.raw, topic_id)[0][0]
    number = catalog.take_numbers(transaction, catalog.SUBSCRIPTIONS)
    transaction.put(fmt.cursor_key(topic_id, RECOVERED), CursorRecord(number, 0, ledger_id, 0, 0).pack())
    account.say(f"topic {name}: made, with subscription {RECOVERED}, for messages whose topic nothing tells")
    return topic_id


def raise_counter(transaction: Transaction, name: str, used: int, spare: int = 0) -> bool:
    """Have a counter give out nothing up to `used`; False: it does not anyway. `spare`: how many more are left out."""
    fields = transaction.get(fmt.counter_key(name))
    if (1 if fields is None else fmt.unpack_u64(fields)) > used:
        return False
    transaction.put(fmt.counter_key(name), fmt.pack_u64(used + 1 + spare))
    return True


def mend_partitions(main: Environment, path: Path, account: Account) -> None:
    """Register the partitions that have a directory and no record; drop frontiers in partitions that have neither."""

    def work(transaction: Transaction) -> None:
        known = dict(catalog.partitions(transaction.raw))
        for directory in partition_directories(path):  # of several generations the oldest has all that the others have
            start_ms = parse_directory_name(directory.parent.name)
            info, messages = (None, 0) if start_ms in known else _described(directory)
            if info is None or info.start_ms != start_ms:
                continue
            known[start_ms] = PartitionRecord(info.end_ms, info.generation, PartitionState.OPEN, 0, 0)
            transaction.put(fmt.partition_key(start_ms), known[start_ms].pack())
            account.say(f"partition {directory.parent.name}: registered again, with {messages} messages")
        for topic_id, start_ms, _ in list(catalog.frontiers(transaction.raw)):
            if start_ms not in known:
                transaction.delete(fmt.frontier_key(topic_id, start_ms))
                account.say(f"topic {topic_id}: its frontier in partition {start_ms}, which is gone, removed")

    account.write(main, work)


def partition_directories(path: Path) -> list[Path]:
    """Directories of generations that lie where a partition's may, by start and generation."""
    found = []
    for directory in sorted((path / "partitions").glob("*/g*")):
        try:
            parse_directory_name(directory.parent.name)
        except ValueError:
            continue
        if directory.is_dir():
            found.append(directory)
    return found


def _described(directory: Path) -> tuple[PartitionInfo | None, int]:
    """What a generation says of itself, and how many messages it holds; None for one that was never used."""
    try:
        if not was_used(directory):
            return None, 0
        with closing(Environment(directory, name=directory.parent.name, read_only=True)) as environment:
            fields = environment.get(fmt.PARTITION_INFO_KEY)
            with environment.read() as raw:
                messages = sum(find_tail(raw, environment.name, ledger_id) for ledger_id in run_ledgers(raw))
    except DuelogError:
        return None, 0
    return None if fields is None else PartitionInfo.unpack(fields), messages


def run_ledgers(raw: Reads) -> list[int]:
    """The ledgers that have runs in an environment. O(ledgers)."""
    found = []
    cursor = raw.cursor()
    more = cursor.set_range(fmt.RUN_PREFIX)
    while more and len(key := bytes(cursor.key())) == fmt.RUN_KEY_BYTES:
        found.append(fmt.split_run_key(key)[0])
        more = cursor.set_range(fmt.run_key(found[-1] + 1, 0))
    return found


def mend_counters(main: Environment, logs: Mapping[int, int], account: Account) -> None:
    """Have counters go past every number in use. logs: ledger id -> topic id of the logs of all partitions."""

    def work(transaction: Transaction) -> None:
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
        used[catalog.DOCUMENTS] = documents
        for name, numbers in used.items():
            highest = max(numbers, default=0)
            if raise_counter(transaction, name, highest, spare=1_000):
                account.say(f"counter {name}: set past {highest}")
        mark_ms = max((row.due_ms for _, _, row in frontiers), default=0)
        if mark_ms > 0 and transaction.get(fmt.counter_key(catalog.CLOCK)) is None:
            transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(mark_ms))
            account.say("counter clock_mark: set to the latest due time that has fired")

    account.write(main, work)


def drop_strangers(main: Environment, account: Account) -> None:
    """Remove ledgers, cursors and runs that belong to no topic."""
    with main.read() as raw:
        topics = topic_ids(raw)
        rows = [*catalog.rows(raw, fmt.prefix(Table.LEDGER)), *catalog.rows(raw, fmt.prefix(Table.CURSOR))]
        bad = [key for key, _ in rows if fmt.leading_u32(key) not in topics]
        ledgers = {ledger_id for ledger_id, topic_id in main_ledgers(raw).items() if topic_id in topics}
        runs = []
        cursor = raw.cursor()
        more = cursor.set_range(fmt.RUN_PREFIX)
        while more:
            key = bytes(cursor.key())
            if len(key) != fmt.RUN_KEY_BYTES or fmt.split_run_key(key)[0] not in ledgers:
                ledger_id, first = fmt.split_run_key(key) if len(key) == fmt.RUN_KEY_BYTES else (0, 0)
                account.discard(
                    Discarded("main", ledger_id, first, "its ledger is in no catalog", bytes(cursor.value()))
                )
                runs.append(key)
            more = cursor.next()

    def work(transaction: Transaction) -> None:
        for key in bad:
            transaction.delete(key)
        for key in runs:
            transaction.raw.delete(key)

    if bad or runs:
        main.write(work)
        account.count("runs of no log", len(runs), len(runs))
        account.say(f"main: removed {len(bad) + len(runs)} records that belong to nothing")
